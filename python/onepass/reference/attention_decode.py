"""Attention against a KV cache, sequence by sequence; `key` and `value` are appended in place."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.attention import attention


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of query (batch, heads, seq_q, head_dim), its last row at the last key.

    Args:
        k_cache, v_cache: (caches, kv_heads, max_seq, dim), or (pages, page_size, kv_heads, dim)
            with `block_table`; written if `key` is given.
        key, value: (batch, kv_heads, new_rows, dim), for the rows from `cache_seqlens` on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2).
        k_scale, v_scale: of caches that hold codes of 8 bits; their shapes without the last
            dimension.
        options: those of the scores, as of attention.
    """
    batch, heads, seq_q, _ = query.shape
    if block_table is None:
        max_seq = k_cache.shape[2]
    else:
        max_seq = block_table.shape[1] * k_cache.shape[1]
    lengths = [max_seq] * batch if cache_seqlens is None else cache_seqlens.tolist()
    if rotary_cos is not None and batch:
        by_row = window_left >= 0 or window_right >= 0  # else each row of the query at the first
        query, key = (
            rotate_at(x, lengths, rotary_cos, rotary_sin, rotary_interleaved, own)
            for x, own in ((query, by_row), (key, True))
        )
    new_rows = 0 if key is None else key.shape[2]
    for b, length in enumerate(lengths if new_rows else ()):
        where = rows(k_cache, b, length, length + new_rows, block_table, cache_batch_idx)
        for cache, scale, new in ((k_cache, k_scale, key[b]), (v_cache, v_scale, value[b])):
            new = new if block_table is None else new.transpose(0, 1)
            if scale is not None:
                new, scale[where] = quantize_rows(new)
            cache[where] = new

    output = query.new_empty(batch, heads, seq_q, v_cache.shape[-1])
    lse = query.new_empty(batch, heads, seq_q)
    for b, length in enumerate(lengths):
        total = length + new_rows
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        where = rows(k_cache, b, first, total, block_table, cache_batch_idx)
        k, v = k_cache[where], v_cache[where]
        if k_scale is not None:
            k, v = (c.to(query.dtype) * s[where].to(query.dtype)[..., None]
                    for c, s in ((k, k_scale), (v, v_scale)))  # fmt: skip
        if block_table is not None:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        output[b : b + 1], lse[b : b + 1] = attention(
            query[b : b + 1], k[None], v[None], window_left=window_left, window_right=window_right,
            bottom_right=True, sequence=b, **options,
        )  # fmt: skip
    return output, lse


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits of rows (..., dim) and their scales (...), so that x is about scale * codes.

    A row with NaN or Inf has codes 0 and the scale NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127
    scale = torch.where(x.isfinite().all(-1), scale, torch.nan)
    codes = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    return codes.round().clamp(-127, 127).to(torch.int8), scale


def rows(
    cache: Tensor,
    sequence: int,
    first: int,
    last: int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
) -> tuple:
    """The index of rows [first, last): (kv_heads, rows, dim), or of pages (rows, kv_heads, dim)."""
    if block_table is None:
        where = sequence if cache_batch_idx is None else int(cache_batch_idx[sequence])
        return where, slice(None), slice(first, last)
    numbers, page_size = torch.arange(first, last, device=cache.device), cache.shape[1]
    return block_table[sequence, numbers // page_size].long(), numbers % page_size


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """(x1 cos - x2 sin, x1 sin + x2 cos) of pairs of x's first dimensions; the others stay.

    Args:
        x: (..., rows, head_dim), computed in float32 at least.
        cos, sin: (rows, rotary_dim / 2).
        interleaved: pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
    """
    pairs = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned, cos, sin = (t.to(wide) for t in (x[..., : 2 * pairs], cos, sin))
    if interleaved:
        x1, x2 = turned[..., ::2], turned[..., 1::2]
    else:
        x1, x2 = turned[..., :pairs], turned[..., pairs:]
    turned = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], -1)


def rotate_at(
    x: Tensor, first: list[int], cos: Tensor, sin: Tensor, interleaved: bool, by_row: bool
) -> Tensor:
    """Rows i of (batch, heads, rows, head_dim) at positions first[b] + i, or all at first[b]."""
    offsets = torch.arange(x.shape[2], device=x.device) * by_row
    return torch.stack(
        [rotate(x[b], cos[n + offsets], sin[n + offsets], interleaved) for b, n in enumerate(first)]
    )
