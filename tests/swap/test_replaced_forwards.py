"""A class of torch whose forward was replaced, or an instance's, keeps it, whatever the kind; and
modules work whose forward is wrapped after a swap, also after `unswap`: the wrapper holds the
swapped forward."""

import functools
import sys
import types

import pytest
import torch
import torch.ao.nn.qat  # its classes are among those looked at
from torch import nn

import onepass
from onepass import _stock
from onepass.swapping import classes
from tests.support import fresh
from tests.swap import test_kinds
from tests.swap.foreign_linear import Plain
from tests.swap.small_models import CONFIG, transformers
from tests.swap.test_mlp import Llamas

pytorch_utils, llama = transformers.pytorch_utils, transformers.models.llama.modeling_llama


def wrapped(cls, name="forward"):
    """As most programs replace a method; functools.wraps copies its names."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self, *args, **named):
        output = original(self, *args, **named)
        return 2 * output if isinstance(output, torch.Tensor) else output

    return method


def activated():
    return nn.Sequential(nn.GroupNorm(4, 64), nn.SiLU())


# The class, a model that holds a module of it, and the kind that would swap it.
ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
CASES = {
    "LayerNorm": (nn.LayerNorm, lambda: nn.LayerNorm(8), "norm"),
    "RMSNorm": (nn.RMSNorm, lambda: nn.RMSNorm(8), "norm"),
    "GroupNorm": (nn.GroupNorm, lambda: nn.GroupNorm(4, 64).bfloat16(), "norm"),
    "GroupNorm, then SiLU": (nn.GroupNorm, activated, "norm"),
    "SiLU": (nn.SiLU, activated, "norm"),
    "Sequential": (nn.Sequential, activated, "norm"),
    "SiLU of a block": (nn.SiLU, lambda: Llamas(nn.SiLU()), "mlp"),
    "GELU of a block": (nn.GELU, lambda: Llamas(nn.GELU()), "mlp"),
    "Dropout": (nn.Dropout, lambda: nn.Dropout(0.5), "dropout"),
    "Linear": (nn.Linear, lambda: nn.Linear(8, 8), "linear"),
    "Conv1D": (pytorch_utils.Conv1D, lambda: pytorch_utils.Conv1D(8, 8), "linear"),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, nn.CrossEntropyLoss, "loss"),
    "MultiheadAttention": (nn.MultiheadAttention, lambda: nn.MultiheadAttention(8, 2), "attention"),
    "TransformerEncoderLayer": (ENCODER, lambda: ENCODER(8, 2), "attention"),
    "TransformerDecoderLayer": (DECODER, lambda: DECODER(8, 2), "attention"),
}


pytestmark = pytest.mark.usefixtures("linear_layers_gain", "every_loss_gains", "probed_once")


def forwards(model):
    return {name: type(module).forward for name, module in model.named_modules()}


@pytest.mark.parametrize("of", ["class", "instance"])
@pytest.mark.parametrize(("cls", "make", "kind"), CASES.values(), ids=CASES.keys())
def test_a_replaced_forward_stays(cls, make, kind, of, monkeypatch):
    model = make()
    assert onepass.swap(model, kinds=kind, dry_run=True).swapped
    ran = {name: module for name, module in model.named_modules() if type(module) is cls}
    before = forwards(model)
    if of == "class":
        before |= dict.fromkeys(ran, wrapped(cls))
        monkeypatch.setattr(cls, "forward", before[next(iter(ran))])
    else:
        for module in ran.values():
            module.forward = types.MethodType(wrapped(cls), module)
    report = onepass.swap(model, kinds=kind)
    after = forwards(model)
    assert not {entry["name"] for entry in report.swapped} & {"", *(ran if of == "class" else ())}
    assert all(after[name] is before[name] for name in {"", *ran})
    assert any("is replaced" in entry["reason"] for entry in report.skipped)


@pytest.mark.parametrize("cls", [nn.Linear, nn.GELU])
def test_a_part_of_an_encoder_layer(cls, monkeypatch):
    layer, ours = (
        kind(8, 2, 16, dropout=0.0, activation=nn.GELU())
        for kind in (ENCODER, onepass.nn.TransformerEncoderLayer)
    )
    ours.load_state_dict(layer.state_dict())
    monkeypatch.setattr(cls, "forward", wrapped(cls))
    x = torch.randn(5, 3, 8)
    expected = layer(x)
    torch.testing.assert_close(ours(x), expected)
    onepass.swap(layer)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("name", ["_sa_block", "_ff_block"])
def test_a_block_of_an_encoder_layer(name, monkeypatch):
    layer, x = ENCODER(8, 2, 16, dropout=0.0), torch.randn(5, 3, 8)
    monkeypatch.setattr(ENCODER, name, wrapped(ENCODER, name))
    expected = layer(x)
    report = onepass.swap(layer)
    assert ("" in {entry["name"] for entry in report.swapped}) == (name == "_ff_block")
    torch.testing.assert_close(layer(x), expected)


def test_a_class_of_the_users_own_between_two_swaps(monkeypatch):
    """The forward in force is the one whose calls are redirected."""
    first, second = Plain(), Plain()
    onepass.swap(first, kinds="linear")
    monkeypatch.setattr(Plain, "forward", wrapped(Plain))
    x = torch.randn(9, 16)
    expected = second(x)
    onepass.swap(second, kinds="linear")
    assert isinstance(second, classes.Calls)
    torch.testing.assert_close(second(x), expected)


def test_before_the_import():
    """A replacement that is older than this package is noticed."""
    fresh.run(BEFORE, check=True)


BEFORE = """
import functools, torch
from torch import nn
for cls in (nn.LayerNorm, nn.Linear, nn.Dropout, nn.CrossEntropyLoss, nn.SiLU):
    cls.forward = functools.wraps(cls.forward)(lambda *args, f=cls.forward: 2 * f(*args))
import onepass
loss = nn.CrossEntropyLoss()
model = nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8).half(), nn.Dropout(), loss])
model.append(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()))
report = onepass.swap(model)
assert not report.swapped, report
"""


def test_torchs_own_forwards_are_known():
    """Of all classes of torch.nn; one that torch decorates would be taken for a replaced one."""
    pending, found = [nn.Module], set()
    while pending:
        pending += (more := pending.pop().__subclasses__())
        found |= {cls for cls in more if "forward" in vars(cls)}
    named = {cls for cls in found if f"{cls.__module__}.".startswith(_stock._KNOWN)}
    named = {cls for cls in named if vars(sys.modules[cls.__module__]).get(cls.__name__) is cls}
    assert len(named) > 100
    assert not {cls for cls in named if _stock.replaced(cls)}


@pytest.mark.parametrize(
    "forward",
    [
        nn.Identity.forward,  # of the same file
        nn.Bilinear.forward,
        torch.no_grad()(nn.Linear.forward),
        functools.partialmethod(nn.Linear.forward),
        torch.compile(nn.Linear.forward),
        functools.wraps(nn.Linear.forward)(lambda self, input: input),
    ],
)
def test_a_replaced_forward_is_known(forward, monkeypatch):
    assert _stock.method(nn.Linear) is nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert _stock.method(nn.Linear) is None and _stock.replaced(nn.Linear) is nn.Linear


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
def test_replaced_code_is_known(monkeypatch):
    code = nn.Identity.forward.__code__
    monkeypatch.setattr(nn.Linear.forward, "__code__", code)
    assert _stock.replaced(nn.Linear) is nn.Linear


# ---- wrapped on the instance after a swap --------------------------------------------------------


def wraps(module):
    inner = module.forward
    module.forward = functools.wraps(inner)(lambda *args, **named: inner(*args, **named))


def of_the_class(module):
    inner = type(module).forward
    module.forward = types.MethodType(lambda *args, **named: inner(*args, **named), module)


def autocast(module):
    module.forward = torch.autocast("cpu", enabled=False)(module.forward)


def hooks():
    return pytest.importorskip("accelerate.hooks", reason="it wraps forwards")


def accelerates(module):
    hooks().add_hook_to_module(module, hooks().ModelHook())


def accelerates_and_removes(module):
    accelerates(module)
    hooks().remove_hook_from_module(module)


OTHERS = (
    "RMSNorm", "adaptive norm", "resnet block", "CrossEntropyLoss", "MultiheadAttention",
    "encoder layer",
)  # fmt: skip
WRAPPERS = [wraps, of_the_class, autocast, accelerates, accelerates_and_removes]


def check(make, inputs, wrap) -> None:
    """A model works before and after `unswap`, if `wrap` is called between."""
    model = make().eval()

    def output():
        y = model(*inputs)
        return getattr(y, "logits", y)

    with torch.no_grad():
        stock = output()
        assert onepass.swap(model).swapped
        wrap(model)
        torch.testing.assert_close(output(), stock)
        onepass.unswap(model)
        torch.testing.assert_close(output(), stock)


@pytest.mark.grid
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", [*test_kinds.KINDS, *OTHERS])
def test_works_before_and_after_unswap(name, wrapper):
    case = test_kinds.CASES[name]
    inputs = case.inputs(3)
    check(case.make, inputs, lambda model: [wrapper(module) for module in model.modules()])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_whole_model_works_before_and_after_unswap(wrapper):
    def make():
        return transformers.LlamaForCausalLM(CONFIG)

    ids = torch.randint(256, (2, 64))
    check(make, (ids,), lambda model: [wrapper(module) for module in model.modules()])


def test_cpu_offload():
    accelerate = pytest.importorskip("accelerate", reason="it wraps the model")

    def offloads(model):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert "_old_forward" in vars(model.model.norm)

    ids = torch.randint(256, (2, 64))
    check(lambda: transformers.LlamaForCausalLM(CONFIG), (ids,), offloads)


def test_the_with_block_ends_with_a_working_model():
    model, images = activated(), torch.randn(2, 64, 8, 8)
    expected = model(images)
    with onepass.swapped(model):
        wraps(model)
    assert torch.equal(model(images), expected)
