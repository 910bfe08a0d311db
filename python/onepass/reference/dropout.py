"""Dropout's definition: Philox4x32-10 on the element index, in int64 arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    key: tuple[int | Tensor, int | Tensor], counter: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Four random 32-bit words, as int64 tensors, from a key and a counter of four such words.

    Philox4x32-10: Salmon, Moraes, Dror, Shaw, SC 2011.
    """
    low, high = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # A product of two 32-bit words overflows int64 in its sign only; its bits are right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32) & _WORD ^ c1 ^ low,
            product1 & _WORD,
            (product0 >> 32) & _WORD ^ c3 ^ high,
            product0 & _WORD,
        )
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def keep_scale(
    seed: Tensor,
    numel: int,
    p: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """(numel,) the factor of each element: 0 if dropped, else the inverse keep probability.

    Element i takes 16 bits of block i // 8, low halves of the four words first; it is dropped if
    they are below round(65536 p), halves rounded up.

    Args:
        seed: int64[2]: seed, offset.
    """
    drawn = random_halves(seed, numel, device)
    threshold = math.floor(65536 * p + 0.5)  # halves go up
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return (drawn >= threshold).to(dtype) * scale


def random_halves(
    seed: Tensor, numel: int, device: torch.device | str | None = None, stream: int = 0
) -> Tensor:
    """(numel,) numbers of 16 bits, in int64, of one of a seed's streams."""
    first, second = seed.to(device)
    block = torch.arange((numel + 7) // 8, device=device)
    zero = torch.zeros_like(block)
    words = philox4x32(
        (first & _WORD, (first >> 32) & _WORD),
        (block & _WORD, block >> 32, zero + stream, zero + (second & _WORD)),
    )
    halves = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(halves, dim=1).flatten()[:numel]


def dropout(input: Tensor, p: float, seed: Tensor) -> Tensor:
    """input * keep_scale: dropped elements are input * 0, so NaN and infinity show as in torch."""
    factor = keep_scale(seed, input.numel(), p, input.dtype, input.device)
    return input * factor.reshape(input.shape)


def add_dropout(
    input: Tensor, residual: Tensor, p: float, seed: Tensor, *, column_scale=None, row_scale=None
) -> Tensor:
    """residual + row_scale * column_scale * dropout(input), in residual's dtype."""
    branch = input if seed is None else dropout(input, p, seed)
    return (residual + scaled(branch, column_scale, row_scale)).to(residual.dtype)


def dropped(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """dropout(x), or x without a seed."""
    return x if seed is None else dropout(x, p, seed)


def scaled(branch: Tensor, column_scale=None, row_scale=None) -> Tensor:
    """row_scale * column_scale * branch: LayerScale and DropPath.

    column_scale has the shape of the last dimensions, row_scale a factor for each index of the
    first one. Elements with factor 0 are 0, whatever the branch holds.
    """
    if column_scale is not None:
        branch = branch * column_scale
    if row_scale is None:
        return branch
    factor = row_scale.reshape(-1, *(1 for _ in branch.shape[1:])).to(branch.dtype)
    return torch.where(factor == 0, torch.zeros_like(branch), branch * factor)
