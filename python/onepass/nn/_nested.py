"""Nested tensors of strided layout, in which `torch.nn.TransformerEncoder` passes its batches
on."""

from __future__ import annotations

import torch
from torch import Tensor


def is_packed(x: Tensor) -> bool:
    """Whether x is a nested tensor with contiguous rows."""
    return x.is_nested and x.layout == torch.strided and x.is_contiguous()


def rows_of(x: Tensor) -> Tensor:
    """The rows (total, features) of a packed nested tensor, as a view."""
    return x.values().view(-1, x.size(-1))


def like_packed(x: Tensor, rows: Tensor) -> Tensor:
    """A nested tensor of x's shape as a view of these rows."""
    return torch._nested_view_from_buffer(
        rows.reshape(-1),
        x._nested_tensor_size(),
        x._nested_tensor_strides(),
        x._nested_tensor_storage_offsets(),
    )
