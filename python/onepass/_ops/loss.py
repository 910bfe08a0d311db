"""The loss family's ops: fakes, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient, refuse_second_derivative
from onepass._mapping import is_mapped, refuse_mapped, run_each
from onepass._negative import refuse_where_written
from onepass._ops import derivatives, fake_checks, tracing
from onepass._ops.decomposition import FORMULAS, decomposes, offer, wide
from onepass._ops.differentiation import (
    applied,
    are_transforms_active,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.dispatch_log import logged
from onepass._ops.placement import placed
from onepass.reference import loss as reference

_forward = torch.ops.onepass.loss_forward.default
_forward_check = torch.ops.onepass.loss_forward_check.default
_backward = torch.ops.onepass.loss_backward.default
_backward_check = torch.ops.onepass.loss_backward_check.default
_backward_inplace = torch.ops.onepass.loss_backward_inplace.default
_backward_inplace_check = torch.ops.onepass.loss_backward_inplace_check.default

for _check in (_forward_check, _backward_check, _backward_inplace_check):
    run_each(_check)
refuse_mapped(_backward_inplace)
refuse_where_written(_backward_inplace)

REDUCTIONS = {name: number for number, name in enumerate(reference.REDUCTIONS)}


@logged
@placed
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    reduction: int,
    inplace: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The loss; in float32 for 16-bit logits under autocast, as torch's.

    inplace: the backward of an eager call writes the gradient over the logits.
    out_dtype: the loss's; None: as above.
    """
    (weight,) = wide(weight)
    if torch.compiler.is_compiling():
        label_smoothing, softcap = constant(label_smoothing), constant(softcap)
        z_loss = constant(z_loss)
    if input.dtype.itemsize == 2 and torch.is_autocast_enabled(input.device.type):
        out_dtype = torch.float32
    options = (ignore_index, label_smoothing, softcap, reduction, z_loss, out_dtype)
    if tracing.records():
        return _traced(input, target, weight, *options)[0]
    return _compute(input, target, weight, *options, inplace=inplace)[0]


def _compute(input, target, weight, *options, inplace=False):
    if not is_differentiated(input, weight):
        return _forward(input, target, weight, *options)
    inplace = inplace and not torch.compiler.is_compiling() and not are_transforms_active()
    return _apply_loss(input, target, weight, options, inplace)


class _Loss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, target, weight, options, inplace):
        return _forward(input, target, weight, *options)

    @staticmethod
    def formula(input, target, weight, options, inplace):
        return FORMULAS[_forward](input, target, weight, *options)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, target, weight, ctx.options, ctx.inplace = inputs
        _, statistics, total_weight = outputs
        if ctx.needs_input_grad[2]:
            refuse_gradient("cross_entropy", "weight")
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics, total_weight)
        ctx.save_for_backward(input, target, weight, statistics, total_weight)

    @staticmethod
    def backward(ctx, dloss, _dstatistics, _dtotal_weight):
        if dloss is None:
            return (None,) * 5
        input, target, weight, statistics, total_weight = ctx.saved_tensors
        *options, z_loss, _ = ctx.options
        arguments = (input, target, weight, *options, dloss, statistics, total_weight)
        if is_differentiated_again():  # create_graph=True
            if ctx.inplace:
                refuse_second_derivative("cross_entropy", "inplace_backward")
            dinput = _apply_backward(z_loss, *arguments)
        elif ctx.inplace and not is_mapped(dloss):  # batched gradients are several
            _backward_inplace(*arguments)
            # Autograd then refuses saved views of the logits, this call's too.
            torch.autograd.graph.increment_version(input)
            dinput = input.detach()
        else:
            dinput = _backward(*arguments)
        return dinput, None, None, None, None


class _LossBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z_loss, *arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.z_loss, input, target, weight, *options, dloss, _, _ = inputs
        ctx.save_for_backward(dloss, input, target, weight)
        ctx.options = options

    @staticmethod
    def backward(ctx, second):
        dloss, input, target, weight = ctx.saved_tensors
        *options, reduction = ctx.options
        options += [ctx.z_loss, reference.REDUCTIONS[reduction]]

        def formula(dloss, input):
            return [reference.cross_entropy_backward(dloss, input, target, weight, *options)]

        dloss, dinput = derivatives.vjp(formula, [dloss, input], [second])
        return None, dinput, *(None,) * 6, dloss, None, None


_apply_loss = applied(_Loss)
_apply_backward = applied(_LossBackward)
_traced = tracing.operator("loss", _forward, _compute)


@torch.library.register_fake("onepass::loss_forward")
def _(input, target, *options):
    offer(_forward)
    fake_checks.check(_forward_check, input, target, *options)
    *_, reduction_kind, _, out_dtype = options
    rows = input.shape[0] if input.dim() == 2 else 1
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    is_mean = reduction_kind == REDUCTIONS["mean"]
    return (
        input.new_empty(() if reduction_kind else target.shape, dtype=out_dtype or input.dtype),
        input.new_empty((3, rows), dtype=accumulator),
        input.new_empty(() if is_mean else (0,), dtype=accumulator),
    )


@torch.library.register_fake("onepass::loss_backward")
def _(input, *arguments):
    fake_checks.check(_backward_check, input, *arguments)
    return input.new_empty(input.shape)


@torch.library.register_fake("onepass::loss_backward_inplace")
def _(input, *arguments):
    fake_checks.check(_backward_inplace_check, input, *arguments)


@decomposes(_forward)
def _(input, target, weight, *options):
    *options, reduction_kind, z_loss, out_dtype = options
    dtype = input.dtype
    (input,) = wide(input)
    options = (*options, z_loss)
    loss = reference.cross_entropy(
        input, target, weight, *options, reference.REDUCTIONS[reduction_kind]
    )
    statistics, total_weight = reference.statistics(input, target, weight, *options)
    if reduction_kind != REDUCTIONS["mean"]:
        total_weight = input.new_empty((0,))
    return loss.to(out_dtype or dtype), statistics, total_weight
