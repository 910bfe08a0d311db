"""Attention against a KV cache, sequence by sequence; `key` and `value` are appended in place."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.attention import _attention


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
    **options,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of query (batch, heads, seq_q, head_dim), its last row at the last key.

    Args:
        k_cache, v_cache: (caches, kv_heads, max_seq, dim), or (pages, page_size, kv_heads, dim)
            with `block_table`; written if `key` is given.
        key, value: (batch, kv_heads, new_rows, dim), rows from `cache_seqlens` on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2).
        options: scale, softcap, alibi_slopes and sinks, as of attention.
    """
    batch, heads, seq_q, _ = query.shape
    lengths = [_max_rows(k_cache, block_table)] * batch
    if cache_seqlens is not None:
        lengths = cache_seqlens.tolist()
    if rotary_cos is not None and batch:
        by_row = window_left >= 0 or window_right >= 0  # else every query row is at the first
        query = torch.stack(
            [
                rotate(q, *_at(n, seq_q, rotary_cos, rotary_sin, by_row), rotary_interleaved)
                for q, n in zip(query, lengths, strict=True)
            ]
        )
        key = torch.stack(
            [
                rotate(k, *_at(n, k.shape[1], rotary_cos, rotary_sin), rotary_interleaved)
                for k, n in zip(key, lengths, strict=True)
            ]
        )

    def rows(b: int, first: int, last: int) -> tuple:
        """Indexes those of sequence b: (kv_heads, rows, dim), paged (rows, kv_heads, dim)."""
        if block_table is None:
            cache = b if cache_batch_idx is None else int(cache_batch_idx[b])
            return cache, slice(None), slice(first, last)
        numbers, page_size = torch.arange(first, last, device=query.device), k_cache.shape[1]
        return block_table[b, numbers // page_size].long(), numbers % page_size

    new_rows = 0 if key is None else key.shape[2]
    for b in range(batch if new_rows else 0):
        where = rows(b, lengths[b], lengths[b] + new_rows)
        for cache, new in ((k_cache, key[b]), (v_cache, value[b])):
            cache[where] = new if block_table is None else new.transpose(0, 1)

    outputs = query.new_empty(batch, heads, seq_q, v_cache.shape[-1])
    lses = query.new_empty(batch, heads, seq_q)
    for b in range(batch):
        total = lengths[b] + new_rows
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        where = rows(b, first, total)
        k, v = (
            cache[where] if block_table is None else cache[where].transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        output, lse = _attention(
            query[b : b + 1], k[None], v[None], None, None, total - first - seq_q,
            window_left=window_left, window_right=window_right, bottom_right=True, sequence=b,
            **options,
        )  # fmt: skip
        outputs[b], lses[b] = output[0], lse[0]
    return outputs, lses


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


def _at(
    first: int, rows: int, cos: Tensor, sin: Tensor, by_row: bool = True
) -> tuple[Tensor, Tensor]:
    """The rows of cos and sin at positions first, first + 1, ..., or always at the first."""
    at = first + torch.arange(rows, device=cos.device) * by_row
    return cos[at], sin[at]


def _max_rows(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[2] if block_table is None else block_table.shape[1] * k_cache.shape[1]
