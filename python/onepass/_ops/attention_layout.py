"""The memory order of an attention's output: decided here once, so that fakes and kernels agree."""

from __future__ import annotations

import torch
from torch import Tensor


def is_bshd(query: Tensor) -> bool:
    """Whether query is a transposed (batch, seq, heads, head_dim): then the output is one too."""
    if query.dim() != 4 or query.shape[1] == 1 or query.shape[2] == 1:
        return False
    _, head, row, _ = query.stride()
    return row > head > 0


def empty_rows(like: Tensor, shape, dtype: torch.dtype, bshd: bool | None) -> Tensor:
    """The output of an op for `shape`; with bshd the memory of (batch, rows, heads, dim)."""
    if not bshd or len(shape) != 4:
        return like.new_empty(shape, dtype=dtype)
    batch, heads, rows, dim = shape
    return like.new_empty((batch, rows, heads, dim), dtype=dtype).transpose(1, 2)
