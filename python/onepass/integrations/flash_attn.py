"""flash_attn's functions by their names and arguments, computed by onepass on a CPU and on CUDA.

A model that says ``from flash_attn import flash_attn_func`` runs here with the import changed::

    from onepass.integrations.flash_attn import flash_attn_func

The package itself is neither imported nor needed. Its layouts hold: (batch, seq, heads, head_dim),
or (total, heads, head_dim) for sequences one behind the other; key and value may have fewer heads
than query; causal attention and windows are aligned at the bottom right. Beyond it: float32 (and,
but for KV caches, float64), head dimensions to 512, values of a dimension of their own, softcap and
dropout together, gradients of alibi_slopes and of the log-sum-exp.

Where they differ: the log-sum-exp of a query without a key is -inf (there: inf), and with
alibi_slopes it is that of the scores as documented (there, those of a causal row may be off by a
constant); the matrix of probabilities is never made; dropout follows `torch.manual_seed` with other
numbers.
"""

from __future__ import annotations

from torch import Tensor

from onepass.functional import (
    attention_with_kv_cache,
    scaled_dot_product_attention,
    varlen_attention,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`onepass.functional.scaled_dot_product_attention` with heads behind the sequence.

    Args:
        q: shape (batch, seq_q, heads, head_dim).
        k: shape (batch, seq_k, kv_heads, head_dim), kv_heads dividing heads.
        v: shape (batch, seq_k, kv_heads, value_dim).
        dropout_p: probability of dropping a weight, whenever it is above 0.
        softmax_scale: of the scores; None is 1 / sqrt(head_dim).
        causal: query i sees keys up to i + seq_k - seq_q.
        window_size: (left, right): how far it sees from there; -1 is no limit.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c).
        alibi_slopes: shape (heads,) or (batch, heads), float32: slope * |i + seq_k - seq_q - j| is
            subtracted from the scores.
        deterministic: gradients that repeat bit for bit on CUDA; on a CPU they always do.
        return_attn_probs: return the log-sum-exp too; there is no matrix of probabilities.

    Returns:
        Tensor of shape (batch, seq_q, heads, value_dim) in q's dtype; with return_attn_probs a
        triple of it, the log-sum-exp (batch, heads, seq_q), and an empty tensor.

    Raises:
        ValueError: return_attn_probs with dropout, where flash_attn's third result has the
            probabilities; or as onepass's own function does.
        RuntimeError: as that does.
    """
    _refuse_probabilities("flash_attn_func", return_attn_probs, dropout_p)
    output, lse = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=True,
        causal_alignment="bottom_right",
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=True,
    )
    return _result(output.transpose(1, 2), lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of q and kv, of shape (batch, seq_k, 2, kv_heads, head_dim)."""
    _check_packed("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of qkv, of shape (batch, seq, 3, heads, head_dim)."""
    _check_packed("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """:func:`onepass.functional.varlen_attention`: sequences one behind the other.

    Args:
        q: shape (total_q, heads, head_dim).
        k: shape (total_k, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with
            block_table.
        v: shape (total_k, kv_heads, value_dim), or paged like k.
        cu_seqlens_q, cu_seqlens_k: shape (batch + 1,), int32: where each sequence begins, the total
            last; with block_table cu_seqlens_k says how many keys each sequence has.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        block_table: shape (batch, max_pages), int32: the pages with a sequence's keys, in order.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in :func:`flash_attn_func`, in each sequence by itself.

    Returns:
        Tensor of shape (total_q, heads, value_dim); with return_attn_probs a triple of it, the
        log-sum-exp (heads, total_q), and an empty tensor.

    Raises:
        As :func:`flash_attn_func`.
    """
    _refuse_probabilities("flash_attn_varlen_func", return_attn_probs, dropout_p)
    output, lse = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        return_lse=True,
        scale=softmax_scale,
        window_size=window_size,
        is_causal=causal,
        enable_gqa=True,
        seqused_k=None if block_table is None else cu_seqlens_k.diff(),
        block_table=block_table,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _result(output, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of q and kv, of shape (total_k, 2, kv_heads, head_dim)."""
    _check_packed("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv, of shape (total, 3, heads, head_dim)."""
    _check_packed("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`onepass.functional.attention_with_kv_cache`: appends to caches and attends to them.

    Args:
        q: shape (batch, seq_q, heads, head_dim).
        k_cache: shape (caches, max_seq, kv_heads, head_dim), or (pages, page_size, kv_heads,
            head_dim) with block_table; k is written into it.
        v_cache: likewise, of value_dim.
        k: shape (batch, new_rows, kv_heads, head_dim); None writes nothing.
        v: shape (batch, new_rows, kv_heads, value_dim); comes together with k.
        causal, window_size: as in :func:`flash_attn_func`, of the keys in use, new ones included.
        rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softcap,
            rotary_interleaved, alibi_slopes, num_splits: as in onepass's own function.

    Returns:
        Tensor of shape (batch, seq_q, heads, value_dim); with return_softmax_lse a pair of it and
        the log-sum-exp (batch, heads, seq_q), float32.

    Raises:
        RuntimeError, TypeError, ValueError: as onepass's own function does; there are no gradients.
    """
    if block_table is None:  # pages lie alike
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    output, lse = attention_with_kv_cache(
        q.transpose(1, 2),
        k_cache,
        v_cache,
        None if k is None else k.transpose(1, 2),
        None if v is None else v.transpose(1, 2),
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        scale=softmax_scale,
        is_causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=True,
    )
    output = output.transpose(1, 2)
    return (output, lse) if return_softmax_lse else output


def _refuse_probabilities(op: str, return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0.0:
        raise ValueError(
            f"{op}: return_attn_probs must be False with dropout, whose probabilities are never "
            f"stored, got dropout_p {dropout_p}"
        )


def _check_packed(op: str, name: str, packed: Tensor, dims: int, count: int) -> None:
    if packed.dim() != dims or packed.shape[dims - 3] != count:
        raise RuntimeError(
            f"{op}: {name} must have {dims} dimensions, the one before the heads of size {count}, "
            f"got shape {tuple(packed.shape)}"
        )


def _result(output: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    return (output, lse, output.new_empty(0)) if return_attn_probs else output
