"""Linear layers: taken only where they are requested and torch's products are slow."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass._policy import products, small_calls
from onepass.swapping.reasons import Reason
from tests.swap.linear_calls import FAST, SLOW, set_facts, swap
from tests.swap.same_model import assert_computes_the_same

pytestmark = pytest.mark.usefixtures("slow_products")


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


class OwnForward(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


class Subclass(nn.Linear):
    pass


def test_what_is_left_as_it_is():
    lazy = nn.LazyLinear(8)
    own = nn.ModuleDict(
        dict(
            own=OwnForward(8, 8),
            lazy=lazy,
            subclass=Subclass(8, 8),
            ours=onepass.nn.Linear(8, 8),
            attention=nn.MultiheadAttention(8, 2),  # reads the weight of its out_proj alone
            late=nn.Linear(3, 3),
        )
    )
    own.late.weight = None
    report = swap(own)
    assert [entry["name"] for entry in report.swapped] == ["subclass"]
    (entry,) = report.unknown
    assert entry["name"] == "own" and entry["reason"].kind is Reason.OWN_FORWARD
    assert not onepass.swap(nn.LazyLinear(8)).swapped
    (entry,) = report.skipped
    assert entry["name"] == "lazy" and entry["reason"].kind is Reason.PARAMETER_CLASS
    assert type(own.subclass).__name__ == "Subclass" and isinstance(own.subclass, Subclass)


# ---- calls whose products torch computes as fast -------------------------------------------------


def kernels(module: nn.Module, x: torch.Tensor) -> set[tuple[str, str]]:
    return {(call["kernel"], call["reason"]) for call in onepass.explain(module, x).calls}


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
        assert torch.equal(ours(x), stock(x)) and kernels(ours, x) == torchs
    with torch.autocast("cpu", torch.float16):
        assert {kernel for kernel, _ in kernels(ours, x)} == {"linear_kernel"}
    ours.bfloat16(), stock.bfloat16()
    assert torch.equal(ours(x.bfloat16()), stock(x.bfloat16()))
    assert kernels(ours, x.bfloat16()) == torchs


def test_small_products_gain_beside_onednn(monkeypatch):
    """By multiply-adds, and by rows where there are no gradients."""
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    monkeypatch.setitem(products.SMALL_PRODUCT, torch.bfloat16, 40 * 64 * 64)
    ours = nn.Linear(64, 64).bfloat16()
    swap(ours)

    def are_ours(rows: int) -> bool:
        found = {kernel for kernel, _ in kernels(ours, torch.randn(rows, 64).bfloat16())}
        return found != {"torch.nn.functional.linear"}

    assert are_ours(40) and not are_ours(41)
    wide = ours
    for shape in ((64, 32), (32, 64)):  # as a classifier or a gate
        ours = nn.Linear(*shape).bfloat16()
        swap(ours)
        x = torch.randn(40, shape[0]).bfloat16()
        assert {kernel for kernel, _ in kernels(ours, x)} == {"torch.nn.functional.linear"}
    ours = wide
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
        assert {kernel for kernel, _ in kernels(ours, x)} != {"torch.nn.functional.linear"}
        assert "onepass::" not in str(torch.jit.trace(ours, x).inlined_graph)


def test_float32_products_in_bfloat16_are_the_users_choice(monkeypatch):
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    ours, x = model(), torch.randn(30, 24)
    swap(ours)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        ((kernel, reason),) = kernels(ours, x)
        assert kernel == "torch.nn.functional.linear" and "as matmul precision allows" in reason
        (entry, _) = swap(model()).skipped
        assert "as matmul precision allows" in entry["reason"]
        set_facts(monkeypatch, SLOW)  # torch's products have no such mode then
        assert {kernel for kernel, _ in kernels(ours, x)} == {"linear_kernel"}
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_compiled_calls_follow_the_dtype_too(monkeypatch, bfloat16):
    set_facts(monkeypatch, SLOW._replace(bfloat16=bfloat16))
    ours = model()
    swap(ours)
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        compiled(torch.randn(30, 24))
    (code,) = graphs
    assert ("onepass.linear_forward" in code) is not bfloat16


def test_autocast_decides_what_is_small(monkeypatch):
    monkeypatch.setattr(small_calls, "LEAST_LINEAR", {torch.float32: (1 << 40, 1 << 40)})
    ours, x = model(), torch.randn(30, 24)
    swap(ours)
    assert {kernel for kernel, _ in kernels(ours, x)} == {"torch.nn.functional.linear"}
    with torch.autocast("cpu", torch.bfloat16):
        assert {kernel for kernel, _ in kernels(ours, x)} == {"linear_kernel"}


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


# ---- torch.func, forward mode --------------------------------------------------------------------


@pytest.mark.parametrize("transformed", ["grad", "vmap", "per sample"])
def test_compiled_transforms_are_torchs(transformed):
    """When compiled, an autograd.Function under a transform would give no gradient, or raise."""
    func = torch.func
    stock = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = copy.deepcopy(stock)
    assert len(onepass.swap(ours).swapped) == 2
    x = torch.randn(3, 8)

    def run(module):
        if transformed == "grad":
            return func.grad(lambda x: module(x).tanh().sum())(x)
        if transformed == "vmap":
            return func.vmap(module)(x)

        def loss(parameters, row):
            return func.functional_call(module, parameters, (row,)).tanh().sum()

        parameters = dict(module.named_parameters())
        return func.vmap(func.grad(loss), (None, 0))(parameters, x)["0.weight"]

    torch._dynamo.reset()
    compiled = torch.compile(lambda: run(ours), backend="eager")
    torch.testing.assert_close(compiled(), run(stock))


# ---- whole models --------------------------------------------------------------------------------


def test_the_linear_layers_of_gpt2():
    """transformers' Conv1D: the weight is transposed, the forward is an addmm."""
    transformers = pytest.importorskip("transformers")
    settings = dict(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    ours = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    stock = copy.deepcopy(ours)
    report = onepass.swap(ours)
    swapped = [entry for entry in report.swapped if entry["from"].endswith("Conv1D")]
    assert len(swapped) == 2 * 4 and ours.lm_head.weight is ours.transformer.wte.weight
    ids = torch.arange(20).reshape(2, 10) % 32
    assert report.verify({"input_ids": ids, "labels": ids}).ok
    module, x = ours.transformer.h[0].mlp.c_fc, torch.randn(2, 9, 16)
    assert {kernel for kernel, _ in kernels(module, x)} == {"linear_kernel"}
    assert_computes_the_same(module, stock.transformer.h[0].mlp.c_fc, x)
    assert type(pickle.loads(pickle.dumps(module))) is type(module)
    onepass.unswap(ours)
    assert torch.equal(ours(ids).logits, stock(ids).logits)


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
