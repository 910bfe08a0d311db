"""The dropout family's ops: fakes, autograd, seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._ops import fake_checks, tracing
from onepass._ops.decomposition import decomposes, offer
from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass._ops.random import draw_seed

_forward = torch.ops.onepass.dropout_forward.default
_forward_check = torch.ops.onepass.dropout_forward_check.default

run_each(_forward_check)


@logged
def dropout(input: Tensor, p: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """dropout(input), p > 0, in out_dtype or input's."""
    seed = draw_seed(input.device)
    return _run(input, None, seed, p, out_dtype)


@logged
def add_dropout(input: Tensor, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(input); p = 0 draws nothing."""
    seed = draw_seed(input.device) if p > 0.0 else None
    return _run(input, residual, seed, p)


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
    """Dropout is linear in its input: its backward is dropout with the same seed, and so on."""

    generate_vmap_rule = True

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
            dinput = differentiable_dropout(doutput, None, seed, ctx.p, ctx.input_dtype)
        else:
            dinput = _forward(doutput, None, seed, ctx.p, ctx.input_dtype)
        return dinput, doutput if ctx.needs_input_grad[1] else None, None, None, None


differentiable_dropout = applied(_Dropout)


_traced = tracing.operator("dropout", _forward, _compute)


@torch.library.register_fake("onepass::dropout_forward")
def _(input, residual, seed, p, out_dtype):
    offer(_forward)
    fake_checks.check(_forward_check, input, residual, seed, p, out_dtype)
    stream = input if residual is None else residual
    return input.new_empty(input.shape, dtype=out_dtype or stream.dtype)


@decomposes(_forward)
def _(input, residual, seed, p, out_dtype):
    if seed is not None:
        return NotImplemented
    return (residual + input).to(out_dtype or residual.dtype)
