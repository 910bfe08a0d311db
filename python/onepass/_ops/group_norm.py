"""The group norm family's ops: fakes, autograd, the order of the output's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._ops import derivatives, fake_checks, tracing
from onepass._ops.decomposition import FORMULAS, decomposes, offer, wide
from onepass._ops.differentiation import (
    applied,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.dispatch_log import logged
from onepass._ops.placement import placed
from onepass.reference import group_norm as reference

_forward = torch.ops.onepass.group_norm_forward.default
_forward_check = torch.ops.onepass.group_norm_forward_check.default
_backward = torch.ops.onepass.group_norm_backward.default
_backward_check = torch.ops.onepass.group_norm_backward_check.default

for _check in (_forward_check, _backward_check):
    run_each(_check)

KINDS = reference.ACTIVATIONS
_NAMES = {number: name for name, number in KINDS.items()}

# Bits of group_norm_backward's grad_mask.
_INPUT, _WEIGHT, _BIAS = 1, 2, 4


def has_channels_last(input: Tensor) -> bool:
    """Whether torch counts input's memory order as channels last; the output then has it too."""
    if input.dim() not in (4, 5) or input.is_contiguous():
        return False
    sizes, strides = input.shape, input.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(input.dim() - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * (sizes[d] if sizes[d] > 1 else 1)
    return True


@logged
@placed
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: int,
) -> Tensor:
    """activation(group_norm(input)); kind is a number of KINDS."""
    if torch.compiler.is_compiling():
        eps = constant(eps)
    out_dtype = None
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype is not torch.float64:
        out_dtype = torch.float32  # as torch's
    constants = (num_groups, eps, kind, has_channels_last(input), out_dtype)
    if tracing.records():
        return _traced(input, weight, bias, *constants, False)[0]
    if is_differentiated(input, weight, bias):
        return _apply_norm(input, weight, bias, constants)[0]
    return _forward(input, weight, bias, *constants, False)[0]


class _GroupNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, constants):
        return _forward(input, weight, bias, *constants, True)

    @staticmethod
    def formula(input, weight, bias, constants):
        return FORMULAS[_forward](input, weight, bias, *constants, False)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, weight, bias, ctx.constants = inputs
        _, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx, doutput, _dmean, _drstd):
        needs = ctx.needs_input_grad
        if doutput is None:
            return None, None, None, None
        num_groups, eps, kind, channels_last, _ = ctx.constants
        mask = sum(bit for bit, need in zip((_INPUT, _WEIGHT, _BIAS), needs, strict=False) if need)
        arguments = (doutput, *ctx.saved_tensors, num_groups, kind, channels_last, mask)
        if is_differentiated_again():  # create_graph=True
            gradients = _apply_backward(eps, *arguments)
        else:
            gradients = _backward(*arguments)
        return *(g if need else None for g, need in zip(gradients, needs, strict=False)), None


class _GroupNormBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eps, *arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        ctx.eps, doutput, input, weight, bias, _, _, ctx.num_groups, ctx.kind, _, ctx.mask = inputs
        ctx.save_for_backward(doutput, input, weight, bias)

    @staticmethod
    def backward(ctx, *second):
        def formula(doutput, input, weight, bias):
            y = reference.group_norm(input, ctx.num_groups, weight, bias, ctx.eps, _NAMES[ctx.kind])
            of = [t for t in (input, weight, bias) if t is not None]
            first = iter(torch.autograd.grad(y, of, doutput, create_graph=True))
            return [next(first) if t is not None else None for t in (input, weight, bias)]

        wanted = [ctx.mask & bit for bit in (_INPUT, _WEIGHT, _BIAS)]
        gradients = derivatives.vjp(
            formula,
            ctx.saved_tensors,
            [gradient if want else None for gradient, want in zip(second, wanted, strict=True)],
        )
        return None, *gradients, *(None,) * 6


_apply_norm = applied(_GroupNorm)
_apply_backward = applied(_GroupNormBackward)


def _in_trace(input, weight, bias, *constants):
    if is_differentiated(input, weight, bias):
        return _apply_norm(input, weight, bias, constants[:-1])
    return _forward(input, weight, bias, *constants)


_traced = tracing.operator("group_norm", _forward, _in_trace)


def _empty_like(input: Tensor, channels_last: bool, dtype: torch.dtype) -> Tensor:
    if not channels_last:
        return input.new_empty(input.shape, dtype=dtype)
    memory_format = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    return torch.empty(input.shape, dtype=dtype, device=input.device, memory_format=memory_format)


@torch.library.register_fake("onepass::group_norm_forward")
def _(
    input,
    weight,
    bias,
    num_groups,
    eps,
    activation_kind,
    channels_last,
    out_dtype,
    save_statistics,
):
    offer(_forward)
    fake_checks.check(_forward_check, **locals())  # the same arguments by the same names
    kept = torch.float64 if input.dtype is torch.float64 else torch.float32
    statistics = (input.shape[0], num_groups) if save_statistics else (0,)
    return (
        _empty_like(input, channels_last, out_dtype or input.dtype),
        input.new_empty(statistics, dtype=kept),
        input.new_empty(statistics, dtype=kept),
    )


@torch.library.register_fake("onepass::group_norm_backward")
def _(
    doutput,
    input,
    weight,
    bias,
    mean,
    rstd,
    num_groups,
    activation_kind,
    channels_last,
    grad_mask,
):
    fake_checks.check(_backward_check, **locals())

    def of_channels(bit, tensor):
        is_wanted = bool(grad_mask & bit) and tensor is not None
        dtype = input.dtype if tensor is None else tensor.dtype
        return input.new_empty((input.shape[1] if is_wanted else 0,), dtype=dtype)

    dinput = input.new_empty(0)
    if grad_mask & _INPUT:
        dinput = _empty_like(input, channels_last, input.dtype)
    return dinput, of_channels(_WEIGHT, weight), of_channels(_BIAS, bias)


@decomposes(_forward)
def _(
    input,
    weight,
    bias,
    num_groups,
    eps,
    activation_kind,
    channels_last,
    out_dtype,
    save_statistics,
):
    x, weight, bias = wide(input, weight, bias)
    y = reference.group_norm(x, num_groups, weight, bias, eps, _NAMES[activation_kind])
    mean = rstd = x.new_empty(0)
    if save_statistics:
        mean, rstd = reference.statistics(x, num_groups, eps)
    return y.to(out_dtype or input.dtype), mean, rstd
