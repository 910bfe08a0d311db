"""The dropout family's ops: fakes, autograd, seeds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass._ops.random import draw_seed

_forward = torch.ops.onepass.dropout_forward.default
_forward_check = torch.ops.onepass.dropout_forward_check.default


@logged
def dropout(input: Tensor, p: float) -> Tensor:
    """dropout(input), p > 0."""
    seed = draw_seed(input.device)
    if is_differentiated(input):
        return _apply_dropout(input, None, seed, p, None)
    return _forward(input, None, seed, p, None)


@logged
def add_dropout(input: Tensor, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(input); p = 0 draws nothing."""
    seed = draw_seed(input.device) if p > 0.0 else None
    if is_differentiated(input, residual):
        return _apply_dropout(input, residual, seed, p, None)
    return _forward(input, residual, seed, p, None)


class _Dropout(torch.autograd.Function):
    """Dropout is linear in its input: its backward is dropout with the same seed, and so on."""

    @staticmethod
    def forward(input, residual, seed, p, out_dtype):
        return _forward(input, residual, seed, p, out_dtype)

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
        elif torch.is_grad_enabled():  # create_graph=True
            dinput = _apply_dropout(doutput, None, seed, ctx.p, ctx.input_dtype)
        else:
            dinput = _forward(doutput, None, seed, ctx.p, ctx.input_dtype)
        return dinput, doutput if ctx.needs_input_grad[1] else None, None, None, None


_apply_dropout = applied(_Dropout)


@torch.library.register_fake("onepass::dropout_forward")
def _(input, residual, seed, p, out_dtype):
    if type(input) in (Tensor, Parameter):  # a meta tensor, whose sizes are numbers
        _forward_check(input, residual, seed, p, out_dtype)
    stream = input if residual is None else residual
    return input.new_empty(input.shape, dtype=out_dtype or stream.dtype)
