"""Linear layers are taken where torch's products are slow, by dtype, CPU and torch's own path: the
report, torch's transforms, graphs and quantization."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import precision, products, small_calls
from onepass.swapping.reasons import Reason
from tests.swap.foreign_linear import Plain
from tests.swap.linear_calls import FAST, SLOW, set_facts, swap
from tests.swap.reported import graph_of, names

pytestmark = pytest.mark.usefixtures("slow_products")


TORCHS, OURS = {"torch.nn.functional.linear"}, {"linear_kernel"}  # kernels


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))


def test_by_default_where_they_pay():
    ours = model()
    report = onepass.swap(ours, strict=True)
    assert [entry["name"] for entry in report.swapped] == ["0", "2"]
    assert small_calls.LINEAR_NOTE in report.notes


def test_a_note_says_of_the_others_why(monkeypatch):
    set_facts(monkeypatch, FAST)
    stock = nn.Sequential(*model(), nn.Linear(24, 8, dtype=torch.float64))
    report = onepass.swap(stock, strict=True)
    assert not report.swapped and not report.skipped and not report.unknown
    assert report.notes == [
        "2 linear layers keep torch's products: torch is as fast here in float32 products, by MKL "
        "on GenuineIntel",
        "1 linear layer keeps torch's products: torch is as fast here in float64 products",
    ]
    listed = swap(stock, strict=True)
    assert [entry["name"] for entry in listed.skipped] == ["0", "2", "3"] and not listed.notes
    listed = swap(stock, exclude="2")
    assert [entry["reason"].kind for entry in listed.skipped] == [
        Reason.AS_FAST, Reason.EXCLUDED, Reason.AS_FAST
    ]  # fmt: skip


def test_an_exported_program_does_not_ask_for_them(monkeypatch):
    monkeypatch.undo()
    products.facts.cache_clear()
    module, x = onepass.nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    options = {"need_weights": False}
    program = torch.export.export(module, (x, x, x), options)
    assert "mkldnn" not in program.graph_module.code


def test_a_part_without_a_weight_or_whose_weight_is_read_alone():
    late = nn.Linear(3, 3)
    late.weight = None
    model = nn.ModuleDict(dict(attention=nn.MultiheadAttention(8, 2), late=late))
    report = swap(model)
    assert not report.swapped and not report.skipped and not report.unknown
    assert not onepass.swap(nn.LazyLinear(8)).swapped


# ---- calls whose products torch computes as fast -------------------------------------------------


def products_of(module: nn.Module, x: torch.Tensor) -> set[tuple[str, str]]:
    return {(call["kernel"], call["reason"]) for call in onepass.explain(module, x).calls}


def kernels(module: nn.Module, x: torch.Tensor) -> set[str]:
    return {kernel for kernel, _ in products_of(module, x)}


def test_the_dtype_at_the_call_decides(monkeypatch):
    set_facts(monkeypatch, FAST._replace(vendor="AuthenticAMD", float16=False))
    monkeypatch.setitem(products.SMALL_PRODUCT, torch.bfloat16, 0)
    stock = model()
    ours = copy.deepcopy(stock)
    swap(ours)
    x = torch.randn(30, 24)
    torchs = {
        ("torch.nn.functional.linear", "torch is as fast here in bfloat16 products, by oneDNN")
    }
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), stock(x)) and products_of(ours, x) == torchs
    with torch.autocast("cpu", torch.float16):
        assert kernels(ours, x) == OURS
    ours.bfloat16(), stock.bfloat16()
    assert torch.equal(ours(x.bfloat16()), stock(x.bfloat16()))
    assert products_of(ours, x.bfloat16()) == torchs


def test_small_products_gain_beside_onednn(monkeypatch):
    """By multiply-adds, and by rows where there are no gradients."""
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    monkeypatch.setitem(products.SMALL_PRODUCT, torch.bfloat16, 40 * 64 * 64)
    ours = nn.Linear(64, 64).bfloat16()
    swap(ours)

    def are_ours(rows: int) -> bool:
        return kernels(ours, torch.randn(rows, 64).bfloat16()) != TORCHS

    assert are_ours(40) and not are_ours(41)
    for shape in ((64, 32), (32, 64)):  # as a classifier or a gate
        narrow = nn.Linear(*shape).bfloat16()
        swap(narrow)
        assert kernels(narrow, torch.randn(40, shape[0]).bfloat16()) == TORCHS
    monkeypatch.setattr(products, "SMALL_WEIGHT", 64 * 64 - 1)
    assert not are_ours(1)
    monkeypatch.setattr(products, "SMALL_WEIGHT", 64 * 64)
    monkeypatch.setitem(products.SMALL_PRODUCT, torch.bfloat16, 2 * 64 * 64)
    few = products.FEW_ROWS[torch.bfloat16]
    assert not are_ours(few)
    with torch.no_grad():
        assert are_ours(1) and are_ours(few) and not are_ours(few + 1)
        with torch.autocast("cpu", torch.bfloat16):  # it would cast a wider weight in each call
            assert are_ours(few)
            ours.float()
            assert not are_ours(few)


def test_a_trace_of_small_products_is_torchs(monkeypatch):
    """A trace is used at other sizes, where oneDNN is as fast."""
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    ours = model().bfloat16()
    swap(ours)
    x = torch.randn(2, 24).bfloat16()
    with torch.no_grad():
        assert kernels(ours, x) != TORCHS
        assert "onepass::" not in str(torch.jit.trace(ours, x).inlined_graph)


@pytest.mark.parametrize("has_dots", [False, True])
def test_float32_products_in_bfloat16_are_the_users_choice(monkeypatch, has_dots):
    """With dot products on AMD ours round their factors too, and are faster than oneDNN's."""
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    monkeypatch.setattr(precision, "HAS_PAIR_PRODUCTS", has_dots)
    ours, x = model(), torch.randn(30, 24)
    swap(ours)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        if has_dots:
            assert kernels(ours, x) == OURS and not swap(model()).skipped
            return
        ((kernel, reason),) = products_of(ours, x)
        assert kernel == "torch.nn.functional.linear" and "as matmul precision allows" in reason
        (entry, _) = swap(model()).skipped
        assert "as matmul precision allows" in entry["reason"]
        set_facts(monkeypatch, SLOW)  # torch's products have no such mode then
        assert kernels(ours, x) == OURS
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_compiled_calls_follow_the_dtype_too(monkeypatch, bfloat16):
    set_facts(monkeypatch, SLOW._replace(bfloat16=bfloat16))
    ours = model()
    swap(ours)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        code = graph_of(ours, torch.randn(30, 24))
    assert ("onepass.linear_forward" in code) is not bfloat16


def test_autocast_decides_what_is_small(monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1 << 40, 1 << 40)})
    ours, x = model(), torch.randn(30, 24)
    swap(ours)
    assert kernels(ours, x) == TORCHS
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels(ours, x) == OURS


def test_autocast_decides_what_is_swapped(monkeypatch):
    set_facts(monkeypatch, FAST._replace(bfloat16=False))
    assert not swap(model()).swapped
    with torch.autocast("cpu", torch.bfloat16):
        assert len(swap(model()).swapped) == 2
        # Where only small calls gain, calls whose weight autocast casts do not.
        set_facts(monkeypatch, SLOW._replace(bfloat16=True))
        assert not swap(model()).swapped
        assert len(swap(model().bfloat16()).swapped) == 2


def test_weights_are_not_copied_under_autocast():
    stock = nn.Linear(64, 64)
    ours = copy.deepcopy(stock)
    swap(ours)
    wide = copy.deepcopy(stock).double()
    x, saved = torch.randn(4, 64), []
    keeping = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with keeping, torch.autocast("cpu", torch.float16):
        y = ours(x.requires_grad_())
    assert any(tensor.data_ptr() == ours.weight.data_ptr() for tensor in saved)
    assert y.dtype is torch.float16
    dy = torch.randn(4, 64).half()
    y.backward(dy)
    with torch.autocast("cpu", torch.float16):
        stock(x).backward(dy)
    wide(x.double()).backward(dy.double())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.dtype is torch.float32
        ref, base = (m.get_parameter(name).grad for m in (wide, stock))
        numerics.assert_close(parameter.grad, ref, base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_of_what_it_leaves_and_of_subclasses(dtype):
    class Own(torch.Tensor):
        """A tensor class with its own F.linear, as of a quantised weight."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is nn.functional.linear:
                return torch.full((3, 6), 7.0)
            return super().__torch_function__(function, types, args, kwargs or {})

    stock = nn.Linear(8, 6, dtype=torch.float64)
    ours = copy.deepcopy(stock)
    swapped = nn.Linear(8, 6)
    swap(swapped)
    ours.__class__ = type(swapped)
    x = torch.randn(3, 8, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            expected = stock(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                ours(x)
        else:
            assert torch.equal(ours(x), expected)
        swapped.weight = nn.Parameter(torch.randn(6, 8).as_subclass(Own), requires_grad=False)
        assert torch.equal(swapped(torch.randn(3, 8)), torch.full((3, 6), 7.0))


@pytest.mark.parametrize("transformed", ["vmap", "per sample"])
def test_compiled_transforms_are_torchs(transformed):
    """When compiled, an autograd.Function under a transform would give no gradient, or raise."""
    func = torch.func
    stock = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = copy.deepcopy(stock)
    assert len(onepass.swap(ours).swapped) == 2
    x = torch.randn(3, 8)

    def run(module):
        if transformed == "vmap":
            return func.vmap(module)(x)

        def loss(parameters, row):
            return func.functional_call(module, parameters, (row,)).tanh().sum()

        parameters = dict(module.named_parameters())
        return func.vmap(func.grad(loss), (None, 0))(parameters, x)["0.weight"]

    torch._dynamo.reset()
    compiled = torch.compile(lambda: run(ours), backend="eager")
    torch.testing.assert_close(compiled(), run(stock))


def test_projections_of_multihead_attention():
    """Its parameters are not linear layers, except the last, whose weight it reads directly."""
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = copy.deepcopy(stock)
    onepass.swap(ours)
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        found = onepass.explain(lambda: ours(x, x, x, need_weights=False)).calls
        got, expected = (m(x, x, x, need_weights=False)[0] for m in (ours, stock))
    assert sum(call["count"] for call in found if call["kernel"] == "linear_kernel") == 2
    torch.testing.assert_close(got, expected)


# ---- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "facts", "text"),
    [
        (torch.float32, SLOW, None),
        (torch.float32, SLOW._replace(mkl=False), "float32 products, by BLAS on AuthenticAMD"),
        (torch.float32, FAST, "float32 products, by MKL on GenuineIntel"),
        (torch.bfloat16, FAST._replace(bfloat16=False), None),
        (torch.bfloat16, FAST, "bfloat16 products, by oneDNN"),
        (torch.bfloat16, SLOW._replace(bfloat16=True), None),  # small calls gain on AMD
        (torch.float16, SLOW._replace(float16=True), "float16 products, by oneDNN"),
        (torch.float16, FAST._replace(float16=False), None),
        (torch.float16, FAST, "float16 products, by oneDNN"),
        (torch.float64, SLOW, "float64 products"),
    ],
    ids=str,
)
def test_the_rule(dtype, facts, text, monkeypatch):
    set_facts(monkeypatch, facts)
    model = nn.Sequential(nn.Linear(16, 16, dtype=dtype), Plain().to(dtype))
    report = swap(model, strict=True)
    if text is None:
        # In a redirected forward each torch function takes longer than small products gain.
        in_layers_alone = dtype is torch.bfloat16 and facts.bfloat16
        assert names(report.swapped) == ({"0"} if in_layers_alone else {"0", "1"})
    else:
        assert names(report.skipped) == {"0", "1"} and not report.swapped
        for entry in report.skipped:
            assert entry["reason"] == f"torch is as fast here in {text}"
            assert entry["reason"].kind is Reason.AS_FAST


def test_facts_of_this_machine(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    facts_of = products.facts.__wrapped__
    facts, cpuinfo = facts_of(), Path("/proc/cpuinfo").read_text()
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    has_instructions = re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo) is not None
    if facts.vendor:
        assert facts.bfloat16 == (supported and has_instructions) and facts.vendor in cpuinfo
    for told in ("AVX2", "avx512_core", "AVX512_CORE_VNNI"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
        held = facts_of()
        assert not held.bfloat16 and not held.float16
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert facts_of() == facts._replace(float16=False)


AVX512 = "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f avx512bw avx512_vnni{}\n"


@pytest.mark.parametrize(
    "more, bfloat16", [("", False), (" avx512_bf16", True), (" amx_bf16", True)]
)
def test_oneDNN_imitates_bfloat16_where_avx512_has_none(more, bfloat16, monkeypatch):
    """torch reports support there; it takes as long as float32 or longer."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: AVX512.format(more))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    found = products.facts.__wrapped__()
    assert found.bfloat16 is bfloat16 and found.vendor == "GenuineIntel"


def test_oneDNN_can_be_switched_off(monkeypatch):
    set_facts(monkeypatch, FAST)
    assert products.as_fast(torch.bfloat16) is not None
    with torch.backends.mkldnn.flags(enabled=False):
        assert products.as_fast(torch.bfloat16) is None


def test_explain_says_whose_products_run_on_cuda():
    with FakeTensorMode(), _dispatch_log.record() as calls:
        x, weight = (torch.empty(8, 8, device="cuda") for _ in range(2))
        assert not products.gains(x, weight)
    assert [call["reason"] for call in calls] == ["torch's products on CUDA"]


def test_a_compiled_graph_of_a_single_row_has_torchs_product(monkeypatch):
    """In the same cases as eager: in float32 training."""
    set_facts(monkeypatch, SLOW)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (0, 0)})
    module, graphs = nn.Linear(64, 64), []
    swap(module)

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=keep)
    for rows, training in ((1, True), (1, False), (40, True), (41, True)):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(torch.ones(rows, 64)), module(torch.ones(rows, 64)))
    assert ["onepass.linear_forward" in graph for graph in graphs] == [False, True, True]


def test_an_export_keeps_dynamic_rows(monkeypatch):
    """The question whether a graph is for a single row makes no size a constant."""
    amd = products.Facts("AuthenticAMD", mkl=True, bfloat16=True, float16=True)
    monkeypatch.setattr(products, "facts", lambda: amd)
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1 << 22, 1 << 22)})
    layer = torch.nn.Linear(64, 64)
    assert onepass.swap(layer, kinds="linear").swapped
    sizes = torch.export.Dim("batch"), torch.export.Dim("rows")
    with torch.no_grad():
        program = torch.export.export(
            layer, (torch.randn(2, 48, 64),), dynamic_shapes={"input": dict(enumerate(sizes))}
        )
    x = torch.randn(3, 5, 64)
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    # Small calls are torch's in the module alone, and its sums have another order.
    numerics.assert_close(program.module()(x), exact, layer(x))


# ---- torch's dynamic quantization, in either order -----------------------------------------------


def quantized(stock: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(stock, {nn.Linear}, dtype=torch.qint8)


def test_quantized_layers_are_left_alone():
    stock = quantized(model())
    x = torch.randn(6, 24)
    expected = stock(x)
    report = onepass.swap(stock)
    assert not report.swapped and torch.equal(stock(x), expected)


def test_layers_are_quantized_after_unswap():
    """quantize_dynamic looks for the class itself and finds no swapped layer, which is said."""
    stock, ours = model(), model()
    ours.load_state_dict(stock.state_dict())
    swap(ours)
    with pytest.warns(UserWarning, match="passes over swapped linear .*unswap"):
        passed_over = quantized(ours)
    assert [type(module) for module in passed_over] == [type(module) for module in ours]
    assert not any(hasattr(module, "qconfig") for module in (*passed_over, *ours))
    onepass.unswap(ours)
    x = torch.randn(6, 24)
    assert torch.equal(quantized(ours)(x), quantized(stock)(x))


def test_a_swapped_layer_holds_its_qconfig_as_others_do():
    layer = nn.Linear(24, 48)
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    kept = layer.qconfig
    assert swap(layer).swapped and layer.qconfig is kept
    del layer.qconfig
    for missing in (lambda: layer.qconfig, lambda: delattr(layer, "qconfig")):
        with pytest.raises(AttributeError, match="qconfig"):
            missing()
    with pytest.warns(UserWarning, match="passes over"):
        layer.qconfig = None
    onepass.unswap(layer)
    assert layer.qconfig is None and vars(layer)["qconfig"] is None


def test_quantizing_other_classes_says_nothing():
    """Norms and dropouts are in none of quantize_dynamic's lists."""
    other = nn.Sequential(nn.LayerNorm(8), nn.Dropout(), nn.LSTM(8, 8))
    onepass.swap(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        assert type(quantized(other)[2]) is nn.LSTM
