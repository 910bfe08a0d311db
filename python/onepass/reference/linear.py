"""The linear layer in plain PyTorch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.reference.products import (
    INT8_FORWARD,
    INT8_INPUT,
    INT8_WEIGHT,
    ROUNDED,
    multiply,
    product,
)

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class _Product(torch.autograd.Function):
    """input weight^T, with the gradients of `linear_backward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight, factor_mask, seed):
        return multiply(input, weight.t(), factor_mask, INT8_FORWARD)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        input, weight, ctx.factor_mask, seed = inputs
        ctx.save_for_backward(input, weight, seed)
        ctx.save_for_forward(input, weight)

    @staticmethod
    def backward(ctx, doutput):
        input, weight, seed = ctx.saved_tensors
        dinput, dweight, _ = linear_backward(
            doutput, input, weight, factor_mask=ctx.factor_mask, rounding_seed=seed
        )
        return dinput, dweight, None, None

    @staticmethod
    def jvp(ctx, dinput, dweight, *_):
        input, weight = ctx.saved_tensors
        return dinput @ weight.t() + input @ dweight.t()


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    factor_mask: int = 0,
    rounding_seed: Tensor | None = None,
) -> Tensor:
    """``input weight^T + bias``: (..., in_features) to (..., out_features). factor_mask: how
    factors of the product and of its gradients' are taken, by the bits of products.py."""
    if factor_mask & ~ROUNDED:
        output = _Product.apply(input, weight, factor_mask, rounding_seed)
    else:
        output = product(input, weight.t(), bool(factor_mask))
    return output if bias is None else output + bias


def linear_backward(
    doutput: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    *,
    factor_mask: int = 0,
    rounding_seed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(dinput, dweight, dbias); dinput takes the weight, and dweight the input. dbias is a sum of
    doutput as it is. rounding_seed: int64[2]; doutput is rounded to codes stochastically for
    dinput."""
    rows = doutput.flatten(0, -2) if doutput.dim() > 1 else doutput[None]
    dinput = dweight = None
    if weight is not None:
        dinput = multiply(doutput, weight, factor_mask, INT8_INPUT, rounding_seed)
    if input is not None:
        dweight = multiply(rows.t(), input.reshape(rows.shape[0], -1), factor_mask, INT8_WEIGHT)
    return dinput, dweight, rows.sum(0)
