"""The definition of rotary embedding, with or without norms of rows, as models compose it."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.norm import rms_norm


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    seq_first: bool = False,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """``x * cos + rotate(x) * sin`` in the first rotary_dim columns of query and key; the other
    columns stay (Su, Lu, Pan, Murtadha, Wen, Liu: RoFormer, 2021).

    Args:
        query, key: (..., heads, tokens, head_dim), or with seq_first (..., tokens, heads,
            head_dim).
        cos, sin: (tokens, width) or (batch, tokens, width); with positions (rows, width). The width
            is rotary_dim, or half of it where both columns of a pair have the same.
        interleaved: pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
        positions: (tokens,) or (batch, tokens): the rows of cos and sin.
        rotary_dim: None is cos' width.
        query_weight, key_weight: (head_dim,): with it each head's row goes through an RMS norm
            first, with eps and weight_offset as rms_norm has them.
    """
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = (widened(t, rotary_dim, interleaved) for t in (cos, sin))
    cos, sin = (t.unsqueeze(-2 if seq_first else -3) for t in (cos, sin))

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            dtype = x.dtype
            x = rms_norm(x, weight.shape, weight, eps, weight_offset=weight_offset).to(dtype)
        turned = x[..., :rotary_dim]
        turned = turned * cos + partners(turned, interleaved) * sin
        return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], -1)

    return rotated(query, query_weight), None if key is None else rotated(key, key_weight)


def partners(x: Tensor, interleaved: bool) -> Tensor:
    """(-b, a) of each pair (a, b) of columns."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def widened(table: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """cos or sin with a number for each column, from one for each pair or each column."""
    if table.shape[-1] == rotary_dim:
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
