"""Tensors of whole numbers among arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_numbers(op: str, name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it holds integers.

    Raises:
        RuntimeError: it does not; the message names the argument.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        raise RuntimeError(f"{op}: {name} must hold integers, got {tensor.dtype}")
    return tensor


def as_int32(op: str, name: str, tensor: Tensor) -> Tensor:
    """The same in int32. A larger number becomes the largest, to be refused, not another one."""
    if whole_numbers(op, name, tensor).dtype is torch.int64:
        tensor = tensor.clamp(max=torch.iinfo(torch.int32).max)
    return tensor.to(torch.int32)
