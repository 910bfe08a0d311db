"""Group norms with silu after them, in one pass: children of an `nn.Sequential`, and the norms of
diffusers' `ResnetBlock2D`.

A module of a swapped class computes the two together where it would call one after the other. Both
stay its children, unchanged. An `nn.Sequential` says by its structure what it computes. The other
classes have a function here that repeats their forward, and is proven as `adaptive` does it:
if another version of diffusers has another forward, nothing is swapped. Nothing here imports
diffusers.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

import onepass.functional
from onepass import _stock
from onepass._overrides import visibly
from onepass._policy import small_calls
from onepass._refusals import or_torchs
from onepass.nn._parts import all_modules_have_hooks, forward_of, is_untouched
from onepass.reference import group_norm as reference
from onepass.swapping import trials
from onepass.swapping.classes import Swapped
from onepass.swapping.inputs import has_kernels, is_for_norm, is_plain
from onepass.swapping.reasons import Reason, SkipReason, replaced_forward
from onepass.swapping.specs import ActivatedSpec

_SOURCE = "diffusers.models.resnet"


# ---- forwards ------------------------------------------------------------------------------------

Normed = Callable[[nn.Module, nn.Module, Tensor], Tensor]  # (norm, activation, x) -> y


def _sequential(self, normed: Normed, input):
    norm = None
    for name, module in self._modules.items():
        if norm is not None:
            norm, input = None, normed(norm, module, input)
        elif name in self._onepass_spec.norms:
            norm = module
        else:
            input = module(input)
    return input if norm is None else norm(input)  # a slice may end with a norm


def _resnet_block_2d(self, normed: Normed, input_tensor, temb):
    norms = self._onepass_spec.norms

    def activated(name: str, x):
        compute = normed if name in norms else _composed
        return compute(getattr(self, name), self.nonlinearity, x)

    hidden = activated("norm1", input_tensor)
    resize = self.downsample if self.upsample is None else self.upsample
    if resize is not None:
        if self.upsample is not None and hidden.shape[0] >= 64:
            input_tensor, hidden = input_tensor.contiguous(), hidden.contiguous()
        input_tensor, hidden = resize(input_tensor), resize(hidden)
    hidden = self.conv1(hidden)
    if self.time_emb_proj is not None:
        temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
        temb = temb[:, :, None, None]
    if self.time_embedding_norm == "scale_shift":
        scale, shift = temb.chunk(2, dim=1)
        hidden = self.nonlinearity(self.norm2(hidden) * (1 + scale) + shift)
    else:
        if temb is not None and self.time_embedding_norm == "default":
            hidden = hidden + temb
        hidden = activated("norm2", hidden)
    hidden = self.conv2(self.dropout(hidden))
    if self.conv_shortcut is not None:
        input_tensor = self.conv_shortcut(
            input_tensor.contiguous() if self.training else input_tensor
        )
    return (input_tensor + hidden) / self.output_scale_factor


def _composed(norm: nn.Module, activation: nn.Module, x):
    return activation(norm(x))


def _fused(norm: nn.Module, activation: nn.Module, x):
    """Both in one pass, if neither has been replaced or hooked and the call gains."""
    if (
        not (_is_norm(norm) and _is_silu(activation) and is_plain(x))
        or type(norm.num_groups) is not int
        or all_modules_have_hooks()
        or not has_kernels(x.device.type, "group_norm")
        or small_calls.group_norm_is_small(x, norm.num_groups, activated=True)
    ):
        return _composed(norm, activation, x)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    if not is_for_norm(x, weight, bias, eps):
        return _composed(norm, activation, x)

    def ours(norm: nn.Module, activation: nn.Module, x) -> Tensor:
        arguments = (x, norm.num_groups, weight, bias, eps)
        return visibly(onepass.functional.group_norm, *arguments, activation="silu")

    return or_torchs(ours, _composed, norm, activation, x)


class ActivatedForward(Swapped):
    """Base of forwards of modules that have a form. Norm and activation are called as modules if
    they have hooks, or were replaced. A wrapper that holds this after `unswap` runs the
    original."""

    _onepass_spec: ActivatedSpec


class SequentialForward(ActivatedForward):
    def forward(self, input):
        if isinstance(input, torch.fx.Proxy) or not isinstance(self, Swapped):
            return _stock.original(self).forward(self, input)
        return _sequential(self, _fused, input)


class ResnetBlock2DForward(ActivatedForward):
    def forward(self, input_tensor, temb, *args, **kwargs):
        traced = isinstance(input_tensor, torch.fx.Proxy)
        if args or kwargs or traced or not isinstance(self, Swapped):
            return _stock.original(self).forward(self, input_tensor, temb, *args, **kwargs)
        return _resnet_block_2d(self, _fused, input_tensor, temb)


FORWARDS = {"Sequential": SequentialForward, "ResnetBlock2D": ResnetBlock2DForward}


# ---- parts ---------------------------------------------------------------------------------------


class Activated(NamedTuple):
    """A module that has a form, and the names of the norms that may be computed with silu."""

    form: str
    norms: tuple[str, ...]


_FORWARDS = {cls: _stock.method(cls) for cls in (nn.GroupNorm, nn.SiLU)}


def _is_stock(module: nn.Module | None, of: type[nn.Module]) -> bool:
    """Whether a module runs torch's own forward of this class, or the one that `swap` put in its
    place, and nothing else."""
    own = isinstance(module, of) and forward_of(module) is _FORWARDS[of]
    return own and is_untouched(module)


_is_norm = functools.partial(_is_stock, of=nn.GroupNorm)
_is_silu = functools.partial(_is_stock, of=nn.SiLU)


def form_of(module: nn.Module) -> Activated | SkipReason | None:
    """The form of a module; the reason if its class is not the one it was written for; or None."""
    if _stock.definer(type(module)) is nn.Sequential:
        if type(module).__iter__ is not _stock.method(nn.Sequential, "__iter__"):
            return None  # it may run its children in another order
        parts = module._modules
        pairs = [
            (name, following)
            for name, following in itertools.pairwise(parts)
            if isinstance(parts[name], nn.GroupNorm) and isinstance(parts[following], nn.SiLU)
        ]
        norms = tuple(
            name
            for name, following in pairs
            if _is_norm(parts[name]) and _is_silu(parts[following])
        )
        if norms:
            return Activated("Sequential", norms)
        replaced = [name for name in itertools.chain(*pairs) if replaced_forward(parts[name])]
        return Reason.PART_FORWARD.format(replaced[0]) if replaced else None
    cls = getattr(sys.modules.get(_SOURCE), "ResnetBlock2D", None)
    if cls is None or not isinstance(module, cls):
        return None
    if type(module).forward is not cls.forward:
        return Reason.OWN_FORWARD.format()
    silu = module._modules.get("nonlinearity")
    if not _is_silu(silu):
        replaced = isinstance(silu, nn.SiLU) and replaced_forward(silu)
        return Reason.PART_FORWARD.format("nonlinearity") if replaced else None
    names = ("norm1",) if module.time_embedding_norm == "scale_shift" else ("norm1", "norm2")
    norms = tuple(name for name in names if _is_norm(module._modules.get(name)))
    return Activated("ResnetBlock2D", norms) if norms else None


# ---- proof ---------------------------------------------------------------------------------------

# In few draws of few channels stock's error may by luck be small, and a correct block be refused.
_BATCH, _CONDITION, _SIDE, _CHANNELS, _DRAWS = 2, 5, 4, 64, 8


class _Half(nn.Module):
    """A stand-in for dropout that shows where it is applied, and rounds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def configuration(module: nn.Module, activated: Activated) -> tuple:
    """Two modules with the same configuration get the same verdict. Valid while both are alive."""
    of_norms = tuple((module._modules[n].num_groups, module._modules[n].eps) for n in _NORMS)
    others = tuple(getattr(module, name, None) is None for name in (*_OPTIONAL, "time_emb_proj"))
    cls, skipped = type(module), bool(getattr(module, "skip_time_act", False))
    scale = module.output_scale_factor
    return cls, cls.forward, activated, of_norms, others, module.time_embedding_norm, skipped, scale


_NORMS = ("norm1", "norm2")
_OPTIONAL = ("upsample", "downsample", "conv_shortcut")


def prove(module: nn.Module, activated: Activated) -> ActivatedSpec | str:
    """The spec of a `ResnetBlock2D` that computes its form, or the reason why it is not swapped.

    The module is only read, as by `probe.probe`.
    """
    spec = ActivatedSpec(*activated)

    def ours(twin, *args):
        vars(twin)["_onepass_spec"] = spec
        return _resnet_block_2d(twin, _fused_always, *args)

    def exact(twin, *args):
        vars(twin)["_onepass_spec"] = spec
        if args[0].dtype is torch.bfloat16:
            return _resnet_block_2d(twin, _exact, *args)
        wide = (x if x is None else x.double() for x in args)
        return _resnet_block_2d(twin.double(), _composed, *wide)

    forwards = (type(module).forward, ours, exact)
    with trials.isolated():
        try:
            for dtype in (torch.float32, torch.bfloat16):
                results = functools.partial(_results, module)
                trials.judge(spec.form, dtype, forwards, results, _DRAWS)
        except trials.Refused as refusal:
            return str(refusal)
    return spec


def _fused_always(norm, activation, x):
    arguments = (x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return onepass.functional.group_norm(*arguments, activation="silu")


def _exact(norm, activation, x):
    """The result in float64, rounded once: in 16 bits the rounding of the other parts is not
    tested."""
    wide = (t.double() for t in (norm.weight, norm.bias))
    return reference.group_norm(x.double(), norm.num_groups, *wide, norm.eps, "silu").to(x.dtype)


def _results(module, dtype, seed, forward) -> list[Tensor]:
    """Outputs of a forward on a twin with few channels, and gradients of its inputs and norms."""
    normal = functools.partial(trials.normals(24 + seed, torch.float32), dtype=dtype)
    twin = trials.twin(module)
    twin._modules.update(dict.fromkeys(module._modules))
    groups = [module._modules[name].num_groups for name in _NORMS]
    width = 2 * math.lcm(*groups)
    width *= -(-_CHANNELS // width)
    parts = 2 if module.time_embedding_norm == "scale_shift" else 1
    made = {
        name: nn.GroupNorm(count, width, eps=module._modules[name].eps, device="cpu")
        for name, count in zip(_NORMS, groups, strict=True)
    }
    for name in ("conv1", "conv2", "conv_shortcut"):
        if module._modules.get(name) is not None:
            made[name] = nn.Conv2d(width, width, 1, device="cpu")
    if module._modules.get("time_emb_proj") is not None:
        made["time_emb_proj"] = nn.Linear(_CONDITION, parts * width, device="cpu")
    for part in made.values():
        part.to(dtype)
        for parameter in part.parameters():
            parameter.data = normal(*parameter.shape)
    twin._modules.update(made, nonlinearity=nn.SiLU(), dropout=_Half())
    if module.upsample is not None:
        vars(twin).pop("upsample", None)
        vars(twin)["upsample"] = functools.partial(F.interpolate, scale_factor=2.0)
    if module.downsample is not None:
        vars(twin).pop("downsample", None)
        vars(twin)["downsample"] = functools.partial(F.avg_pool2d, kernel_size=2)
    trials.call_without_hooks(twin)
    x = normal(_BATCH, width, _SIDE, _SIDE).requires_grad_()
    temb = normal(_BATCH, _CONDITION).requires_grad_()
    leaves = [x, *made["norm1"].parameters(), *made["norm2"].parameters()]
    if "time_emb_proj" in made:
        leaves.append(temb)
    given = temb if "time_emb_proj" in made else None
    with trials.foreign_code("fails on small layers"):
        return trials.outcome(lambda: forward(twin, x, given), leaves, lambda y: normal(*y.shape))
