"""torch.jit.trace and script, torch.export and the ONNX exporters, on programs that use onepass."""

import io
import re
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass._ops.decomposition import EXPORTED
from tests.all_families.test_opcheck import Recorded
from tests.support import fresh
from tests.support.calls import FUNCTIONS, flat
from tests.support.calls.call import FLOAT32
from tests.swap.foreign_attention import Plain
from tests.swap.foreign_norms import OnePlusRMS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",  # of sizes, as of torch's own multi-head attention
)


class Own(nn.Module):
    """onepass's own modules and functions, which no swap makes, and none undoes."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.layer = onepass.nn.AddLayerNorm(width, dropout_p=0.1)
        self.rms = onepass.nn.AddRMSNorm(width, weight_offset=1.0)
        self.scale, self.drop_path = onepass.nn.LayerScale(width, 0.5), onepass.nn.DropPath(0.3)
        self.modulation = nn.Linear(width, 5 * width)
        self.first = onepass.nn.ModulatedLayerNorm(width)
        self.second = onepass.nn.ModulatedRMSNorm(width)
        self.linear = onepass.nn.Linear(width, width)
        self.block = onepass.nn.GatedMLP(width, 24)
        self.loss = onepass.nn.CrossEntropyLoss(reduction="none", softcap=3.0, z_loss=0.1)
        self.linear_loss = onepass.nn.LinearCrossEntropyLoss(width, 24, bias=True, softcap=3.0)

    def forward(self, x):
        functional, table = onepass.functional, x[0].detach().cos()
        options = {"activation": "silu", "dropout_p": 0.1, "training": self.training}
        y, stream = self.layer(x.sin(), x, self.scale.gamma, self.drop_path.row_scale(x))
        y, stream = self.rms(y, stream)
        turned, _ = functional.rotary_embedding(y[:, None], None, table, table)
        added = functional.add_dropout(turned.squeeze(1), stream, 0.1, self.training)
        scale, shift, gate, *more = self.modulation(x.mean(1)).chunk(5, -1)
        modulated, _ = self.second(self.first(x, scale, shift), *more, x, gate)
        gated = self.drop_path(self.scale(self.block(x))) + functional.gelu_mul(x.repeat(1, 1, 2))
        linear = functional.linear(self.linear(x), self.linear.weight, residual=x, **options)
        rows = x.flatten(0, 1)
        target = rows.detach().argmax(-1)
        loss = self.loss(rows, target) + self.linear_loss(rows, target)
        return added + modulated + gated + linear + loss.unflatten(0, x.shape[:2])[..., None]


MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm": lambda: nn.RMSNorm(16, eps=1e-6),
    "foreign norm": lambda: OnePlusRMS(16),
    "Dropout": lambda: nn.Dropout(0.3),
    "attention": lambda: Plain(p=0.2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "own": Own,
}


def build(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), MODULES[name]())
    onepass.swap(model)
    return model


def saved_and_loaded(traced):
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


def output_and_gradients(model, x):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = model(x)
    wanted = [x, *(p for _, p in sorted(model.named_parameters()) if p.requires_grad)]
    return y, *torch.autograd.grad(y.square().sum(), wanted)


@pytest.mark.grid(2)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", MODULES)
def test_traced_as_called(name, trained, training, torchs_products):
    dtype = torch.float64 if name == "own" else torch.float32  # whose gradients cancel
    model = build(name).to(dtype).train(training).requires_grad_(trained)
    # A check compares outputs of two runs: stock with dropout fails it as well.
    drops = training and name in ("Dropout", "attention", "encoder layer", "own")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*does not match")
        traced = torch.jit.trace(model, torch.randn(2, 5, 16, dtype=dtype), check_trace=not drops)
    assert ("onepass::" in str(traced.inlined_graph)) == (training or name != "Dropout")
    traced = saved_and_loaded(traced)
    for x in (torch.randn(2, 5, 16, dtype=dtype), torch.randn(3, 4, 16, dtype=dtype)):
        for ours, called in zip(
            output_and_gradients(traced, x), output_and_gradients(model, x), strict=True
        ):
            torch.testing.assert_close(ours, called, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            assert not traced(x).requires_grad


# Modules that a swap makes, or of several operators; test_compiled.py has the functions.
@pytest.mark.grid
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", ["foreign norm", "Dropout", "encoder layer", "own"])
def test_exported_programs_train(name, strict, tmp_path):
    """With the module's gradients, from a file too; run_decompositions leaves raw operators."""
    model = build(name)
    rows = torch.export.Dim("rows", min=2, max=64)
    given = torch.randn(4, 5, 16)
    program = torch.export.export(model, (given,), dynamic_shapes=({0: rows},), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    x = torch.randn(3, 5, 16)
    for ours, called in zip(
        output_and_gradients(program.module(), x), output_and_gradients(model, x), strict=True
    ):
        torch.testing.assert_close(ours, called, rtol=1e-6, atol=1e-6)
    found = [str(node.target) for node in program.run_decompositions().graph.nodes]
    assert any(re.fullmatch(r"onepass\.\w+_forward\.default", target) for target in found)


def test_traced_without_gradients_trains():
    model = build("foreign norm")
    with torch.no_grad():
        traced = torch.jit.trace(model, torch.randn(2, 16))
    x = torch.randn(4, 16)
    for ours, called in zip(
        output_and_gradients(traced, x), output_and_gradients(model, x), strict=True
    ):
        assert torch.equal(ours, called)


def test_traced_dropout_draws_anew():
    traced = torch.jit.trace(build("Dropout"), torch.randn(2, 16), check_trace=False)
    x = torch.randn(64, 16)
    torch.manual_seed(1)
    first, second = traced(x), traced(x)
    torch.manual_seed(1)
    assert not torch.equal(first, second) and torch.equal(traced(x), first)


def test_traced_packed_attention():
    def packed(query, cu_seq):
        return onepass.functional.varlen_attention(query, query, query, cu_seq, cu_seq, 4, 4)

    cu_seq = torch.tensor([0, 3, 7], dtype=torch.int32)
    query = torch.randn(7, 2, 8)
    traced = saved_and_loaded(torch.jit.trace(packed, (query, cu_seq)))
    others = torch.tensor([0, 4, 7], dtype=torch.int32)
    assert torch.equal(traced(query, others), packed(query, others))


def test_normalized_shape_of_traced_sizes():
    def norm(x, weight):
        return onepass.functional.layer_norm(x, x.shape[-1:], weight)

    x, weight = torch.randn(3, 8), torch.randn(8)
    traced = torch.jit.trace(norm, (x, weight))
    x = torch.randn(5, 8)
    assert torch.equal(traced(x, weight), norm(x, weight))


# The call of a saved program, in another process.
ELSEWHERE = """
import sys, warnings, torch, onepass
warnings.simplefilter('ignore')
torch.set_num_threads(1)  # as here: torch's products depend on it
x, y = torch.load(sys.argv[2])
"""


def test_another_process_loads_a_trace(tmp_path):
    model = build("encoder layer").eval()
    x = torch.randn(2, 5, 16)
    torch.jit.save(torch.jit.trace(model, x), tmp_path / "model.pt")
    torch.save((x, model(x)), tmp_path / "call.pt")
    program = ELSEWHERE + "assert torch.equal(torch.jit.load(sys.argv[1])(x), y)"
    fresh.run(program, tmp_path / "model.pt", tmp_path / "call.pt", check=True)


@pytest.mark.parametrize("name", MODULES)
def test_script_says_what_to_do(name):
    model = build(name)
    held = {id(module) for module in model.modules()}
    with pytest.raises(RuntimeError, match=r"torch.jit.script: .* \(onepass.unswap\(model\) first"):
        torch.jit.script(model)
    assert held == {id(module) for module in model.modules()}
    if name != "own":
        onepass.unswap(model)
        x = torch.randn(2, 5, 16)
        if name != "attention":  # whose forward torch cannot script either
            torch.jit.script(model.eval())(x)


def test_an_export_with_dynamic_sizes_refuses_what_a_call_refuses():
    class Wrong(nn.Module):
        def forward(self, x):
            return onepass.functional.rms_norm(x, (8,), torch.ones(9))

    sizes = ({0: torch.export.Dim("rows")},)
    with pytest.raises(RuntimeError, match=r"^rms_norm: weight must have shape \(8,\), got \(9,\)"):
        torch.export.export(Wrong(), (torch.randn(4, 8),), dynamic_shapes=sizes)


def test_torchscript_exporter_says_what_to_do():
    pytest.importorskip("onnx")
    model = build("LayerNorm")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"torch.onnx.export: .*\(onepass.unswap\(model\)"):
            torch.onnx.export(model, (torch.randn(2, 16),), io.BytesIO(), dynamo=False)
    onepass.unswap(model)
    torch.onnx.export(model, (torch.randn(2, 16),), io.BytesIO(), dynamo=False)


@pytest.fixture(scope="module")
def everything():
    """A swapped model that calls every operator of a forward, its input and stock's output."""
    torch.manual_seed(0)
    parts = [make() for name, make in MODULES.items() if name != "own"]
    model = nn.Sequential(*parts).eval()
    x, own = torch.randn(2, 5, 16), Own().eval()
    y = own(model(x))
    onepass.swap(model)
    return nn.Sequential(*model, own).eval(), x, y


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.grid
def test_exporter_to_onnx(everything, exported, gradients):
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, x, y = everything
    with torch.set_grad_enabled(gradients):
        shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
        program = torch.export.export(model, (x,), dynamic_shapes=shapes) if exported else model
        if exported:
            assert "onepass" in str(program.graph)
        result = torch.onnx.export(program, (x,), dynamo=True, verbose=False)
    evaluator = ReferenceEvaluator(result.model_proto)
    (got,) = evaluator.run(None, {result.model_proto.graph.input[0].name: x.numpy()})
    # numpy computes the exported formula in float32, in another order of sums.
    torch.testing.assert_close(torch.from_numpy(got), y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_another_process_exports_a_saved_program_to_onnx(everything, tmp_path):
    """In a process where no fake has run, which would have registered the decompositions."""
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    model, x, y = everything
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, y), tmp_path / "call.pt")
    program = f"""{ELSEWHERE}
from onnx.reference import ReferenceEvaluator
program = torch.export.load(sys.argv[1])
model = torch.onnx.export(program, (x,), dynamo=True, verbose=False).model_proto
(got,) = ReferenceEvaluator(model).run(None, {{model.graph.input[0].name: x.numpy()}})
torch.testing.assert_close(torch.from_numpy(got), y, rtol=1e-5, atol=1e-5)
"""
    fresh.run(program, tmp_path / "model.pt2", tmp_path / "call.pt", check=True)


def decomposable(name: str, dtype: torch.dtype) -> list:
    """The operators that a call runs, and their arguments, where they have a decomposition."""
    call = FUNCTIONS[name]
    with Recorded() as recorded, torch.no_grad():
        call.results(call.typed(dtype))
    return [found for found in recorded.calls if found[0] in EXPORTED]


def in_float64(op, args, kwargs) -> list[torch.Tensor]:
    """The operator's results for the same numbers."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.dtype in narrow and name not in FLOAT32:
            given[name] = value.double()
        elif value in narrow:
            given[name] = torch.float64
    return flat(op(**given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decompositions(dtype):
    """Outputs are as exact as the operator's, over all calls of it, in the same dtype and shape."""
    draws = defaultdict(list)
    for name in FUNCTIONS:
        for op, args, kwargs in decomposable(name, dtype):
            found = EXPORTED[op](*args, **kwargs)
            if found is NotImplemented:  # it draws, or has lengths
                continue
            three = zip(
                flat(found), in_float64(op, args, kwargs), flat(op(*args, **kwargs)), strict=True
            )
            for number, (one, ref, ours) in enumerate(three):
                assert one.dtype is ours.dtype and one.shape == ours.shape, (name, number)
                # The third result of attention is its rounding error.
                if number < 2 or op is not torch.ops.onepass.attention_forward.default:
                    draws[op, number, one.dtype].append((one, ref, ours))
    missing = EXPORTED.keys() - {op for op, *_ in draws}
    assert not missing, missing
    for case, of in draws.items():
        numerics.assert_close(*map(list, zip(*of, strict=True)), str(case))


def test_no_decomposition_of_what_draws_or_has_lengths():
    ops = torch.ops.onepass
    x, seed = torch.randn(2, 4), torch.tensor([1, 2])
    formula = EXPORTED[ops.dropout_forward.default]
    assert formula(x, None, seed, 0.5, None) is NotImplemented
    formula = EXPORTED[ops.rotary_forward.default]
    turned = (x[None, None], None, x, x, None, 4, False, True, False, False)  # transposed
    assert formula(*turned) is NotImplemented
    formula = EXPORTED[ops.norm_forward.default]
    constants = ([4], False, 1e-5, 0.0, 0.5, None, None, False)
    assert formula(x, x, None, None, seed, *constants) is NotImplemented
    formula = EXPORTED[ops.attention_forward.default]
    query, cu_seq = torch.randn(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    assert formula(query, query, query, cu_seq_q=cu_seq, scale=1.0) is NotImplemented


def test_a_decomposition_leaves_shapes_to_the_fake():
    def norm(x):
        return onepass.functional.rms_norm(x.transpose(0, 1), (8,))

    x = torch.randn(4, 6, 8)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), norm(x)) and compiled(x).stride() == norm(x).stride()
