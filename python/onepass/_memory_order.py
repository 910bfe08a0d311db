"""The memory order of results: of an elementwise function torch's, that of its inputs; of attention
and rotary embedding query's order of heads and rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_memory_order(run: Callable, first: Tensor, *others: Tensor) -> Tensor:
    """run(first, *others) of the same tensors with their dimensions from the slowest in memory to
    the fastest, moved back in the result.

    The operators read any strides and write rows one after the other.
    """
    tensors = (first, *others)
    for x in tensors:
        if not x.is_contiguous():
            break
    else:
        return run(*tensors)
    order = _order(tensors)
    if order is None:
        return run(*tensors)
    back = sorted(range(len(order)), key=order.__getitem__)
    return run(*(x.permute(order) for x in tensors)).permute(back)


def rows_in_memory_order(run: Callable, input: Tensor, dims: int) -> Tensor:
    """run(input), of the same shape, in input's memory order; its rows are the last `dims`
    dimensions. A copy is made only where input's rows are not dense."""
    if input.is_contiguous():
        return run(input)
    order = _order((input,))
    if order is None:
        return run(input)
    rows = input.dim() - dims
    kept = [d for d in order if d < rows] + list(range(rows, input.dim()))
    back = sorted(range(len(kept)), key=kept.__getitem__)
    return like(run(input.permute(kept)).permute(back), input)


def like(output: Tensor, *inputs: Tensor) -> Tensor:
    """A result in the memory order of its inputs; a copy, unless it has that order."""
    for x in inputs:
        if not x.is_contiguous():
            break
    else:
        return output
    return in_memory_order(lambda *tensors: tensors[-1].contiguous(), *inputs, output)


def has_channels_last(input: Tensor) -> bool:
    """Whether torch counts input's memory order as channels last; the output then has it too."""
    if input.dim() not in (4, 5) or input.is_contiguous():
        return False
    sizes, strides = input.shape, input.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(input.dim() - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * (sizes[d] if sizes[d] > 1 else 1)
    return True


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


def _order(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Dimensions from slowest to fastest, as torch's TensorIterator sorts them; None if that is
    their own order."""
    first = tensors[0]
    dims = first.dim()
    if dims < 2 or any(x.is_nested or x.dim() != dims for x in tensors):
        return None
    strides = [x.stride() for x in tensors]

    def slower(a: int, b: int) -> bool:
        """Whether dimension a is slower than b, by the first tensor that tells."""
        for of in strides:
            if of[a] != of[b] and of[a] != 0 and of[b] != 0:
                return of[a] > of[b]
        return False

    order = list(range(dims))
    for i in range(1, dims):
        for j in range(i, 0, -1):
            if not slower(order[j], order[j - 1]):
                break
            order[j - 1], order[j] = order[j], order[j - 1]
    return None if order == list(range(dims)) else order
