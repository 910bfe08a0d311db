"""Parts of swapped modules that change after the swap: replaced, hooked, parametrised, pruned.

The same change is made to a stock copy. Everything is in float64, where both compute the same
numbers, and each change is far larger than rounding.
"""

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.hooks import RemovableHandle

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from tests.swap import small_models, test_kinds, test_rotary
from tests.swap.test_mlp import WIDTH, Llamas

# ---- modules -------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Phi-3's, with a method of its own."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 48, bias=False)
        self.down_proj = nn.Linear(24, WIDTH, bias=False)
        self.act, self.kind = F.silu, "plain"

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * self._activated(gate))

    def _activated(self, x):
        return self.act(x) if self.kind == "plain" else 2 * self.act(x)


class Held(nn.Module):
    """An activation of transformers' kind."""

    def __init__(self):
        super().__init__()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.act(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.eps, self.squares = 1e-6, True

    def forward(self, x):
        size = x.square() if self.squares else x.abs()
        return self.weight * (x * torch.rsqrt(size.mean(-1, keepdim=True) + self.eps))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = small_models.transformers.LlamaModel(small_models.CONFIG)

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state


def _encoder(**options) -> test_kinds.Case:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, **options)

    return test_kinds.attention(make, "")


CASES = {
    **test_kinds.CASES,
    "gated: a function": test_kinds.gated(Packed),
    "group norm": test_kinds.Case(
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()),
        test_kinds.of(8, 5, 5),
        "norm",
        "",
        "",
    ),
    "encoder": _encoder(activation=nn.GELU()),
    "encoder, norms first": _encoder(norm_first=True),
    "model": test_kinds.attention(Model, "", inputs=test_kinds.of(6, 64)),
}
MODULES = {  # the parts of each
    "gated: silu": "gate_proj up_proj down_proj act_fn",
    "gated: a function": "gate_up_proj down_proj",
    "group norm": "0 1 2",
    "resnet: no time": "norm1 conv1 norm2 dropout conv2 nonlinearity",
    "adaptive norm": "norm silu linear",
    "MultiheadAttention": "attention.out_proj attention",
    "encoder": "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation",
    "encoder, norms first": "self_attn linear1 linear2 norm1 norm2 dropout2",
    "decoder layer": "self_attn multihead_attn linear1 dropout linear2 norm3 dropout3",
    "rotary: Attention": "q_proj k_proj",
    "model": "model.layers.0.self_attn.q_proj model.layers.0.self_attn.o_proj model.norm "
    "model.layers.0.input_layernorm model.layers.0.mlp model.layers.0.mlp.act_fn "
    "model.layers.0.mlp.up_proj",
}
PARTS = [(name, part) for name, parts in MODULES.items() for part in parts.split()]


# ---- changes -------------------------------------------------------------------------------------


class Other(nn.Module):
    """In place of a part: computes something else, and has no attributes of it."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args, **named):
        return _doubled(self.part(*args, **named))


class Adapted(Other):
    """The same, as adapters are made: the part's attributes are its own."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)


class Doubled(nn.Module):
    def forward(self, x):
        return 2.0 * x


def _doubled(x):
    if isinstance(x, tuple):
        return tuple(map(_doubled, x))
    return 2.0 * x if isinstance(x, Tensor) and x.is_floating_point() else x


def _replace(model: nn.Module, name: str, make: Callable) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, make(model.get_submodule(name)))


def _other_class(part: nn.Module) -> None:
    def forward(self, *args, **named):
        return _doubled(super(cls, self).forward(*args, **named))

    cls = type(type(part).__name__, (type(part),), {"forward": forward})
    part.__class__ = cls


def _other_forward(part: nn.Module) -> None:
    forward = part.forward
    part.forward = lambda *args, **named: _doubled(forward(*args, **named))


def _compiled(part: nn.Module) -> None:
    call = part._call_impl
    part._compiled_call_impl = lambda *args, **named: _doubled(call(*args, **named))


def _drop_all(part: nn.Module) -> None:
    part.p = 1.0


HOOKS = {  # by the ends of the names of nn.Module's methods
    "forward_hook": lambda module, args, y: _doubled(y),
    "forward_pre_hook": lambda module, args: _doubled(args),
    "full_backward_hook": lambda module, found, given: _doubled(found),
    "full_backward_pre_hook": lambda module, given: _doubled(given),
}


def _hooked(name: str, part: nn.Module) -> RemovableHandle:
    return getattr(part, f"register_{name}")(HOOKS[name])


def _hooked_as_all(name: str, part: nn.Module) -> RemovableHandle:
    """A hook of all modules."""
    register = getattr(nn.modules.module, f"register_module_{name}")
    return register(lambda module, *args: HOOKS[name](module, *args) if module is part else None)


INSIDE = {  # changes of the part itself
    **{name: functools.partial(_hooked, name) for name in HOOKS},
    **{f"{name} of all": functools.partial(_hooked_as_all, name) for name in HOOKS},
    "forward of the instance": _other_forward,
    "another class": _other_class,
    "compiled": _compiled,
    "parametrised": lambda part: parametrize.register_parametrization(part, "weight", Doubled()),
    "pruned": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "dropout": _drop_all,
}
CHANGES = {
    "replaced": functools.partial(_replace, make=Other),
    "adapted": functools.partial(_replace, make=Adapted),
    **{
        name: lambda model, part, change=change: change(model.get_submodule(part))
        for name, change in INSIDE.items()
    },
}


# ---- tests ---------------------------------------------------------------------------------------


OF_THE_FORWARD = (
    "replaced", "forward_hook", "full_backward_hook", "forward of the instance",
    "forward_hook of all",
)  # fmt: skip
BOUNDS = {
    name: dict(value)
    for name, value in vars(small_calls).items()
    if name.startswith("LEAST_") and isinstance(value, dict)
}


@pytest.fixture(params=["every size", "small calls"])
def changes(request, monkeypatch):
    """Calls of every size run ours, or, with the usual bounds, those of small tensors do not."""
    if request.param == "every size":
        return CHANGES
    for name, value in BOUNDS.items():
        monkeypatch.setattr(small_calls, name, value)
    return {name: CHANGES[name] for name in OF_THE_FORWARD}


@functools.cache
def _made(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = CASES[name].make().double()
    model = nn.ModuleList([copy.deepcopy(stock)])
    assert onepass.swap(model).swapped
    return model[0], stock


def made(name: str) -> tuple[nn.Module, nn.Module]:
    """(swapped, stock)"""
    return copy.deepcopy(_made(name))


def results(model: nn.Module, name: str = "gated: silu") -> list[Tensor]:
    torch.manual_seed(1)
    return test_kinds.results(model, tuple(map(test_kinds.doubled, CASES[name].inputs(2))))


def outcome(model: nn.Module, name: str) -> list[Tensor] | type[Exception]:
    try:
        return results(model, name)
    except Exception as error:  # torch's attention reads attributes of a part
        return type(error)


def differ(found, expected) -> bool:
    if isinstance(found, type) or isinstance(expected, type):
        return found is not expected
    pairs = zip(found, expected, strict=False)
    return len(found) != len(expected) or not all(numerics.compare(a, b, b).ok for a, b in pairs)


@pytest.mark.parametrize("name", MODULES)
def test_ours_run_before_a_change(name):
    model, stock = made(name)
    with _dispatch_log.record() as calls:
        found = results(model, name)
    assert any(not call["kernel"].startswith("torch") for call in calls)
    assert not differ(found, results(stock, name))


def _applies(change: str, part: nn.Module) -> bool:
    if change in ("parametrised", "pruned"):
        return part._parameters.get("weight") is not None
    return change != "dropout" or isinstance(part, nn.Dropout)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_change_of_a_part_counts(name, part, changes):
    unnoticed, in_vain, models = [], [], made(name)
    before = results(models[1], name)
    for change, apply in changes.items():
        if not _applies(change, models[1].get_submodule(part)):
            continue
        found = []
        for model in models:
            handle = apply(model, part)
            found.append(outcome(model, name))
            if isinstance(handle, RemovableHandle):
                handle.remove()
        if not isinstance(handle, RemovableHandle):
            models = made(name)
        if differ(*found):
            unnoticed.append(change)
        if not differ(found[1], before):
            in_vain.append(change)
    assert not unnoticed
    if part != "attention.out_proj":  # torch reads its weight and does not call it
        assert not in_vain  # which would show nothing


# ---- what is no part -----------------------------------------------------------------------------


def _without_activation(block: nn.Module) -> None:
    del block.act_fn
    block.act_fn = torch.tanh


def set_to(name: str, value) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, value)

    return change


ATTRIBUTES = {  # the module and what changes on it
    "approximate": (lambda: Llamas(nn.GELU("tanh")), set_to("act_fn.approximate", "none")),
    "a held function": (lambda: Llamas(Held()), set_to("act_fn.act", torch.tanh)),
    "a held option": (
        lambda: Llamas(Held()), set_to("act_fn.act", functools.partial(F.gelu, approximate="none")),
    ),
    "a function": (Packed, set_to("act", F.relu)),
    "a setting": (Packed, set_to("kind", "doubled")),
    "no module": (Llamas, _without_activation),
    "a setting of a norm": (Norm, set_to("squares", False)),
    "eps": (Norm, set_to("eps", 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_change_of_an_attribute_counts(name):
    torch.manual_seed(0)
    make, change = ATTRIBUTES[name]
    stock = make()
    model = nn.Sequential(copy.deepcopy(stock))
    assert onepass.swap(model, probe=True).swapped
    for twin in (copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        twin, other = twin.double(), copy.deepcopy(stock).double()
        with _dispatch_log.record() as calls:
            before = results(twin)
        assert calls, "copies run ours"
        for each in (twin, other):
            change(each)
        assert not differ(results(twin), results(other))
        assert differ(results(other), before)


def test_a_rotating_function_that_is_replaced(monkeypatch):
    model, stock = made("rotary: Attention")
    before = results(stock, "rotary: Attention")
    monkeypatch.setattr(test_rotary, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q + 1, k))
    assert not differ(results(model, "rotary: Attention"), results(stock, "rotary: Attention"))
    assert differ(results(stock, "rotary: Attention"), before)


def test_factors_of_other_shapes_and_dtypes():
    """What adapters may return."""
    models = made("gated: silu")
    for each in models:
        each.up_proj = nn.Sequential(nn.Linear(WIDTH, 1)).double()
        nn.init.constant_(each.up_proj[0].weight, 0.5)
        nn.init.constant_(each.up_proj[0].bias, 0.5)
    assert not differ(*(results(each) for each in models))
