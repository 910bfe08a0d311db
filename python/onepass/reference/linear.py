"""The linear layer in plain PyTorch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class _Rounded(torch.autograd.Function):
    """x rounded to bfloat16, in its own dtype; its derivative is taken to be 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        pass

    @staticmethod
    def backward(ctx, dx):
        return dx

    @staticmethod
    def jvp(ctx, dx):
        return dx.clone()


def factors(round_factors: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The factors of products: with round_factors those in float32 or float64 are rounded to
    bfloat16."""
    if not round_factors:
        return tensors
    wide = (torch.float32, torch.float64)
    return tuple(_Rounded.apply(x) if x is not None and x.dtype in wide else x for x in tensors)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, round_factors: bool = False
) -> Tensor:
    """``input weight^T + bias``: (..., in_features) to (..., out_features)."""
    input, weight = factors(round_factors, input, weight)
    output = input @ weight.t()
    return output if bias is None else output + bias


def linear_backward(
    doutput: Tensor, input: Tensor | None, weight: Tensor | None, *, round_factors: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(dinput, dweight, dbias); dinput takes the weight, and dweight the input. dbias is a sum of
    doutput as it is."""
    rows = doutput.flatten(0, -2) if doutput.dim() > 1 else doutput[None]
    factor, input, weight = factors(round_factors, doutput, input, weight)
    dinput = None if weight is None else factor @ weight
    dweight = None
    if input is not None:
        dweight = factor.reshape(rows.shape).t() @ input.reshape(rows.shape[0], -1)
    return dinput, dweight, rows.sum(0)
