"""The dropout family's operators: dropout, and the scaled branch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient
from onepass._memory_order import like
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.differentiation import is_differentiated_again
from onepass._ops.entry import drawing_entry
from onepass._ops.operator import Operator, Raw
from onepass._random import draw_seed
from onepass.reference import dropout as reference


@drawing_entry
def dropout(input: Tensor, p: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """dropout(input), p > 0, in out_dtype or input's."""
    seed = draw_seed(input.device)
    return like(_dropout.run(input, None, seed, p, out_dtype), input)


@drawing_entry
def add_dropout(input: Tensor, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(input); p = 0 draws nothing."""
    seed = draw_seed(input.device) if p > 0.0 else None
    return like(_dropout.run(input, residual, seed, p, None), residual, input)


def _outputs(input, residual, out_dtype):
    stream = input if residual is None else residual
    return input.new_empty(input.shape, dtype=out_dtype or stream.dtype)


class _Dropout(torch.autograd.Function):
    """Dropout is linear in its input: every derivative is dropout with the same seed."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, _, seed, (ctx.p, _) = inputs
        ctx.input_dtype = input.dtype
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx, doutput):
        (seed,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            dinput = None
        elif seed is None:  # p = 0
            dinput = doutput.to(ctx.input_dtype)
        else:
            constants = (ctx.p, ctx.input_dtype)
            if is_differentiated_again():  # create_graph=True
                dinput = _dropout.apply(doutput, None, seed, constants)
            else:
                dinput = _dropout.forward.op(doutput, None, seed, *constants)
            dinput = like(dinput, doutput)
        return dinput, doutput if ctx.needs_input_grad[1] else None, None, None


def _definition(input, residual, seed, p, out_dtype):
    return _branch_definition(input, residual, None, None, seed, p, out_dtype)


_dropout = Operator(
    "dropout",
    Raw("dropout_forward", _outputs, _definition, unless=("seed",)),
    _Dropout,
    ("input", "residual"),
)


# ---- scaled branches -----------------------------------------------------------------------------


@drawing_entry
def add_scaled(
    input: Tensor,
    residual: Tensor | None,
    p: float,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + row_scale * column_scale * dropout(input); p = 0 draws nothing.

    `out_dtype` is the result's dtype, by default residual's, or input's without a residual.
    """
    if row_scale is not None and row_scale.requires_grad:
        refuse_gradient("add_dropout", "row_scale")
    seed = draw_seed(input.device) if p > 0.0 else None
    output = _branch.run(input, residual, column_scale, row_scale, seed, p, out_dtype)
    return like(output, input) if residual is None else like(output, residual, input)


def row_scale(samples: int, p: float, dtype: torch.dtype, device, scale_by_keep: bool) -> Tensor:
    """(samples,) 0 with probability p, else 1; divided by 1's probability if `scale_by_keep`."""
    drawn = dropout(torch.ones(samples, dtype=dtype, device=device), p)
    return drawn if scale_by_keep else (drawn != 0).to(dtype)


def _branch_definition(input, residual, column_scale, row_scale, seed, p, out_dtype):
    stream = input if residual is None else residual
    branch, above, column_scale = wide(input, residual, column_scale)
    branch = reference.scaled(reference.dropped(branch, p, seed), column_scale, row_scale)
    return (branch if above is None else above + branch).to(out_dtype or stream.dtype)


def _branch_gradients(doutput, branch, column_scale, input_dtype, grad_mask):
    dtype = branch.dtype if branch is not None else input_dtype or doutput.dtype
    dinput = doutput.new_empty(doutput.shape if grad_mask & 1 else (0,), dtype=dtype)
    if column_scale is None:
        return dinput, doutput.new_empty(0)
    return dinput, column_scale.new_empty(column_scale.shape if grad_mask & 2 else (0,))


def _branch_derivative(doutput, branch, column_scale, *, row_scale, seed, p):
    d = reference.scaled(reference.dropped(doutput, p, seed), row_scale=row_scale)
    if column_scale is None:
        return d, None
    dcolumn_scale = None if branch is None else (d * branch).sum_to_size(column_scale.shape)
    return d * column_scale, dcolumn_scale


_branch = differentiable(
    "branch",
    _outputs,
    _branch_definition,
    _branch_gradients,
    unless=("seed",),
    derivative=_branch_derivative,
    passed="residual",
    derived={"branch": lambda input, needs_column_scale: input if needs_column_scale else None},
    finished={"input": lambda dinput, doutput: like(dinput, doutput)},
)
