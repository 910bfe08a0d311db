"""The linear family's ops on the CPU: fakes, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._ops import double_backward, fake_checks, tracing
from onepass._ops.decomposition import decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass.reference import linear as reference

_forward = torch.ops.onepass.linear_forward.default
_forward_check = torch.ops.onepass.linear_forward_check.default
_backward = torch.ops.onepass.linear_backward.default
_backward_check = torch.ops.onepass.linear_backward_check.default

run_each(_forward_check)
run_each(_backward_check)


@logged
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """input weight^T + bias in input's dtype."""
    if not torch.compiler.is_compiling() and tracing.is_tracing():
        return _traced(input, weight, bias, None)
    return _compute(input, weight, bias, None)


def _compute(input, weight, bias, out_dtype):
    compute = _apply_linear if is_differentiated(input, weight, bias) else _forward
    return compute(input, weight, bias, out_dtype)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, bias, out_dtype):
        return _forward(input, weight, bias, out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, bias, _ = inputs
        needs = ctx.needs_input_grad
        # What a frozen layer does not need is not kept.
        ctx.save_for_backward(input if needs[1] else None, weight if needs[0] else None)
        given = (input, weight, bias)
        ctx.dtypes = [t.dtype if need else None for t, need in zip(given, needs, strict=False)]

    @staticmethod
    def backward(ctx, doutput):
        input, weight = ctx.saved_tensors
        # create_graph=True goes the second way.
        compute = _apply_backward if torch.is_grad_enabled() else _backward
        gradients = compute(doutput, input, weight, *ctx.dtypes)
        wanted = zip(gradients, ctx.dtypes, strict=True)
        return *(None if dtype is None else gradient for gradient, dtype in wanted), None


class _LinearBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(doutput, input, weight, *dtypes):
        return _backward(doutput, input, weight, *dtypes)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        doutput, input, weight, *ctx.dtypes = inputs
        ctx.save_for_backward(doutput, input, weight)

    @staticmethod
    def backward(ctx, *second):
        wanted = zip(second, ctx.dtypes, strict=True)
        gradients = double_backward.vjp(
            reference.linear_backward,
            ctx.saved_tensors,
            [None if dtype is None else gradient for gradient, dtype in wanted],
        )
        return *gradients, None, None, None


_apply_linear = applied(_Linear)
_apply_backward = applied(_LinearBackward)
_traced = tracing.operator("linear", _forward, _compute)


@torch.library.register_fake("onepass::linear_forward")
def _(input, weight, bias, out_dtype):
    offer(_forward)
    fake_checks.check(_forward_check, input, weight, bias, out_dtype)
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype or input.dtype)


@torch.library.register_fake("onepass::linear_backward")
def _(doutput, input, weight, input_dtype, weight_dtype, bias_dtype):
    fake_checks.check(
        _backward_check, doutput, input, weight, input_dtype, weight_dtype, bias_dtype
    )

    def gradient(dtype, shape):
        return doutput.new_empty((0,) if dtype is None else shape(), dtype=dtype)

    return (
        gradient(input_dtype, lambda: (*doutput.shape[:-1], weight.shape[1])),
        gradient(weight_dtype, lambda: (doutput.shape[-1], input.shape[-1])),
        gradient(bias_dtype, lambda: (doutput.shape[-1],)),
    )


@decomposes(_forward)
def _(input, weight, bias, out_dtype):
    return reference.linear(*wide(input, weight, bias)).to(out_dtype or input.dtype)
