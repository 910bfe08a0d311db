"""diffusers' adaptive norms: a norm without parameters, and scale and shift that a linear layer
makes of a conditioning. Found by class and parts, proven with numbers.

`FORMS` repeats the forward of each class, with one call in place of
``self.norm(x) * (1 + scale[:, None]) + shift[:, None]``. The proof runs the class's own forward
beside it, on the CPU with the module's norm and small linear layers, and compares outputs and
gradients: if another version of diffusers has another forward, nothing is swapped. Nothing here
imports diffusers.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

import onepass.functional
from onepass import _stock
from onepass._imported import is_a
from onepass._ops.norm import NormKind
from onepass._refusals import is_number, or_torchs
from onepass.nn._parts import all_modules_have_hooks, forward_of, has_hooks, is_untouched
from onepass.reference import norm as reference
from onepass.swapping import trials
from onepass.swapping.classes import Swapped, run_original
from onepass.swapping.inputs import is_plain
from onepass.swapping.reasons import Reason, SkipReason, replaced_forward
from onepass.swapping.specs import AdaptiveSpec

_SOURCE = "diffusers.models.normalization"


# ---- forwards ------------------------------------------------------------------------------------

Modulate = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # (norm, x, scale, shift) -> y


def _ada_layer_norm(self, modulate: Modulate, x, timestep=None, temb=None):
    if self.emb is not None:
        temb = self.emb(timestep)
    shift, scale = self.linear(self.silu(temb)).chunk(2, dim=1)
    return modulate(self.norm, x, scale, shift)


def _ada_layer_norm_zero(
    self, modulate: Modulate, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None
):
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
    return modulate(self.norm, x, scale, shift), *others


def _ada_layer_norm_zero_single(self, modulate: Modulate, x, emb=None):
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return modulate(self.norm, x, scale, shift), gate


def _ada_layer_norm_continuous(self, modulate: Modulate, x, conditioning_embedding):
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb.chunk(2, dim=1)
    return modulate(self.norm, x, scale, shift)


def _sd35_ada_layer_norm_zero_x(self, modulate: Modulate, hidden_states, emb=None):
    shift, scale, gate, *of_mlp, shift2, scale2, gate2 = self.linear(self.silu(emb)).chunk(9, dim=1)
    first = modulate(self.norm, hidden_states, scale, shift)
    second = modulate(self.norm, hidden_states, scale2, shift2)
    return first, gate, *of_mlp, second, gate2


FORMS = {  # and the name of the argument from which scale and shift come, without an `emb`
    "AdaLayerNorm": (_ada_layer_norm, "temb"),
    "AdaLayerNormZero": (_ada_layer_norm_zero, "emb"),
    "AdaLayerNormZeroSingle": (_ada_layer_norm_zero_single, "emb"),
    "SD35AdaLayerNormZeroX": (_sd35_ada_layer_norm_zero_x, "emb"),
    "AdaLayerNormContinuous": (_ada_layer_norm_continuous, "conditioning_embedding"),
}


def _composed(norm: nn.Module, x, scale, shift):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def _fused(norm: nn.Module, x, scale, shift):
    """Runs one pass, if neither the norm was replaced or hooked, nor all modules hooked."""
    kind = None if all_modules_have_hooks() else kind_of(norm)
    return _fused_as(kind, norm, x, scale, shift)


def _fused_as(kind: NormKind | None, norm: nn.Module, x, scale, shift):
    """Runs one pass, if the composition's result has the dtype and shape of x."""
    if (
        kind is None
        or not is_number(norm.eps)
        or not (is_plain(x) and is_plain(scale) and is_plain(shift))
        or x.dim() != 3
        or scale.dim() != 2
        or x.shape[0] != scale.shape[0]
        or torch.promote_types(x.dtype, scale.dtype) != x.dtype
        or (x.dtype is torch.float64 and not _is_torchs(norm))  # diffusers' own computes in float32
        or (x.is_cuda and torch.is_autocast_enabled("cuda"))
    ):
        return _composed(norm, x, scale, shift)

    def ours(norm: nn.Module, x, scale, shift) -> Tensor:
        if kind == NormKind.RMS:
            return onepass.functional.modulated_rms_norm(x, norm.dim, scale, shift, norm.eps)
        shape = norm.normalized_shape
        return onepass.functional.modulated_layer_norm(x, shape, scale, shift, norm.eps)

    return or_torchs(ours, _composed, norm, x, scale, shift)


class AdaptiveForward(Swapped):
    """Forward of an adaptive norm that was proven to be the form in its spec.

    Conditionings go through the module's own parts, with their hooks and adapters. Its norm is
    called as a module if it has hooks, or if the result would have another dtype.
    """

    _onepass_spec: AdaptiveSpec

    def forward(self, *args, **named):
        if not isinstance(self, Swapped):  # a wrapper holds this after `unswap`
            return _stock.original(self).forward(self, *args, **named)
        if args and isinstance(args[0], torch.fx.Proxy):
            return run_original(self, self._onepass_original.forward, *args, **named)
        run, _ = FORMS[self._onepass_spec.form]
        return run(self, _fused, *args, **named)


# ---- parts ---------------------------------------------------------------------------------------


class Adaptive(NamedTuple):
    """A module of a class that has a form."""

    form: str  # of FORMS


def kind_of(norm: nn.Module | None) -> NormKind | None:
    """The kind of a norm without parameters; None for one with parameters or hooks, or of another
    class or forward."""
    if norm is None or not is_untouched(norm):
        return None
    if any(parameter is not None for parameter in norm._parameters.values()):
        return None
    source = sys.modules.get(_SOURCE)
    forward = forward_of(norm)
    if forward in (_LAYER_NORM, getattr(source, "FP32LayerNorm", _None).forward):
        return NormKind.LAYER if len(norm.normalized_shape) == 1 else None
    if forward is getattr(source, "RMSNorm", _None).forward:
        return NormKind.RMS if len(norm.dim) == 1 else None
    return None


class _None:
    """A stand-in for a class that this diffusers does not have."""

    forward = None


_LAYER_NORM = _stock.method(nn.LayerNorm)


def _is_torchs(norm: nn.Module) -> bool:
    return forward_of(norm) is _LAYER_NORM


def form_of(module: nn.Module) -> str | SkipReason | None:
    """The name of a module's form, or why a class of diffusers has none; None for other classes."""
    source = sys.modules.get(_SOURCE)
    if source is None:
        return None
    if is_a(module, _SOURCE, "AdaLayerNormSingle"):
        return Reason.NO_NORM.format()
    for name in FORMS:
        cls = getattr(source, name, None)
        if cls is not None and isinstance(module, cls):
            return name if type(module).forward is cls.forward else Reason.OWN_FORWARD.format()
    return None


def obstacle(module: nn.Module) -> SkipReason | None:
    """Why a module that has a form cannot be swapped; None if it can."""
    if getattr(module, "chunk_dim", 1) != 1:
        return Reason.ONE_MODULATION.format()
    norm = module._modules.get("norm")
    if kind_of(norm) is None:
        parameters = norm is not None and any(True for _ in norm.parameters())
        if parameters:
            return Reason.NORM_HAS_WEIGHT.format()
        if norm is not None and has_hooks(norm):
            return Reason.HOOKS.format("norm")
        if norm is not None and replaced_forward(norm):
            return Reason.PART_FORWARD.format("norm")
        return Reason.OTHER_NORM.format(type(norm).__name__)
    return None


# ---- proof ---------------------------------------------------------------------------------------

_BATCH, _TOKENS, _CONDITION = 2, 3, 5
_DRAWS = 4  # judged together


class _Given(nn.Module):
    """A stand-in for an embedding: returns the same tensor for every input."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, *_, **__) -> Tensor:
        return self.value


def configuration(module: nn.Module, form: str) -> tuple:
    """Two modules with the same configuration get the same verdict. Valid while both are alive."""
    norm = module._modules["norm"]
    of_parts = tuple(
        (type(part), tuple(sorted(trials.attributes(part).items())))
        for part in (norm, module._modules["silu"])
    )
    embeds = module._modules.get("emb") is not None
    cls, of_module = type(module), tuple(sorted(trials.attributes(module).items()))
    return cls, cls.forward, form, embeds, of_parts, of_module


def prove(module: nn.Module, form: str) -> AdaptiveSpec | str:
    """The spec of a module that computes its form, or the reason why it is not swapped.

    The module is only read, as by `probe.probe`.
    """
    with trials.isolated():
        try:
            for dtype in (torch.float32, torch.bfloat16):
                _judge(module, form, dtype)
        except trials.Refused as refusal:
            return str(refusal)
    return AdaptiveSpec(form, int(kind_of(module._modules["norm"])))


def _judge(module: nn.Module, form: str, dtype: torch.dtype) -> None:
    run, _ = FORMS[form]
    kind = kind_of(module._modules["norm"])  # a twin's norm is not called as a module
    fused, exact = (functools.partial(f, kind) for f in (_fused_as, _exact))
    forwards = (type(module).forward, _with(run, fused), _with(run, exact))
    results = functools.partial(_results, module, form)
    trials.judge(form, dtype, forwards, results, _DRAWS)


def _with(run, modulate: Modulate):
    return lambda self, *args, **named: run(self, modulate, *args, **named)


def _exact(kind: NormKind, norm: nn.Module, x, scale, shift):
    """The result in float64, from the rounded results of the other parts: their rounding is not
    tested."""
    x, scale, shift = x.double(), scale.double(), shift.double()
    return reference.modulated(x, (scale.shape[-1],), scale, shift, norm.eps, kind=kind)


def _results(module, form, dtype, seed, forward) -> list[Tensor]:
    """Outputs of a forward on a twin with a small linear layer, and gradients of its inputs."""
    normal = functools.partial(trials.normals(22 + seed, torch.float32), dtype=dtype)
    twin = trials.twin(module)
    twin._modules.update(dict.fromkeys(module._modules))
    norm = twin._modules["norm"] = copy.deepcopy(module._modules["norm"])
    twin._modules["silu"] = copy.deepcopy(module._modules["silu"])
    width = (norm.normalized_shape if hasattr(norm, "normalized_shape") else norm.dim)[0]
    parts = module._modules["linear"].out_features // width
    linear = twin._modules["linear"] = nn.Linear(
        _CONDITION, parts * width, dtype=dtype, device="cpu"
    )
    for parameter in linear.parameters():
        parameter.data = normal(*parameter.shape)
    trials.call_without_hooks(twin)
    x = normal(_BATCH, _TOKENS, width).requires_grad_()
    given = normal(_BATCH, _CONDITION)
    _, argument = FORMS[form]
    named = {argument: given}
    if module._modules.get("emb") is not None:
        twin._modules["emb"], named = _Given(given), {}
    leaves = [x, linear.bias]  # a bias has the gradient of one number of scale or shift
    with trials.foreign_code("fails on small layers"):
        return trials.outcome(lambda: forward(twin, x, **named), leaves, lambda y: normal(*y.shape))
