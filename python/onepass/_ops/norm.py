"""The norm family's ops: fakes, autograd, seeds. One differentiable entry, `norm`."""

from __future__ import annotations

import enum
import functools

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
from onepass._ops.random import draw_seed, puts_back
from onepass.reference import norm as reference
from onepass.reference.dropout import dropout as reference_dropout

_forward = torch.ops.onepass.norm_forward.default
_forward_check = torch.ops.onepass.norm_forward_check.default
_backward = torch.ops.onepass.norm_backward.default
_backward_check = torch.ops.onepass.norm_backward_check.default

run_each(_forward_check)
run_each(_backward_check)


class NormKind(enum.IntEnum):
    """The statistic that normalises a row; the numbers of csrc/ops/norm.h."""

    LAYER = 0
    RMS = 1


# Bits of norm_backward's grad_mask.
_INPUT, _RESIDUAL, _WEIGHT, _BIAS = 1, 2, 4, 8

# The epsilon of rms_norm(eps=None): torch takes the epsilon of the dtype it computes in.
_DEFAULT_EPS = torch.finfo(torch.float32).eps
_DEFAULT_EPS_FLOAT64 = torch.finfo(torch.float64).eps


def default_eps(input: Tensor) -> float:
    """The eps of rms_norm if none is given."""
    return _DEFAULT_EPS_FLOAT64 if input.dtype is torch.float64 else _DEFAULT_EPS


def autocast_dtype(input: Tensor, kind: NormKind) -> torch.dtype:
    """The output's dtype under CUDA's autocast: the one that torch gives."""
    # Dynamo traces the function that a cache wraps, and warns of each.
    of = _cuda_autocast_dtype if torch.compiler.is_compiling() else _known_autocast_dtype
    return of(input.dtype, kind)


def norm_options(
    input: Tensor,
    normalized_shape,
    kind: NormKind,
    eps: float | None,
    out_dtype: torch.dtype | None = None,
) -> tuple[tuple[int, ...], float | None, torch.dtype | None]:
    """(normalized_shape, eps, out_dtype) as the operators take them."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    if eps is None and kind == NormKind.RMS:
        eps = default_eps(input)
    if torch.compiler.is_compiling():
        eps = constant(eps)
    elif tracing.is_tracing():
        normalized_shape = tracing.numbers(normalized_shape)
    if out_dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda"):
        out_dtype = autocast_dtype(input, kind)
    return normalized_shape, eps, out_dtype


@logged
@placed
@puts_back
def norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output, residual_out) of layer norm (or RMS norm), residual_out None without a residual.

    `out_dtype` is the output's dtype, input's by default; the other arguments are those of
    `onepass.functional`, with dropout_p 0 where dropout is off.
    """
    normalized_shape, eps, out_dtype = norm_options(input, normalized_shape, kind, eps, out_dtype)
    if torch.compiler.is_compiling():
        weight_offset = constant(weight_offset)
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    constants = (normalized_shape, kind, eps, weight_offset, dropout_p, out_dtype, residual_dtype)
    if tracing.records():
        output, residual_out, _, _ = _traced(input, residual, weight, bias, seed, *constants, False)
    elif is_differentiated(input, residual, weight, bias):
        # Constants in one tuple: autograd inspects every argument.
        output, residual_out, _, _ = _apply_norm(input, residual, weight, bias, seed, constants)
    else:
        output, residual_out, _, _ = _forward(
            input, residual, weight, bias, seed, *constants, False
        )
    return output, residual_out if residual is not None else None


class _Norm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, residual, weight, bias, seed, constants):
        return _forward(input, residual, weight, bias, seed, *constants, True)

    @staticmethod
    def formula(input, residual, weight, bias, seed, constants):
        return FORMULAS[_forward](input, residual, weight, bias, seed, *constants, False)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, residual, weight, bias, seed, ctx.constants = inputs
        _, residual_out, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        x = input if residual is None else residual_out
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(mean, rstd)
        else:  # the sum depends on nothing that is trained
            ctx.mark_non_differentiable(residual_out, mean, rstd)
        ctx.save_for_backward(x, weight, bias, seed, mean, rstd)
        ctx.input_dtype = input.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx, doutput, dresidual_out, _dmean, _drstd):
        needs = ctx.needs_input_grad
        if ctx.residual_dtype is None:
            dresidual_out = None  # compiled graphs hand over a gradient of the size-0 output
        if doutput is None and dresidual_out is None:
            return (None,) * len(needs)
        x, weight, bias, seed, mean, rstd = ctx.saved_tensors
        normalized_shape, kind, eps, weight_offset, dropout_p, _, _ = ctx.constants
        # Without dropout, input and residual have one gradient: computed once, returned twice.
        shared = needs[0] and needs[1] and seed is None and ctx.input_dtype == ctx.residual_dtype
        mask = (
            (_INPUT if needs[0] and not shared else 0)
            | (_RESIDUAL if needs[1] else 0)
            | (_WEIGHT if needs[2] and doutput is not None else 0)
            | (_BIAS if needs[3] and doutput is not None else 0)
        )
        arguments = (doutput, dresidual_out, x, weight, bias, seed, mean, rstd, normalized_shape)
        arguments += (kind, weight_offset, dropout_p, ctx.input_dtype, ctx.residual_dtype, mask)
        if is_differentiated_again():  # create_graph=True
            gradients = _apply_norm_backward(eps, *arguments)
        else:
            gradients = _backward(*arguments)
        dinput, dresidual, dweight, dbias = gradients
        return (
            (dresidual if shared else dinput) if needs[0] else None,
            dresidual if needs[1] else None,
            dweight if mask & _WEIGHT else None,
            dbias if mask & _BIAS else None,
            *(None,) * (len(needs) - 4),
        )


class _NormBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eps, *arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        ctx.eps, doutput, dresidual_out, x, weight, bias, seed = inputs[:7]
        ctx.save_for_backward(doutput, dresidual_out, x, weight, bias, seed)
        ctx.constants = inputs[9:]

    @staticmethod
    def backward(ctx, *second):
        *inputs, seed = ctx.saved_tensors
        shape, kind, weight_offset, dropout_p, _, _, mask = ctx.constants

        def formula(doutput, dresidual_out, x, weight, bias):
            if doutput is None:
                return _dropped(dresidual_out, dropout_p, seed), dresidual_out, None, None
            if kind == NormKind.RMS:
                y = reference.rms_norm(x, shape, weight, ctx.eps, weight_offset=weight_offset)
            else:
                y = reference.layer_norm(x, shape, weight, bias, ctx.eps)
            of = [t for t in (x, weight, bias) if t is not None]
            first = iter(torch.autograd.grad(y, of, doutput, create_graph=True))
            dx = next(first)
            if dresidual_out is not None:
                dx = dx + dresidual_out
            dweight = None if weight is None else next(first)
            dbias = None if bias is None else next(first)
            return _dropped(dx, dropout_p, seed), dx, dweight, dbias

        wanted = [bool(mask & bit) for bit in (_INPUT, _RESIDUAL, _WEIGHT, _BIAS)]
        gradients = derivatives.vjp(
            formula,
            inputs,
            [gradient if want else None for gradient, want in zip(second, wanted, strict=True)],
        )
        return (None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 1 - len(gradients)))


_apply_norm = applied(_Norm)
_apply_norm_backward = applied(_NormBackward)


def _in_trace(input, residual, weight, bias, seed, *constants):
    if is_differentiated(input, residual, weight, bias):
        return _apply_norm(input, residual, weight, bias, seed, constants[:-1])
    return _forward(input, residual, weight, bias, seed, *constants)


_traced = tracing.operator("norm", _forward, _in_trace)


def _dropped(dx: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return dx if seed is None else reference_dropout(dx, p, seed)


@torch.library.register_fake("onepass::norm_forward")
def _(
    input,
    residual,
    weight,
    bias,
    seed,
    normalized_shape,
    kind,
    eps,
    weight_offset,
    dropout_p,
    out_dtype,
    residual_dtype,
    save_statistics,
):
    offer(_forward)
    fake_checks.check(_forward_check, **locals())  # the same arguments by the same names
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = input.shape[: input.dim() - len(normalized_shape)]
    stream = input if residual is None else residual
    return (
        input.new_empty(input.shape, dtype=out_dtype or input.dtype),
        input.new_empty(
            (0,) if residual is None else input.shape, dtype=residual_dtype or stream.dtype
        ),
        input.new_empty(
            rows if save_statistics and kind != NormKind.RMS else (0,), dtype=accumulator
        ),
        input.new_empty(rows if save_statistics else (0,), dtype=accumulator),
    )


@torch.library.register_fake("onepass::norm_backward")
def _(
    doutput,
    dresidual_out,
    x,
    weight,
    bias,
    seed,
    mean,
    rstd,
    normalized_shape,
    kind,
    weight_offset,
    dropout_p,
    input_dtype,
    residual_dtype,
    grad_mask,
):
    fake_checks.check(_backward_check, **locals())

    def like(shape, wanted, dtype):
        return x.new_empty(shape if wanted else (0,), dtype=dtype)

    want_weight = bool(grad_mask & _WEIGHT) and weight is not None
    want_bias = bool(grad_mask & _BIAS) and bias is not None
    return (
        like(x.shape, grad_mask & _INPUT, input_dtype or x.dtype),
        like(x.shape, grad_mask & _RESIDUAL, residual_dtype or x.dtype),
        like(normalized_shape, want_weight, x.dtype if weight is None else weight.dtype),
        like(normalized_shape, want_bias, x.dtype if bias is None else bias.dtype),
    )


@decomposes(_forward, unless=("seed",))
def _(
    input,
    residual,
    weight,
    bias,
    seed,
    normalized_shape,
    kind,
    eps,
    weight_offset,
    dropout_p,
    out_dtype,
    residual_dtype,
    save_statistics,
):
    residual_out = input.new_empty(0)
    if residual is not None:
        branch = _dropped(*wide(input), dropout_p, seed) if dropout_p else input
        residual_out = (residual + branch).to(residual_dtype or residual.dtype)
    x, weight, bias = wide(input if residual is None else residual_out, weight, bias)
    mean = rstd = x.new_empty(0)
    if kind == NormKind.RMS:
        y = reference.rms_norm(x, normalized_shape, weight, eps, weight_offset=weight_offset)
    else:
        y = reference.layer_norm(x, normalized_shape, weight, bias, eps)
    if save_statistics:
        mean, rstd = statistics(x, normalized_shape, kind, eps)
    return y.to(out_dtype or input.dtype), residual_out, mean, rstd


def statistics(x: Tensor, normalized_shape, kind: NormKind, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, rstd) of each row; of an RMS norm the mean is empty."""
    mean, dims = x.new_empty(0), tuple(range(-len(normalized_shape), 0))
    if kind != NormKind.RMS:
        mean = x.mean(dims)
        x = x - x.mean(dims, keepdim=True)
    return mean, torch.rsqrt((x * x).mean(dims) + eps)


def _cuda_autocast_dtype(dtype: torch.dtype, kind: NormKind) -> torch.dtype:
    """The dtype that torch's own norm returns under CUDA autocast, found by calling it."""
    norms = {
        NormKind.LAYER: torch.nn.functional.layer_norm,
        NormKind.RMS: torch.nn.functional.rms_norm,
    }
    function = norms[kind]
    with torch.no_grad(), torch.autocast("cuda", enabled=True):
        return function(torch.zeros(1, 8, dtype=dtype, device="cuda"), (8,)).dtype


_known_autocast_dtype = functools.cache(_cuda_autocast_dtype)
