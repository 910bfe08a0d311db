"""The linear layer in plain PyTorch."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input weight^T + bias``: (..., in_features) to (..., out_features)."""
    output = input @ weight.t()
    return output if bias is None else output + bias


def linear_backward(
    doutput: Tensor, input: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(dinput, dweight, dbias); dinput takes the weight, and dweight the input."""
    rows = doutput.flatten(0, -2) if doutput.dim() > 1 else doutput[None]
    dinput = None if weight is None else doutput @ weight
    dweight = None if input is None else rows.t() @ input.reshape(rows.shape[0], -1)
    return dinput, dweight, rows.sum(0)
