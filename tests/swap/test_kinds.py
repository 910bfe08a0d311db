"""What holds for every kind of swap: a table of modules, and the tests that each of them passes."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
import torch.fx
import torch.overrides
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import _dispatch_log, numerics
from onepass.swapping import plan
from onepass.swapping.matchers import COPIED
from onepass.swapping.reasons import Reason
from tests.swap import (
    attention_by_hand,
    foreign_attention,
    foreign_linear,
    foreign_norms,
    foreign_scans,
    small_models,
    test_loss,
    test_mlp,
    test_norm_constants,
    test_rotary,
)
from tests.swap.reported import names, types
from tests.swap.test_group_norms import net

pytestmark = pytest.mark.usefixtures("slow_products", "every_loss_gains", "probed_once")

BF16 = torch.bfloat16
DRAWS = 8  # judged together: one draw of stock's error is not enough, nor are five on a Zen 3


class Case(NamedTuple):
    """A module, as `it` in a model, and how it is swapped."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple]  # of so many rows
    kind: str
    to: str  # in the report's entries
    op: str  # the beginning of the name of ours
    calls: int = 1  # of it in a forward
    names: tuple[str, ...] = ("it",)
    pickles: bool = True


class Held(nn.Module):
    def __init__(self, it: nn.Module):
        super().__init__()
        self.it = it

    def forward(self, *args):
        return self.it(*args)


class NamedLayerNorm(nn.LayerNorm):
    """A subclass that inherits forward."""


class GroupNormOfRelu(nn.GroupNorm):
    activation = "relu"  # of its own, and not what ours means by it


def of(*sizes: int, dtype: torch.dtype = torch.float32) -> Callable:
    return lambda rows: (torch.randn(rows, *sizes).to(dtype),)


def channels_last(rows: int) -> tuple:
    return (torch.randn(rows, 3, 6, 6).to(memory_format=torch.channels_last),)


def conditioned(*sizes: int) -> Callable:
    return lambda rows: (torch.randn(rows, *sizes), torch.randn(rows, 64, requires_grad=True))


def norm(make: Callable, to: str, dtype=torch.float32) -> Case:
    op = "rms_norm" if "rms" in to.lower() else "layer_norm"
    return Case(lambda: make().to(dtype), of(7, 16, dtype=dtype), "norm", to, op)


def modulated(cls: str, *sizes: int, given: tuple = (), calls: int = 1, **options) -> Case:
    """diffusers', of 32 columns; `given` stands between input and conditioning."""

    def make() -> nn.Module:
        module = getattr(small_models.diffusers_part("normalization"), cls)(32, *sizes, **options)
        return module.eval()  # one drops labels

    def inputs(rows: int) -> tuple:
        is_by_labels = given and given[-1] is not None
        conditioning = () if is_by_labels else (torch.randn(rows, 32, requires_grad=True),)
        return torch.randn(rows, 5, 32), *given, *conditioning

    op = "modulated_rms_norm" if options.get("norm_type") == "rms_norm" else "modulated_layer_norm"
    names = ("it",) if "norm_type" in options else ("it", "it.norm")
    return Case(make, inputs, "norm", "", op, calls, names)


def resnet(dtype=torch.float32, order=torch.contiguous_format, calls: int = 2, **options) -> Case:
    options = dict(in_channels=8, groups=4, temb_channels=12) | options
    width, alone = options["temb_channels"], calls == 1 and dtype is BF16

    def make() -> nn.Module:
        return small_models.diffusers_part("resnet").ResnetBlock2D(**options).to(dtype)

    def inputs(rows: int) -> tuple:
        x = torch.randn(rows, 8, 6, 6, dtype=dtype).to(memory_format=order)
        # In channels last torch's own norm crashes where the input needs no gradient.
        temb = None if width is None else torch.randn(rows, width, dtype=dtype, requires_grad=True)
        return x.requires_grad_(), temb

    names = ("it", "it.norm2") if alone else ("it",)
    pickles = options.get("kernel") != "fir"  # which holds a lambda
    return Case(make, inputs, "norm", "", "group_norm", calls + alone, names, pickles)


def linear(make: Callable, to: str = "onepass.nn.Linear", dtype=torch.float32, **more) -> Case:
    inputs = of(7, 16, dtype=dtype)
    return Case(lambda: make().to(dtype), inputs, "linear", to, "linear", **more)


def group_norm(make: Callable, dtype: torch.dtype) -> Case:
    def inputs(rows: int) -> tuple:
        return (2 * torch.randn(rows, 8, 5, 5).to(dtype) + 1,)

    return Case(lambda: make(4, 8).to(dtype), inputs, "norm", "onepass.nn.GroupNorm", "group_norm")


def group_norm_silu(inputs: Callable, dtype=torch.float32, inplace: bool = False) -> Case:
    alone = ("it.6",) if dtype is BF16 else ()  # in float32 torch is as fast at it
    names, calls = ("it", "it.3", *alone), 3 + len(alone)
    return Case(lambda: net(dtype, inplace), inputs, "norm", "", "group_norm", calls, names)


def gated(make: Callable, dtype: torch.dtype = torch.float32) -> Case:
    inputs = of(3, test_mlp.WIDTH, dtype=dtype)
    return Case(lambda: make().to(dtype), inputs, "mlp", "gated", "gate")


def rotary(cls: type[nn.Module], inputs: Callable = test_rotary.inputs) -> Case:
    calls = 2 if cls is test_rotary.InOneClosure else 1
    return Case(cls, inputs, "rotary", "onepass.functional.rotary_embedding", "rotary", calls)


def scan(cls: type[nn.Module]) -> Case:
    return Case(cls, of(foreign_scans.TOKENS, 16), "scan", "onepass ", foreign_scans.FOUND[cls])


def attention(make: Callable, to: str, *names: str, calls: int = 1, inputs=None) -> Case:
    return Case(make, inputs or of(7, 16), "attention", to, "attention", calls, names or ("it",))


def attention_call(cls: type[nn.Module]) -> Case:
    return attention(cls, "onepass.functional.scaled_dot_product_attention")


def layer(cls: type[nn.Module], *parts: str, **more) -> Case:
    def make() -> nn.Module:
        return cls(16, 2, 32, dropout=0.0, batch_first=True)

    names = ("it", *(f"it.{part}" for part in parts))
    return attention(make, "onepass.nn.", *names, calls=len(parts), **more)


def with_memory(rows: int) -> tuple:
    return (torch.randn(rows, 7, 16), torch.randn(rows, 5, 16))


def loss(cls: type[nn.Module]) -> Case:
    to = "onepass.functional.cross_entropy"
    return Case(cls, of(test_loss.WIDTH), "loss", to, "cross_entropy")


def criterion(**options) -> Case:
    def make() -> nn.Module:
        return test_loss.Criterion(**options)

    to, names = "onepass.nn.CrossEntropyLoss", ("it.loss",)
    return Case(make, of(test_loss.VOCABULARY), "loss", to, "cross_entropy", names=names)


CASES = {
    "LayerNorm": norm(lambda: nn.LayerNorm(16), "onepass.nn.LayerNorm"),
    "subclass of LayerNorm": norm(lambda: NamedLayerNorm(16), "onepass.nn.LayerNorm"),
    "RMSNorm": norm(lambda: nn.RMSNorm(16), "onepass.nn.RMSNorm"),
    **{
        cls.__name__: norm(lambda cls=cls: cls(16), to)
        for cls, to in foreign_norms.ACCEPTED.items()
        if cls is not foreign_norms.OnePlusRMS  # which computes in float32, and is no reference
    },
    "RMS in bfloat16": norm(lambda: foreign_norms.RMS(16), "onepass rms_norm", BF16),
    "eps in its forward": norm(lambda: test_norm_constants.LayerNorm(16), "onepass layer_norm"),
    "GroupNorm": group_norm(nn.GroupNorm, BF16),
    "subclass of GroupNorm": group_norm(GroupNormOfRelu, torch.float16),
    "group norm, silu": group_norm_silu(of(3, 6, 6)),
    "group norm, silu in channels last": group_norm_silu(channels_last),
    "group norm, silu in place": group_norm_silu(of(3, 6, 6), inplace=True),
    "group norm, silu in bfloat16": group_norm_silu(of(3, 6, 6, dtype=BF16), BF16),
    "adaptive norm": Case(
        small_models.adaptive, conditioned(5, 64), "norm", "", "modulated", names=("it", "it.norm")
    ),
    "AdaLayerNorm": modulated("AdaLayerNorm", given=(None,), output_dim=64, chunk_dim=1),
    "AdaLayerNormZero": modulated("AdaLayerNormZero", given=(None,) * 3),
    "AdaLayerNormZero of labels": modulated(
        "AdaLayerNormZero",
        4,
        given=(torch.tensor([3, 1, 7]), torch.tensor([0, 2, 3]), torch.float32),
    ),
    "AdaLayerNormZero in float32": modulated(
        "AdaLayerNormZero", given=(None,) * 3, norm_type="fp32_layer_norm"
    ),
    "AdaLayerNormZeroSingle": modulated("AdaLayerNormZeroSingle"),
    "SD35AdaLayerNormZeroX": modulated("SD35AdaLayerNormZeroX", calls=2),
    "AdaLayerNormContinuous of RMS": modulated(
        "AdaLayerNormContinuous", 32, False, norm_type="rms_norm"
    ),
    "resnet: wider": resnet(out_channels=16),
    "resnet: up": resnet(up=True),
    "resnet: down": resnet(BF16, down=True),
    "resnet: sde": resnet(up=True, kernel="sde_vp"),
    "resnet: fir": resnet(down=True, kernel="fir"),
    "resnet: scale and shift": resnet(calls=1, time_embedding_norm="scale_shift"),
    "resnet: scale and shift in bfloat16": resnet(BF16, calls=1, time_embedding_norm="scale_shift"),
    "resnet: no time": resnet(temb_channels=None),
    "resnet: raw time": resnet(skip_time_act=True),
    "resnet: scaled": resnet(output_scale_factor=1.5, groups_out=2, eps=1e-5),
    "resnet: channels last": resnet(order=torch.channels_last),
    "resnet block": Case(
        small_models.resnet, conditioned(64, 4, 4), "norm", "silu", "group_norm", 2
    ),
    "Linear": linear(lambda: nn.Linear(16, 24)),
    "Linear without bias": linear(lambda: nn.Linear(16, 24, bias=False)),
    "Linear in bfloat16": linear(lambda: nn.Linear(16, 24), dtype=BF16),
    "Linear in float16": linear(lambda: nn.Linear(16, 24), dtype=torch.float16),
    "Conv1D": linear(small_models.conv1d, "onepass"),
    **{
        f"F.linear: {cls.__name__}": linear(cls, "onepass.functional.linear")
        for cls in foreign_linear.FOUND
    },
    "F.linear: Experts": linear(foreign_linear.Experts, "onepass.functional.linear", calls=7),
    **{f"gated: {name}": gated(make) for name, make in test_mlp.FOUND.items()},
    "gated: silu in bfloat16": gated(test_mlp.Llamas, BF16),
    "rotary: one table": rotary(test_rotary.Attention, lambda rows: test_rotary.inputs(rows, 1)),
    **{f"rotary: {cls.__name__}": rotary(cls) for cls in test_rotary.FOUND},
    **{f"scan: {cls.__name__}": scan(cls) for cls in foreign_scans.FOUND},
    **{f"attention: {cls.__name__}": attention_call(cls) for cls in foreign_attention.FOUND},
    "attention: beside torch's": attention(
        foreign_attention.BesideTorchs, "onepass.", "it", "it.other", calls=2
    ),
    "attention by hand": attention_call(attention_by_hand.NanoGPT),
    "MultiheadAttention": attention(
        foreign_attention.SelfAttention, "onepass.nn.MultiheadAttention", "it.attention"
    ),
    "encoder layer": layer(nn.TransformerEncoderLayer, "self_attn"),
    "decoder layer": layer(
        nn.TransformerDecoderLayer, "self_attn", "multihead_attn", inputs=with_memory
    ),
    **{f"loss: {cls.__name__}": loss(cls) for cls in test_loss.FOUND},
    "CrossEntropyLoss": criterion(),
    "CrossEntropyLoss with options": criterion(
        weight=torch.rand(test_loss.VOCABULARY), ignore_index=3, label_smoothing=0.2
    ),
}
# One of each kind and way; the others differ in what swap looks for.
KINDS = (
    "LayerNorm", "GammaBeta", "GroupNorm", "group norm, silu", "Linear", "Conv1D",
    "F.linear: Plain", "gated: silu", "gated: fused", "rotary: Attention",
    "scan: Convolution", "scan: Scan", "attention: beside torch's", "loss: LanguageModel",
)  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
kinds = pytest.mark.parametrize("name", KINDS)


def of_case(name: str) -> tuple[Case, nn.Module, nn.Module]:
    """(case, swapped, stock)"""
    case, stock = CASES[name], Held(CASES[name].make())
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model = copy.deepcopy(stock)
    onepass.swap(model, kinds=case.kind, strict=True)
    return case, model, stock


def ours(case: Case, run: Callable) -> int:
    """The number of calls of ours in `run`."""
    with _dispatch_log.record() as calls:
        run()
    own = [call for call in calls if call["level"] != _dispatch_log.TORCH]
    return sum(call["op"].startswith(case.op) for call in own)


def is_float(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def outputs_of(y: Tensor | tuple) -> tuple:
    return (y,) if isinstance(y, Tensor) else y


def results(model: nn.Module, inputs: tuple) -> list[Tensor]:
    """The outputs and the gradients of parameters, the first input and those that want one; of the
    latter stock's memory order is not compared."""
    wanted = [is_float(x) and (x is inputs[0] or x.requires_grad) for x in inputs]
    inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
    x, *more = (x.requires_grad_() for x, wants in zip(inputs, wanted, strict=True) if wants)
    outputs, generator = outputs_of(model(*inputs)), torch.Generator().manual_seed(2)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    leaves = [*more, x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    found = [*(g.contiguous() for g in found[: len(more)]), *found[len(more) :]]
    return [*(y.detach() for y in outputs), *(g for g in found if g is not None)]


def doubled(x):
    return x.double() if is_float(x) else torch.float64 if isinstance(x, torch.dtype) else x


def assert_same(case: Case, model: nn.Module, stock: nn.Module, of: Callable = results) -> None:
    """By the numerics rule, with float64 as the reference."""
    exact, draws = copy.deepcopy(stock).double(), [case.inputs(3) for _ in range(DRAWS)]
    found, base = ([of(m, x) for x in draws] for m in (model, stock))
    ref = [of(exact, tuple(map(doubled, x))) for x in draws]
    for got, wanted, torchs in zip(
        *(zip(*of, strict=True) for of in (found, ref, base)), strict=True
    ):
        assert got[0].dtype is torchs[0].dtype and got[0].stride() == torchs[0].stride()
        numerics.assert_close(list(got), list(wanted), list(torchs))


@every_case
def test_swapped_and_back(name):
    case, stock = CASES[name], Held(CASES[name].make())
    model, inputs = copy.deepcopy(stock), case.inputs(3)
    text, state, parameters = repr(model), list(model.state_dict()), list(model.parameters())
    signature = inspect.signature(model.it.forward)
    held = [(id(module), dict(vars(module))) for module in model.modules()]
    report = onepass.swap(model, kinds=case.kind, strict=True)
    assert {e["name"] for e in report.swapped} == set(case.names) and not report.unknown
    assert all(e["kind"] == case.kind and case.to in e["to"] for e in report.swapped)
    # An instance keeps everything but its class, which has the name of the former one.
    assert repr(model) == text and list(model.state_dict()) == state
    assert [(id(module), vars(module)) for module in model.modules()] == held
    assert all(map(lambda a, b: a is b, model.parameters(), parameters))
    assert isinstance(model.it, type(stock.it))
    if "functional" in case.to:
        assert inspect.signature(model.it.forward) == signature
    assert ours(case, lambda: model(*inputs)) == case.calls
    assert not ours(case, lambda: stock(*inputs))  # another instance has not changed
    assert_same(case, model, stock)
    assert report.verify(*inputs).ok
    y, arguments = outputs_of(model(*inputs)), inspect.signature(stock.it.forward).parameters
    by_names = model.it(**dict(zip(arguments, inputs, strict=False)))
    assert all(map(torch.equal, outputs_of(by_names), y))
    twins = [copy.deepcopy(model)]
    if case.pickles:
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert types(twin) == types(model)
        assert all(map(torch.equal, outputs_of(twin(*inputs)), y))
    again = onepass.swap(model, kinds=case.kind)
    assert again.swapped == report.swapped and "been swapped before" in " ".join(again.notes)
    assert onepass.unswap(model) == [e["name"] for e in report.swapped]
    assert types(model) == types(stock) and not ours(case, lambda: model(*inputs))
    assert all(map(torch.equal, *(outputs_of(m(*inputs)) for m in (model, stock))))


@kinds
def test_autocast(name):
    case, model, stock = of_case(name)

    def outputs(module: nn.Module, inputs: tuple) -> list[Tensor]:
        enabled = inputs[0].dtype is not torch.float64
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled):
            assert module is not model or ours(case, lambda: module(*inputs)) == case.calls
            return [module(*inputs)]

    assert_same(case, model, stock, outputs)


@kinds
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_it_recompute_with_it(name, reentrant):
    case, model, _ = of_case(name)

    def checkpointed(*inputs):
        return checkpoint(model, *inputs, use_reentrant=reentrant)

    checkpointed.parameters = model.parameters
    gradients = []
    for run in (model, checkpointed):
        torch.manual_seed(0)
        x, *more = case.inputs(3)
        run(x.requires_grad_(), *more).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))


SLOWLY = ("attention: WithProcessor", "attention: Unflattened")


@pytest.mark.parametrize(
    "name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)]
)
def test_compiled_in_one_graph(name):
    case, model, _ = of_case(name)
    torch._dynamo.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled, graphs = torch.compile(model, backend=backend, fullgraph=True, dynamic=True), 0
    for rows in (4, 5):
        inputs = case.inputs(rows)
        for found, expected in zip(results(compiled, inputs), results(model, inputs), strict=True):
            torch.testing.assert_close(found, expected)
        graphs = graphs or len(backend.graphs)
    assert len(backend.graphs) == graphs
    assert "onepass." in backend.graphs[-1].print_readable(print_output=False)


@kinds
def test_exported_with_any_number_of_rows(name):
    case, model, _ = of_case(name)
    inputs, rows = case.inputs(3), torch.export.Dim("rows", min=2, max=99)
    with torch.no_grad():
        shapes = ({0: rows},) * len(inputs)
        program = torch.export.export(model, inputs, dynamic_shapes=(shapes,))
        assert program.graph_module.code.count("onepass.") >= case.calls
        for given in (inputs, case.inputs(5)):
            assert torch.equal(program.module()(*given), model(*given))


@pytest.mark.parametrize("name", [name for name in KINDS if CASES[name].kind != "attention"])
def test_transforms(name):
    """Per-sample gradients of the parameters, and a derivative in forward mode, which torch's own
    attention does not have."""
    case, model, stock = of_case(name)

    def transformed(module: nn.Module, inputs: tuple) -> list[Tensor]:
        def loss(parameters, *row):
            row = [x[None] for x in row]
            return torch.func.functional_call(module, parameters, tuple(row)).square().sum()

        parameters = dict(module.named_parameters())
        in_dims = (None, *(0 for _ in inputs))
        samples = torch.func.vmap(torch.func.grad(loss), in_dims)(parameters, *inputs)
        x, *more = inputs
        forward = torch.func.jvp(lambda x: module(x, *more), (x,), (torch.ones_like(x),))
        return [*samples.values(), *forward]

    assert_same(case, model, stock, transformed)


@kinds
def test_on_meta_and_loaded_later(name):
    case, model, stock = of_case(name)
    late = Held(case.make()).to("meta")
    with plan.verdicts_shared():  # proven anew
        assert names(onepass.swap(late, kinds=case.kind).swapped) == set(case.names)
    inputs = case.inputs(3)
    y = late(*(x.to("meta") for x in inputs))
    assert y.is_meta and y.shape == model(*inputs).shape
    late.to_empty(device="cpu").load_state_dict(stock.state_dict())
    assert torch.equal(late(*inputs), model(*inputs))


@pytest.mark.parametrize(
    "name", ["RMSNorm", *(n for n in KINDS if CASES[n].kind not in (*COPIED, "attention", "loss"))]
)
def test_traced_by_fx(name):
    """A graph calls a swapped module as a whole, parts of a Sequential as stock's, and the root as
    it was written."""
    case, model, _ = of_case(name)
    inputs = case.inputs(3)
    graph = torch.fx.symbolic_trace(nn.Sequential(model.it))
    if name != "group norm, silu":
        assert ours(case, lambda: graph(*inputs)) == case.calls
    torch.testing.assert_close(graph(*inputs), model(*inputs))
    if case.kind == "norm" and name != "GammaBeta":
        root = torch.fx.symbolic_trace(model.it)
        torch.testing.assert_close(root(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("attention: Plain", "scaled_dot_product_attention"),
        ("F.linear: Plain", "linear"),
        ("rotary: Attention", "rotary_embedding"),
        ("scan: Convolution", "causal_conv1d"),
        ("loss: LanguageModel", "cross_entropy"),
    ],
)
def test_modes_further_out_see_a_redirected_call(name, function):
    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    (case, model, _), found = of_case(name), []
    with Names():
        assert ours(case, lambda: model(*case.inputs(3))) == 1
    assert function in found


PROVEN = (
    "GammaBeta", "gated: silu", "rotary: Attention", "scan: Scan", "adaptive norm", "resnet block",
)  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_nothing_is_taken_without_a_probe(name):
    case = CASES[name]
    model = Held(case.make())
    report = onepass.swap(model, kinds=case.kind, probe=False)
    assert "it" not in names(report.swapped)
    reasons = [e["reason"].kind for e in (*report.skipped, *report.unknown) if e["name"] == "it"]
    assert reasons == [Reason.PROBE_OFF] * (case.kind != "mlp")  # a block is listed by its name


@pytest.mark.parametrize("name", PROVEN)
def test_torchs_default_device_changes_nothing(name):
    """Where swap tries modules on small tensors of its own."""
    case, model, stock = of_case(name)
    inputs = case.inputs(3)
    with torch.device("meta"), plan.verdicts_shared():
        report = onepass.swap(stock, kinds=case.kind, strict=True)
        assert report.verify(*inputs).ok
    assert types(stock) == types(model)
