"""The norm family's modulated ops: fakes, autograd. One differentiable entry, `modulated_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._ops import double_backward, fake_checks, tracing
from onepass._ops.decomposition import decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass._ops.norm import NormKind, norm_options, statistics
from onepass.reference import norm as reference

_forward = torch.ops.onepass.modulated_norm_forward.default
_forward_check = torch.ops.onepass.modulated_norm_forward_check.default
_backward = torch.ops.onepass.modulated_norm_backward.default
_backward_check = torch.ops.onepass.modulated_norm_backward_check.default

for _check in (_forward_check, _backward_check):
    run_each(_check)

# Bits of modulated_norm_backward's grad_mask.
_INPUT, _RESIDUAL, _SCALE, _SHIFT, _GATE = _BITS = 1, 2, 4, 8, 16


@logged
def modulated_norm(
    input: Tensor,
    scale: Tensor,
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
    normalized_shape, eps, out_dtype = norm_options(input, normalized_shape, kind, eps)
    tensors = (input, scale, shift, residual, gate)
    constants = (normalized_shape, kind, eps, out_dtype)
    if tracing.records():
        return _traced(*tensors, *constants, False)[:2]
    if is_differentiated(*tensors):
        return _apply_norm(*tensors, constants)[:2]
    return _forward(*tensors, *constants, False)[:2]


class _ModulatedNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, scale, shift, residual, gate, constants):
        return _forward(input, scale, shift, residual, gate, *constants, True)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, scale, shift, residual, gate, ctx.constants = inputs
        _, residual_out, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        needs_input, _, _, needs_residual, needs_gate, _ = ctx.needs_input_grad
        if needs_input or needs_residual or needs_gate:
            ctx.mark_non_differentiable(mean, rstd)
        else:  # the sum depends on nothing that is trained
            ctx.mark_non_differentiable(residual_out, mean, rstd)
        ctx.has_residual = residual is not None
        x = residual_out if ctx.has_residual else input
        branch = None if gate is None else input
        ctx.save_for_backward(x, scale, shift, branch, gate, mean, rstd)
        ctx.input_dtype = input.dtype
        ctx.residual_dtype = residual.dtype if ctx.has_residual else None

    @staticmethod
    def backward(ctx, doutput, dresidual_out, _dmean, _drstd):
        needs = ctx.needs_input_grad
        if not ctx.has_residual:
            dresidual_out = None  # compiled graphs hand over a gradient of the size-0 output
        if doutput is None and dresidual_out is None:
            return (None,) * len(needs)
        x, scale, shift, branch, gate, mean, rstd = ctx.saved_tensors
        normalized_shape, kind, eps, _ = ctx.constants
        needs_input, needs_scale, needs_shift, needs_residual, needs_gate, _ = needs
        # Without a gate, input and residual have one gradient: computed once, returned twice.
        shared = (
            needs_input
            and needs_residual
            and gate is None
            and ctx.input_dtype == ctx.residual_dtype
        )
        wanted = (
            needs_input and not shared,
            needs_residual,
            needs_scale and doutput is not None,
            needs_shift and doutput is not None,
            needs_gate,
        )
        mask = sum(bit for bit, want in zip(_BITS, wanted, strict=True) if want)
        arguments = (doutput, dresidual_out, x, scale, shift, branch, gate, mean, rstd)
        arguments += (normalized_shape, kind, ctx.input_dtype, ctx.residual_dtype, mask)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _apply_backward(eps, *arguments)
        else:
            gradients = _backward(*arguments)
        dinput, dresidual, dscale, dshift, dgate = (
            gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
        )
        return dresidual if shared else dinput, dscale, dshift, dresidual, dgate, None


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
        ctx.save_for_backward(*tensors)  # without the statistics, which are x's
        ctx.constants = inputs[10:]

    @staticmethod
    def backward(ctx, *second):
        normalized_shape, kind, *_, mask = ctx.constants

        def formula(doutput, dresidual_out, x, scale, shift, branch, gate):
            dx, dscale, dshift = dresidual_out, None, None
            if doutput is not None:
                y = reference.modulated(x, normalized_shape, scale, shift, ctx.eps, kind=kind)
                of = [x, scale] if shift is None else [x, scale, shift]
                dx, dscale, *rest = torch.autograd.grad(y, of, doutput, create_graph=True)
                dshift = rest[0] if rest else None
                dx = dx if dresidual_out is None else dx + dresidual_out
            if gate is None:
                return dx, dx, dscale, dshift, None
            each = reference.for_rows(gate, x, normalized_shape)
            dgate = dx * branch
            summed = tuple(d for d in range(x.dim()) if each.shape[d] != x.shape[d])
            if summed:
                dgate = dgate.sum(summed, keepdim=True)
            return dx * each, dx, dscale, dshift, dgate.reshape(gate.shape)

        gradients = double_backward.vjp(
            formula,
            ctx.saved_tensors,
            [gradient if mask & bit else None for gradient, bit in zip(second, _BITS, strict=True)],
        )
        return (None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 1 - len(gradients)))


_apply_norm = applied(_ModulatedNorm)
_apply_backward = applied(_ModulatedNormBackward)


def _in_trace(input, scale, shift, residual, gate, *constants):
    tensors = (input, scale, shift, residual, gate)
    if is_differentiated(*tensors):
        return _apply_norm(*tensors, constants[:-1])
    return _forward(*tensors, *constants)


_traced = tracing.operator("modulated_norm", _forward, _in_trace)


@torch.library.register_fake("onepass::modulated_norm_forward")
def _(input, scale, shift, residual, *options):
    offer(_forward)
    fake_checks.check(_forward_check, input, scale, shift, residual, *options)
    _, normalized_shape, kind, _, out_dtype, save_statistics = options
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = input.shape[: input.dim() - len(normalized_shape)]
    stream = input if residual is None else residual
    has_mean = save_statistics and kind != NormKind.RMS
    return (
        input.new_empty(input.shape, dtype=out_dtype or input.dtype),
        stream.new_empty((0,) if residual is None else input.shape),
        input.new_empty(rows if has_mean else (0,), dtype=accumulator),
        input.new_empty(rows if save_statistics else (0,), dtype=accumulator),
    )


@torch.library.register_fake("onepass::modulated_norm_backward")
def _(*arguments):
    fake_checks.check(_backward_check, *arguments)
    _, _, x, scale, shift, branch, gate, *_, input_dtype, residual_dtype, grad_mask = arguments

    def like(bit, of, dtype=None):
        dtype = dtype or (scale if of is None else of).dtype
        wanted = grad_mask & bit and of is not None
        return x.new_empty(of.shape if wanted else (0,), dtype=dtype)

    return (
        like(_INPUT, x, input_dtype if branch is None else branch.dtype),
        like(_RESIDUAL, x, residual_dtype),
        like(_SCALE, scale),
        like(_SHIFT, shift),
        like(_GATE, gate),
    )


@decomposes(_forward)
def _(input, scale, shift, residual, gate, normalized_shape, kind, eps, out_dtype, saved):
    x, residual_out = input, input.new_empty(0)
    if residual is not None:
        residual_out = x = reference.gated_add(*wide(input, residual, gate), normalized_shape).to(
            residual.dtype
        )
    x, scale, shift = wide(x, scale, shift)
    y = reference.modulated(x, normalized_shape, scale, shift, eps, kind=kind)
    mean = rstd = x.new_empty(0)
    if saved:
        mean, rstd = statistics(x, normalized_shape, kind, eps)
    return y.to(out_dtype or input.dtype), residual_out, mean, rstd
