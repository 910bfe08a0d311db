"""Parts of swapped modules that change after the swap: replaced, hooked, parametrised, pruned.

The same change is made to a stock copy. Everything is in float64, where both compute the same
numbers, and each change is far larger than rounding.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.hooks import RemovableHandle

import onepass
from onepass import _dispatch_log, numerics
from onepass._policy import small_calls
from tests.swap.test_rotary import apply_rotary_pos_emb

WIDTH, TOKENS = 16, 6


# ---- modules -------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Llama's."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 24)
        self.up_proj = nn.Linear(WIDTH, 24)
        self.down_proj = nn.Linear(24, WIDTH)
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.it = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.it(x, x, x, need_weights=False)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.it = _layer(nn.TransformerDecoderLayer)

    def forward(self, x):
        return self.it(x, x.flip(1))


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head_dim = 8

    def forward(self, x):
        q, k = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        angles = torch.arange(TOKENS, dtype=x.dtype).outer(torch.ones(8, dtype=x.dtype))[None]
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        return (q * k).sum(1)


def _resnet():
    resnet = pytest.importorskip("diffusers.models.resnet", reason="needs diffusers")
    return resnet.ResnetBlock2D(in_channels=8, groups=4, temb_channels=None)


class Zero(nn.Module):
    """A block with an adaptive norm of diffusers."""

    def __init__(self):
        super().__init__()
        normalization = pytest.importorskip("diffusers.models.normalization")
        self.ada = normalization.AdaLayerNormZeroSingle(WIDTH)

    def forward(self, x):
        y, gate = self.ada(x, x[:, 0])
        return y * gate[:, None]


class Llama(nn.Module):
    """A model of transformers, of embeddings."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="its models are swapped")
        config = transformers.LlamaConfig(
            hidden_size=WIDTH, num_attention_heads=2, intermediate_size=24, vocab_size=8,
            num_hidden_layers=1,
        )  # fmt: skip
        self.model = transformers.LlamaModel(config)

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state


def _layer(cls, **options):
    return cls(WIDTH, 2, 24, dropout=0.0, batch_first=True, **options)


# How to make a module, and its parts.
MODULES = {
    "gated": (lambda: Gated(nn.SiLU()), "gate_proj up_proj down_proj act_fn"),
    "gated, of a function": (Packed, "gate_up_proj down_proj"),
    "group norm, silu": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()), "0 1 2",
    ),
    "resnet block": (_resnet, "norm1 conv1 norm2 dropout conv2 nonlinearity"),
    "adaptive norm": (Zero, "ada.norm ada.silu ada.linear"),
    "attention": (Attention, "it.out_proj it"),
    "encoder": (
        lambda: _layer(nn.TransformerEncoderLayer, activation=nn.GELU()),
        "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation",
    ),
    "encoder, norms first": (
        lambda: _layer(nn.TransformerEncoderLayer, norm_first=True),
        "self_attn linear1 linear2 norm1 norm2 dropout2",
    ),
    "decoder": (
        Decoder,
        "it.self_attn it.multihead_attn it.linear1 it.dropout it.linear2 it.norm3 it.dropout3",
    ),
    "rotary": (Rotating, "q_proj k_proj"),
    "model": (
        Llama,
        "model.layers.0.self_attn.q_proj model.layers.0.self_attn.o_proj model.norm "
        "model.layers.0.input_layernorm model.layers.0.mlp model.layers.0.mlp.act_fn "
        "model.layers.0.mlp.up_proj",
    ),
}  # fmt: skip
PARTS = [(name, part) for name, (_, parts) in MODULES.items() for part in parts.split()]


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
    return 2.0 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x


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


def _of_all_modules(register: Callable, hook: Callable, part: nn.Module):
    return register(lambda module, *args: hook(module, *args) if module is part else None)


_global = nn.modules.module
INSIDE = {  # changes of the part itself
    "hook": lambda part: part.register_forward_hook(lambda m, args, y: _doubled(y)),
    "pre-hook": lambda part: part.register_forward_pre_hook(lambda m, args: _doubled(args)),
    "backward hook": lambda part: part.register_full_backward_hook(
        lambda m, found, given: _doubled(found)
    ),
    "backward pre-hook": lambda part: part.register_full_backward_pre_hook(
        lambda m, given: _doubled(given)
    ),
    "forward of the instance": _other_forward,
    "another class": _other_class,
    "compiled": _compiled,
    "parametrised": lambda part: parametrize.register_parametrization(part, "weight", Doubled()),
    "pruned": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "dropout": _drop_all,
    "hook of all": functools.partial(
        _of_all_modules, _global.register_module_forward_hook, lambda m, args, y: _doubled(y)
    ),
    "pre-hook of all": functools.partial(
        _of_all_modules,
        _global.register_module_forward_pre_hook,
        lambda m, args: _doubled(args),
    ),
    "backward hook of all": functools.partial(
        _of_all_modules,
        _global.register_module_full_backward_hook,
        lambda m, found, given: _doubled(found),
    ),
    "backward pre-hook of all": functools.partial(
        _of_all_modules,
        _global.register_module_full_backward_pre_hook,
        lambda m, given: _doubled(given),
    ),
}  # fmt: skip
CHANGES = {
    "replaced": functools.partial(_replace, make=Other),
    "adapted": functools.partial(_replace, make=Adapted),
    **{
        name: lambda model, part, change=change: change(model.get_submodule(part))
        for name, change in INSIDE.items()
    },
}


# ---- tests ---------------------------------------------------------------------------------------


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
    of_the_forward = ("replaced", "hook", "backward hook", "forward of the instance", "hook of all")
    return {name: CHANGES[name] for name in of_the_forward}


@functools.cache
def _made(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = MODULES[name][0]().double()
    model = nn.ModuleList([copy.deepcopy(stock)])
    assert onepass.swap(model).swapped
    return model[0], stock


def made(name: str) -> tuple[nn.Module, nn.Module]:
    """(swapped, stock)"""
    return copy.deepcopy(_made(name))


def results(model: nn.Module, name: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    of_images = name in ("group norm, silu", "resnet block")
    shape = (2, 8, 5, 5) if of_images else (2, TOKENS, WIDTH)
    x = torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
    y = model(x, None) if name == "resnet block" else model(x)
    upstream = torch.randn(y.shape, generator=random, dtype=y.dtype)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


def outcome(model: nn.Module, name: str) -> list[torch.Tensor] | type[Exception]:
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
    unnoticed, in_vain = [], []
    before = results(made(name)[1], name)
    for change, apply in changes.items():
        models = made(name)
        if not _applies(change, models[1].get_submodule(part)):
            continue
        found = []
        for model in models:
            handle = apply(model, part)
            try:
                found.append(outcome(model, name))
            finally:
                if isinstance(handle, RemovableHandle):
                    handle.remove()
        if differ(*found):
            unnoticed.append(change)
        if not differ(found[1], before):
            in_vain.append(change)
    assert not unnoticed
    if part != "it.out_proj":  # torch reads its weight and does not call it
        assert not in_vain  # which would show nothing


# ---- what is no part -----------------------------------------------------------------------------


def _approximate(model: nn.Module) -> None:
    model.act_fn.approximate = "none"


def _held_function(model: nn.Module) -> None:
    model.act_fn.act = torch.tanh


def _held_option(model: nn.Module) -> None:
    model.act_fn.act = functools.partial(F.gelu, approximate="none")


def _own_function(model: nn.Module) -> None:
    model.act = F.relu


def _own_setting(model: nn.Module) -> None:
    model.kind = "doubled"


def _no_module(model: nn.Module) -> None:
    del model.act_fn
    model.act_fn = torch.tanh


def _setting_of_a_norm(model: nn.Module) -> None:
    model.squares = False


def _eps(model: nn.Module) -> None:
    model.eps = 1.0


ATTRIBUTES = {
    _approximate: lambda: Gated(nn.GELU("tanh")),
    _held_function: lambda: Gated(Held()),
    _held_option: lambda: Gated(Held()),
    _own_function: Packed,
    _own_setting: Packed,
    _no_module: lambda: Gated(nn.SiLU()),
    _setting_of_a_norm: Norm,
    _eps: Norm,
}


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_a_change_of_an_attribute_counts(change):
    torch.manual_seed(0)
    stock = ATTRIBUTES[change]()
    model = nn.Sequential(copy.deepcopy(stock))
    assert onepass.swap(model, probe=True).swapped
    for twin in (copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        with _dispatch_log.record() as calls:
            twin(torch.randn(TOKENS, WIDTH))
        assert calls, "copies run ours"
        other = copy.deepcopy(stock).double()
        before = results(other, "")
        for each in (twin.double(), other):
            change(each)
        assert not differ(results(twin, ""), results(other, ""))
        assert differ(results(other, ""), before)


def test_a_rotating_function_that_is_replaced(monkeypatch):
    model, stock = made("rotary")
    before = results(stock, "rotary")
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda q, k, cos, sin: (q + 1, k))
    assert not differ(results(model, "rotary"), results(stock, "rotary"))
    assert differ(results(stock, "rotary"), before)


def test_factors_of_other_shapes_and_dtypes():
    """What adapters may return."""
    model, stock = made("gated")
    for each in (model, stock):
        each.up_proj = nn.Sequential(nn.Linear(WIDTH, 1)).double()
        torch.nn.init.constant_(each.up_proj[0].weight, 0.5)
        torch.nn.init.constant_(each.up_proj[0].bias, 0.5)
    assert not differ(results(model, "gated"), results(stock, "gated"))
