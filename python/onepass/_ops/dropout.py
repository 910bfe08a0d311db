"""The dropout family's ops: fakes, autograd, seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient
from onepass._mapping import run_each
from onepass._memory_order import like
from onepass._ops import derivatives, fake_checks, tracing
from onepass._ops.decomposition import FORMULAS, decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated, is_differentiated_again
from onepass._ops.dispatch_log import logged
from onepass._ops.placement import placed
from onepass._ops.random import draw_seed, puts_back
from onepass.reference import dropout as reference

_forward = torch.ops.onepass.dropout_forward.default
_forward_check = torch.ops.onepass.dropout_forward_check.default

_branch_forward = torch.ops.onepass.branch_forward.default
_branch_forward_check = torch.ops.onepass.branch_forward_check.default
_branch_backward = torch.ops.onepass.branch_backward.default
_branch_backward_check = torch.ops.onepass.branch_backward_check.default

for _check in (_forward_check, _branch_forward_check, _branch_backward_check):
    run_each(_check)

# Bits of branch_backward's grad_mask.
_INPUT, _COLUMN_SCALE = 1, 2


@logged
@placed
@puts_back
def dropout(input: Tensor, p: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """dropout(input), p > 0, in out_dtype or input's."""
    seed = draw_seed(input.device)
    return like(_run(input, None, seed, p, out_dtype), input)


@logged
@placed
@puts_back
def add_dropout(input: Tensor, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(input); p = 0 draws nothing."""
    seed = draw_seed(input.device) if p > 0.0 else None
    return like(_run(input, residual, seed, p), residual, input)


def _run(
    input: Tensor,
    residual: Tensor | None,
    seed: Tensor | None,
    p: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if tracing.records():
        return _traced(input, residual, seed, p, out_dtype)
    return _compute(input, residual, seed, p, out_dtype)


def _compute(input, residual, seed, p, out_dtype):
    compute = differentiable_dropout if is_differentiated(input, residual) else _forward
    return compute(input, residual, seed, p, out_dtype)


class _Dropout(torch.autograd.Function):
    """Dropout is linear in its input: every derivative is dropout with the same seed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, residual, seed, p, out_dtype):
        return _forward(input, residual, seed, p, out_dtype)

    @staticmethod
    def formula(input, residual, seed, p, out_dtype):
        return FORMULAS[_forward](input, residual, seed, p, out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, _, seed, ctx.p, _ = inputs
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
            again = is_differentiated_again()  # create_graph=True
            compute = differentiable_dropout if again else _forward
            dinput = like(compute(doutput, None, seed, ctx.p, ctx.input_dtype), doutput)
        return dinput, doutput if ctx.needs_input_grad[1] else None, None, None, None


differentiable_dropout = applied(_Dropout)


_traced = tracing.operator("dropout", _forward, _compute)


@torch.library.register_fake("onepass::dropout_forward")
def _(input, residual, seed, p, out_dtype):
    offer(_forward)
    fake_checks.check(_forward_check, input, residual, seed, p, out_dtype)
    stream = input if residual is None else residual
    return input.new_empty(input.shape, dtype=out_dtype or stream.dtype)


@decomposes(_forward, unless=("seed",))
def _(input, residual, seed, p, out_dtype):
    stream = input if residual is None else residual
    branch = input
    if seed is not None:
        branch = reference.dropout(*wide(input), p, seed)
    return (branch if residual is None else residual + branch).to(out_dtype or stream.dtype)


# ---- scaled branches -----------------------------------------------------------------------------


@logged
@placed
@puts_back
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
    arguments = (input, residual, column_scale, row_scale, seed, p, out_dtype)
    output = (_traced_branch if tracing.records() else _compute_branch)(*arguments)
    return like(output, input) if residual is None else like(output, residual, input)


def row_scale(samples: int, p: float, dtype: torch.dtype, device, scale_by_keep: bool) -> Tensor:
    """(samples,) 0 with probability p, else 1; divided by 1's probability if `scale_by_keep`."""
    drawn = dropout(torch.ones(samples, dtype=dtype, device=device), p)
    return drawn if scale_by_keep else (drawn != 0).to(dtype)


def _compute_branch(input, residual, column_scale, *rest):
    is_wanted = is_differentiated(input, residual, column_scale)
    compute = _apply_branch if is_wanted else _branch_forward
    return compute(input, residual, column_scale, *rest)


class _Branch(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, residual, column_scale, row_scale, seed, p, out_dtype):
        return _branch_forward(input, residual, column_scale, row_scale, seed, p, out_dtype)

    @staticmethod
    def formula(*arguments):
        return FORMULAS[_branch_forward](*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, _, column_scale, row_scale, seed, ctx.p, _ = inputs
        branch = input if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(branch, column_scale, row_scale, seed)
        ctx.input_dtype = input.dtype

    @staticmethod
    def backward(ctx, doutput):
        needs_input, needs_residual, needs_scale, *_ = ctx.needs_input_grad
        dinput = dcolumn_scale = None
        if needs_input or needs_scale:
            mask = (_INPUT if needs_input else 0) | (_COLUMN_SCALE if needs_scale else 0)
            arguments = (doutput, *ctx.saved_tensors, ctx.p, ctx.input_dtype, mask)
            compute = _apply_branch_backward if is_differentiated_again() else _branch_backward
            dinput, dcolumn_scale = compute(*arguments)
            dinput = like(dinput, doutput) if needs_input else None
        return (
            dinput,
            doutput if needs_residual else None,
            dcolumn_scale if needs_scale else None,
            *(None,) * 4,
        )


class _BranchBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(doutput, branch, column_scale, row_scale, seed, p, input_dtype, mask):
        return _branch_backward(
            doutput, branch, column_scale, row_scale, seed, p, input_dtype, mask
        )

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5])
        ctx.p, _, ctx.mask = inputs[5:]

    @staticmethod
    def backward(ctx, *second):
        *inputs, row_scale, seed = ctx.saved_tensors

        def formula(doutput, branch, column_scale):
            d = doutput if seed is None else reference.dropout(doutput, ctx.p, seed)
            d = reference.scaled(d, row_scale=row_scale)
            if not ctx.mask & _COLUMN_SCALE:
                return d if column_scale is None else d * column_scale, None
            return d * column_scale, (d * branch).sum_to_size(column_scale.shape)

        wanted = [
            gradient if ctx.mask & bit else None
            for gradient, bit in zip(second, (_INPUT, _COLUMN_SCALE), strict=True)
        ]
        return (*derivatives.vjp(formula, inputs, wanted), *(None,) * 5)


_apply_branch = applied(_Branch)
_apply_branch_backward = applied(_BranchBackward)

_traced_branch = tracing.operator("branch", _branch_forward, _compute_branch)


@torch.library.register_fake("onepass::branch_forward")
def _(input, residual, column_scale, row_scale, seed, p, out_dtype):
    offer(_branch_forward)
    fake_checks.check(_branch_forward_check, **locals())  # the same arguments by the same names
    stream = input if residual is None else residual
    return input.new_empty(input.shape, dtype=out_dtype or stream.dtype)


@torch.library.register_fake("onepass::branch_backward")
def _(doutput, branch, column_scale, row_scale, seed, p, input_dtype, grad_mask):
    fake_checks.check(_branch_backward_check, **locals())
    dtype = branch.dtype if branch is not None else input_dtype or doutput.dtype
    dinput = doutput.new_empty(doutput.shape if grad_mask & _INPUT else (0,), dtype=dtype)
    if column_scale is None:
        return dinput, doutput.new_empty(0)
    shape = column_scale.shape if grad_mask & _COLUMN_SCALE else (0,)
    return dinput, column_scale.new_empty(shape)


@decomposes(_branch_forward, unless=("seed",))
def _(input, residual, column_scale, row_scale, seed, p, out_dtype):
    stream = input if residual is None else residual
    branch, above, column_scale = wide(input, residual, column_scale)
    if seed is not None:
        branch = reference.dropout(branch, p, seed)
    branch = reference.scaled(branch, column_scale, row_scale)
    return (branch if above is None else above + branch).to(out_dtype or stream.dtype)
