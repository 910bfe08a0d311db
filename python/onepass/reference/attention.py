"""Attention: every option of the operator; autograd of this gives the gradients' definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.reference.dropout import philox4x32
from onepass.reference.products import product

_WORD = 0xFFFFFFFF


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    **options,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of softmax(scale * query key^T ...) value, for sequences of any storage.

    Args:
        query: (batch, heads, seq_q, head_dim), or (total_q, heads, head_dim) with `cu_seq_q`.
        key, value: (batch, kv_heads, seq_k, dim), or (total_k, kv_heads, dim) with `cu_seq_k`, or
            (pages, page_size, kv_heads, dim) with `block_table`.
        bias, mask: 4-D, of positions within the sequences; each dimension may be 1.
        block_mask: (batch, heads, query_blocks, key_blocks), the first two may be 1: 0 for a block
            without keys, 1 for one with all, 2 + i for one that is masked by mask[i]. `mask` is
            (tiles, rows, cols) then.
        options: those of `_attention`.
    """
    if block_mask is not None:
        mask = dense_mask(block_mask, mask)[:, :, : query.shape[2], : key.shape[2]]
    if cu_seq_q is None and (seqused_k is None or len(query) == 0):
        whole_q, whole_k = max_q or query.shape[2], max_k or key.shape[2]
        return _attention(query, key, value, bias, mask, whole_k - whole_q, **options)

    # Otherwise sequences have lengths of their own, and are computed one by one.
    packed = cu_seq_q is not None
    sequences = len(cu_seq_q) - 1 if packed else len(query)
    if sequences == 0:  # packed, then
        return query.new_empty(*query.shape[:-1], value.shape[-1]), query[..., 0].mT
    outputs, lses = [], []
    for b in range(sequences):
        q = query[cu_seq_q[b] : cu_seq_q[b + 1]].transpose(0, 1) if packed else query[b]
        if block_table is not None:
            pages = block_table[b, : -(-int(seqused_k[b]) // key.shape[1])].long()
            k, v = (t[pages].flatten(0, 1).transpose(0, 1) for t in (key, value))
        elif packed:
            k, v = (t[cu_seq_k[b] : cu_seq_k[b + 1]].transpose(0, 1) for t in (key, value))
        else:
            k, v = key[b], value[b]
        queries = q.shape[1]
        keys = k.shape[1] if seqused_k is None else int(seqused_k[b])
        output, lse = _attention(
            q[None],
            k[None, :, :keys],
            v[None, :, :keys],
            *(_part(t, b, queries, keys) for t in (bias, mask)),
            keys - queries,
            sequence=b,
            **options,
        )
        outputs.append(output[0])
        lses.append(lse[0])
    if not packed:
        return torch.stack(outputs), torch.stack(lses)
    return torch.cat(outputs, 1).transpose(0, 1), torch.cat(lses, 1)


def dense_mask(block_mask: Tensor, tiles: Tensor) -> Tensor:
    """(batch, heads, rows, cols) of whole blocks."""
    none, all_ = (tiles.new_full((1, *tiles.shape[1:]), allows) for allows in (False, True))
    blocks = torch.cat([none, all_, tiles])[block_mask.long()]
    return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    longer: int,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    round_factors: bool = False,
    sequence: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of dense tensors; `longer` is keys less queries, `sequence` which one this is, or
    all. round_factors: those of the products are rounded to bfloat16."""
    (batch, heads, seq_q, head_dim), seq_k = query.shape, key.shape[2]
    key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    score = product(query, key.mT, round_factors)
    score = score * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)

    device = query.device
    position = torch.arange(seq_q, device=device)[:, None] + query_offset
    position = position + (longer if bottom_right else 0)
    distance = position - torch.arange(seq_k, device=device) - key_offset
    if alibi_slopes is not None:
        if alibi_slopes.dim() == 2 and sequence is not None:
            alibi_slopes = alibi_slopes[sequence]
        score = score - alibi_slopes[..., None, None] * distance.abs()
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, -math.inf)
    if window_left >= 0:
        score = score.masked_fill(distance > window_left, -math.inf)
    if window_right >= 0:
        score = score.masked_fill(-distance > window_right, -math.inf)
    if sinks is not None:  # one more key, without a value
        score = torch.cat([score, sinks[:, None, None].expand(batch, heads, seq_q, 1)], -1)

    factor = None
    if dropout_p:
        shape, first = (batch, heads, seq_q, seq_k), (sequence or 0, query_offset, key_offset)
        factor = keep_scale(seed, shape, dropout_p, score.dtype, first)
    output, lse = _weigh(score, value, factor, round_factors)
    return output.to(query.dtype), lse


def _weigh(
    score: Tensor, value: Tensor, factor: Tensor | None, round_factors: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(score) * factor @ value and the log-sum-exp; scores beyond the values have none.

    Rows without a key are 0 and have no gradient; a score that is -inf by itself is masked too.
    """
    masked = score == -math.inf
    empty = masked.all(-1, keepdim=True)
    score = score.masked_fill(masked, -math.inf).masked_fill(empty, 0.0)
    # Not logsumexp, whose gradient exp(score - lse) knows no log(n) beside scores of finfo.min.
    highest = score.detach().amax(-1, keepdim=True) if score.shape[-1] else score.sum(-1, True)
    lse = (score - highest).exp().sum(-1).log() + highest[..., 0]
    lse = lse.masked_fill(empty[..., 0], -math.inf)
    p = score.softmax(-1).masked_fill(masked, 0.0)[..., : value.shape[2]]
    weights = (p if factor is None else p * factor).to(value.dtype)
    return product(weights, value, round_factors), lse


def keep_scale(
    seed: Tensor,
    shape: tuple[int, int, int, int],
    p: float,
    dtype: torch.dtype = torch.float32,
    first: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """(batch, heads, seq_q, seq_k) the factor of each score: 0 if dropped, else the inverse keep
    probability; on seed's device, which nothing waits for.

    A score takes 16 bits of the block of (query, key // 8, batch * heads + head), low halves
    of the four words first; it is dropped if they are below round(65536 p), halves rounded up.

    Args:
        seed: int64[2]: seed, offset.
        first: positions of the first batch, query and key.
    """

    def positions(first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=seed.device)

    (first_batch, first_query, first_key), seq_k = first, shape[3]
    query = positions(first_query, first_query + shape[2])
    block = positions(first_key // 8, (first_key + seq_k + 7) // 8)
    row = positions(first_batch * shape[1], (first_batch + shape[0]) * shape[1])
    words = (query[:, None], block, row.view(*shape[:2], 1, 1), seed[1])
    counter = torch.broadcast_tensors(*(word & _WORD for word in words))
    low, high = seed[0] & _WORD, seed[0] >> 32 & _WORD
    halves = [
        word >> shift & 0xFFFF for word in philox4x32((low, high), counter) for shift in (0, 16)
    ]
    drawn = torch.stack(halves, -1).flatten(-2).narrow(-1, first_key % 8, seq_k)
    threshold = math.floor(65536 * p + 0.5)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return (drawn >= threshold).to(dtype) * scale


def _part(tensor: Tensor | None, sequence: int, queries: int, keys: int) -> Tensor | None:
    """The part of a bias or mask that is of one sequence."""
    if tensor is None:
        return None
    if tensor.shape[0] > 1:
        tensor = tensor[sequence : sequence + 1]
    return tensor[:, :, : queries if tensor.shape[2] > 1 else 1, :keys]
