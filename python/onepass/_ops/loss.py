"""The loss family's operator, whose backward may write over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_second_derivative
from onepass._mapping import is_mapped
from onepass._ops import tracing
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.differentiation import (
    applied,
    are_transforms_active,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.entry import entry
from onepass._ops.operator import Raw
from onepass.reference import loss as reference

REDUCTIONS = {name: number for number, name in enumerate(reference.REDUCTIONS)}


@entry
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
    # torch knows no autocast of meta, and raises.
    if (
        input.dtype.itemsize == 2
        and not input.is_meta
        and torch.is_autocast_enabled(input.device.type)
    ):
        out_dtype = torch.float32
    options = (ignore_index, label_smoothing, softcap, reduction, z_loss, out_dtype)
    if inplace and _is_eager() and is_differentiated(input, weight):
        return _apply_inplace(input, target, weight, options)[0]
    return _loss.run(input, target, weight, *options)[0]


def _is_eager() -> bool:
    return not (torch.compiler.is_compiling() or tracing.is_tracing() or are_transforms_active())


def _outputs(input, target, reduction_kind, out_dtype):
    rows = input.shape[0] if input.dim() == 2 else 1
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    is_mean = reduction_kind == REDUCTIONS["mean"]
    return (
        input.new_empty(() if reduction_kind else target.shape, dtype=out_dtype or input.dtype),
        input.new_empty((3, rows), dtype=accumulator),
        input.new_empty(() if is_mean else (0,), dtype=accumulator),
    )


def _definition(
    input, target, weight, ignore_index, label_smoothing, softcap, reduction_kind, z_loss, out_dtype
):
    dtype = input.dtype
    (input,) = wide(input)
    options = (ignore_index, label_smoothing, softcap, z_loss)
    loss = reference.cross_entropy(
        input, target, weight, *options, reference.REDUCTIONS[reduction_kind]
    )
    statistics, total_weight = reference.statistics(input, target, weight, *options)
    if reduction_kind != REDUCTIONS["mean"]:
        total_weight = input.new_empty((0,))
    return loss.to(out_dtype or dtype), statistics, total_weight


_loss = differentiable(
    "loss",
    _outputs,
    _definition,
    lambda input: input.new_empty(input.shape),
    results=("dinput",),
    refused={"weight": "cross_entropy"},
)
_forward, _forward_check, _backward = _loss.forward.op, _loss.forward.check, _loss.backward.op
_backward_inplace = Raw("loss_backward_inplace", lambda: None).op


class _InplaceLoss(_loss.function):
    @staticmethod
    def backward(ctx, dloss, *others):
        if is_differentiated_again():  # create_graph=True
            refuse_second_derivative("cross_entropy", "inplace_backward")
        if dloss is None or is_mapped(dloss):  # batched gradients are several
            return _loss.function.backward(ctx, dloss, *others)
        input, target, weight, *of_rows = ctx.saved_tensors
        _, *options = ctx.kept
        _backward_inplace(input, target, weight, *options, dloss, *of_rows)
        # Autograd then refuses saved views of the logits, this call's too.
        torch.autograd.graph.increment_version(input)
        return input.detach(), None, None, None


_apply_inplace = applied(_InplaceLoss)
