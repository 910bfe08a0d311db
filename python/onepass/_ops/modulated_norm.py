"""The norm family's modulated ops: fakes, autograd. One differentiable entry, `modulated_norm`.

A norm after a residual add with a scaled branch uses the same ops, with a single group."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient
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
from onepass._ops.norm import NormKind, norm_options, statistics
from onepass._ops.placement import placed
from onepass._ops.random import draw_seed, puts_back
from onepass.reference import norm as reference
from onepass.reference.dropout import dropout as reference_dropout
from onepass.reference.dropout import scaled

_forward = torch.ops.onepass.modulated_norm_forward.default
_forward_check = torch.ops.onepass.modulated_norm_forward_check.default
_backward = torch.ops.onepass.modulated_norm_backward.default
_backward_check = torch.ops.onepass.modulated_norm_backward_check.default

for _check in (_forward_check, _backward_check):
    run_each(_check)

# Bits of modulated_norm_backward's grad_mask.
_INPUT, _RESIDUAL, _SCALE, _SHIFT, _GATE = _BITS = 1, 2, 4, 8, 16

# Defaults of the forward's last arguments, from row_scale on.
_DEFAULTS = (None, None, 1.0, 0.0, None, False)


@logged
@placed
def modulated_norm(
    input: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """(output, residual_out) of a modulated norm; residual_out is empty without a residual.

    The arguments are those of `onepass.functional`.
    """
    return _run((input, scale, shift, residual, gate, None, None), normalized_shape, kind, eps)


@logged
@placed
@puts_back
def scaled_add_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, residual_out) of a norm after a residual add whose branch is scaled.

    The arguments are those of `onepass._ops.norm.norm`, and the scales.
    """
    if row_scale is not None and row_scale.requires_grad:
        refuse_gradient("add_rms_norm" if kind == NormKind.RMS else "add_layer_norm", "row_scale")
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    tensors = (input, weight, bias, residual, column_scale, row_scale, seed)
    options = (weight_offset, dropout_p, residual_dtype, True)
    return _run(tensors, normalized_shape, kind, eps, options)


def _run(tensors, normalized_shape, kind, eps, options=_DEFAULTS[2:]):
    """`tensors` are in the operator's order; `options` are its last arguments."""
    normalized_shape, eps, out_dtype = norm_options(tensors[0], normalized_shape, kind, eps)
    if torch.compiler.is_compiling():
        options = (constant(options[0]), *options[1:])
    constants = (normalized_shape, kind, eps, out_dtype)
    if tracing.records():
        arguments = _arguments(tensors, constants, False, options)
        return _traced(*arguments)[:2]
    if is_differentiated(*tensors[:5]):
        return _apply_norm(*tensors, constants, options)[:2]
    return _forward(*_arguments(tensors, constants, False, options))[:2]


def _arguments(tensors, constants, save_statistics, options):
    """The arguments in the operator's order."""
    return (*tensors[:5], *constants, save_statistics, *tensors[5:], *options)


class _ModulatedNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, scale, shift, residual, gate, row_scale, seed, constants, options):
        tensors = (input, scale, shift, residual, gate, row_scale, seed)
        return _forward(*_arguments(tensors, constants, True, options))

    @staticmethod
    def formula(input, scale, shift, residual, gate, row_scale, seed, constants, options):
        return FORMULAS[_forward](
            *_arguments(
                (input, scale, shift, residual, gate, row_scale, seed), constants, False, options
            )
        )

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, scale, shift, residual, gate, row_scale, seed, ctx.constants, ctx.options = inputs
        _, residual_out, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        needs_input, _, _, needs_residual, needs_gate, *_ = ctx.needs_input_grad
        if needs_input or needs_residual or needs_gate:
            ctx.mark_non_differentiable(mean, rstd)
        else:  # the sum depends on nothing that is trained
            ctx.mark_non_differentiable(residual_out, mean, rstd)
        ctx.has_residual = residual is not None
        x = residual_out if ctx.has_residual else input
        branch = None if gate is None else input
        ctx.save_for_backward(x, scale, shift, branch, gate, row_scale, seed, mean, rstd)
        ctx.input_dtype = input.dtype
        ctx.residual_dtype = residual.dtype if ctx.has_residual else None

    @staticmethod
    def backward(ctx, doutput, dresidual_out, _dmean, _drstd):
        needs = ctx.needs_input_grad
        if not ctx.has_residual:
            dresidual_out = None  # compiled graphs hand over a gradient of the size-0 output
        if doutput is None and dresidual_out is None:
            return (None,) * len(needs)
        x, scale, shift, branch, gate, row_scale, seed, mean, rstd = ctx.saved_tensors
        normalized_shape, kind, eps, _ = ctx.constants
        weight_offset, dropout_p, _, is_shared = ctx.options
        needs_input, needs_scale, needs_shift, needs_residual, needs_gate, *_ = needs
        # Where nothing scales the branch, input and residual have one gradient: computed once,
        # returned twice.
        is_scaled = not (gate is None and row_scale is None and seed is None)
        one = (
            needs_input
            and needs_residual
            and not is_scaled
            and ctx.input_dtype == ctx.residual_dtype
        )
        wanted = (
            needs_input and not one,
            needs_residual,
            needs_scale and doutput is not None,
            needs_shift and doutput is not None,
            needs_gate,
        )
        mask = sum(bit for bit, want in zip(_BITS, wanted, strict=True) if want)
        arguments = (doutput, dresidual_out, x, scale, shift, branch, gate, mean, rstd)
        arguments += (normalized_shape, kind, ctx.input_dtype, ctx.residual_dtype, mask)
        arguments += (row_scale, seed, weight_offset, dropout_p, is_shared)
        if is_differentiated_again():  # create_graph=True
            gradients = _apply_backward(eps, *arguments)
        else:
            gradients = _backward(*arguments)
        dinput, dresidual, dscale, dshift, dgate = (
            gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
        )
        first = dresidual if one else dinput
        return first, dscale, dshift, dresidual, dgate, *(None,) * (len(needs) - 5)


class _ModulatedNormBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eps, *arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        ctx.eps, *tensors = inputs[:8]
        # Without the statistics: the formula computes them from x.
        ctx.save_for_backward(*tensors, *inputs[15:17])
        ctx.constants = inputs[10:12]
        ctx.mask = inputs[14]
        ctx.options = inputs[17:]

    @staticmethod
    def backward(ctx, *second):
        normalized_shape, kind = ctx.constants
        weight_offset, dropout_p, is_shared = ctx.options
        *inputs, row_scale, seed = ctx.saved_tensors

        def formula(doutput, dresidual_out, x, scale, shift, branch, gate):
            dx, dscale, dshift = dresidual_out, None, None
            if doutput is not None:
                y = reference.modulated(
                    x, normalized_shape, scale, shift, ctx.eps, kind=kind, offset=weight_offset
                )
                of = [t for t in (x, scale, shift) if t is not None]
                first = iter(torch.autograd.grad(y, of, doutput, create_graph=True))
                dx = next(first)
                dscale = None if scale is None else next(first)
                dshift = None if shift is None else next(first)
                dx = dx if dresidual_out is None else dx + dresidual_out
            dbranch = dx if seed is None else reference_dropout(dx, dropout_p, seed)
            dbranch = scaled(dbranch, row_scale=row_scale)
            if gate is None:
                return dbranch, dx, dscale, dshift, None
            each = reference.for_rows(gate, x, normalized_shape)
            dgate = (dbranch * branch).sum_to_size(each.shape)
            return dbranch * each, dx, dscale, dshift, dgate.reshape(gate.shape)

        gradients = derivatives.vjp(
            formula,
            inputs,
            [
                gradient if ctx.mask & bit else None
                for gradient, bit in zip(second, _BITS, strict=True)
            ],
        )
        return (None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 1 - len(gradients)))


_apply_norm = applied(_ModulatedNorm)
_apply_backward = applied(_ModulatedNormBackward)


def _in_trace(*arguments):
    # An exported program omits trailing default arguments.
    row_scale, seed, *options = (*arguments[10:], *_DEFAULTS[len(arguments) - 10 :])
    tensors, constants = (*arguments[:5], row_scale, seed), arguments[5:9]
    if is_differentiated(*tensors[:5]):
        return _apply_norm(*tensors, constants, tuple(options))
    return _forward(*arguments)


_traced = tracing.operator("modulated_norm", _forward, _in_trace)


@torch.library.register_fake("onepass::modulated_norm_forward")
def _(
    input,
    scale,
    shift,
    residual,
    gate,
    normalized_shape,
    kind,
    eps,
    out_dtype,
    save_statistics,
    row_scale=None,
    seed=None,
    weight_offset=1.0,
    dropout_p=0.0,
    residual_dtype=None,
    shared=False,
):
    offer(_forward)
    fake_checks.check(_forward_check, **locals())  # the same arguments by the same names
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = input.shape[: input.dim() - len(normalized_shape)]
    stream = input if residual is None else residual
    has_mean = save_statistics and kind != NormKind.RMS
    return (
        input.new_empty(input.shape, dtype=out_dtype or input.dtype),
        stream.new_empty(
            (0,) if residual is None else input.shape, dtype=residual_dtype or stream.dtype
        ),
        input.new_empty(rows if has_mean else (0,), dtype=accumulator),
        input.new_empty(rows if save_statistics else (0,), dtype=accumulator),
    )


@torch.library.register_fake("onepass::modulated_norm_backward")
def _(
    doutput,
    dresidual_out,
    x,
    scale,
    shift,
    branch,
    gate,
    mean,
    rstd,
    normalized_shape,
    kind,
    input_dtype,
    residual_dtype,
    grad_mask,
    row_scale=None,
    seed=None,
    weight_offset=1.0,
    dropout_p=0.0,
    shared=False,
):
    fake_checks.check(_backward_check, **locals())

    other = x if shared else scale

    def like(bit, of, dtype=None):
        dtype = dtype or (other if of is None else of).dtype
        wanted = grad_mask & bit and of is not None
        return x.new_empty(of.shape if wanted else (0,), dtype=dtype)

    return (
        like(_INPUT, x, input_dtype if branch is None else branch.dtype),
        like(_RESIDUAL, x, residual_dtype),
        like(_SCALE, scale),
        like(_SHIFT, shift),
        like(_GATE, gate),
    )


@decomposes(_forward, unless=("seed",))
def _(
    input,
    scale,
    shift,
    residual,
    gate,
    normalized_shape,
    kind,
    eps,
    out_dtype,
    save_statistics,
    row_scale=None,
    seed=None,
    weight_offset=1.0,
    dropout_p=0.0,
    residual_dtype=None,
    shared=False,
):
    x, residual_out = input, input.new_empty(0)
    if residual is not None:
        branch, above, gate = wide(input, residual, gate)
        if seed is not None:
            branch = reference_dropout(branch, dropout_p, seed)
        residual_out = x = reference.gated_add(branch, above, gate, normalized_shape, row_scale).to(
            residual_dtype or residual.dtype
        )
    x, scale, shift = wide(x, scale, shift)
    y = reference.modulated(x, normalized_shape, scale, shift, eps, kind=kind, offset=weight_offset)
    mean = rstd = x.new_empty(0)
    if save_statistics:
        mean, rstd = statistics(x, normalized_shape, kind, eps)
    return y.to(out_dtype or input.dtype), residual_out, mean, rstd
