"""The linear layer in plain PyTorch."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

from onepass.reference.products import factors, product

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, round_factors: bool = False
) -> Tensor:
    """``input weight^T + bias``: (..., in_features) to (..., out_features)."""
    output = product(input, weight.t(), round_factors)
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
