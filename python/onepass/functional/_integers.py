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
    """The same in int32. One beyond it becomes the last one, to be refused, not another number."""
    if whole_numbers(op, name, tensor).dtype in (torch.int64, torch.uint32, torch.uint64):
        bounds = torch.iinfo(torch.int32)
        tensor = tensor.to(torch.int64).clamp(bounds.min, bounds.max)
    return tensor.to(torch.int32)
