"""Attention to a KV cache, and the merge of attentions to parts of the keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass._arguments import check_arguments
from onepass._ops.attention_decode import attention_decode
from onepass._ops.differentiation import is_differentiated
from onepass.functional._attention_options import score_options
from onepass.functional.attention import _cast, _is_autocast, _window


def attention_with_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries to the keys and values that earlier steps stored in caches.

    `key` and `value`, if given, are first written into the caches, in place, after the rows in use:
    one call is a decoding step of a layer. Every key and value is read once, for all the query
    heads that share it, in chunks that are merged in order (Dao, Haziza, Massa, Sizov:
    Flash-Decoding for long-context inference, 2023). Not a bit of a sequence's result depends on
    the rest of the batch, or on how its cache is stored::

        k_cache, v_cache = (torch.zeros(batch, kv_heads, max_seq, head_dim) for _ in range(2))
        used = torch.zeros(batch, dtype=torch.int32)
        with torch.no_grad():
            for query, key, value in steps:  # (batch, heads or kv_heads, rows, head_dim)
                y = attention_with_kv_cache(
                    query, k_cache, v_cache, key, value, cache_seqlens=used, is_causal=True
                )
                used += key.shape[2]         # once per step, for all layers of a model

    The new rows of sequence b become rows cache_seqlens[b] + i of its cache. Row j of a cache is at
    position j, query row i at total - seq_q + i, where total is cache_seqlens[b] plus the new rows:
    aligned at the bottom right.

    Args:
        query: shape (batch, heads, seq_q, head_dim); float32, bfloat16 or float16. Head i reads
            head i // (heads // kv_heads) of the caches. Made for 1 to 16 rows, correct for any
            number (keys are read once per 64 rows of the heads that share them; a long prompt is
            faster through `scaled_dot_product_attention`).
        k_cache: shape (caches, kv_heads, max_seq, head_dim), where caches is batch unless
            cache_batch_idx is given; with block_table (pages, page_size, kv_heads, head_dim).
            query's dtype, or int8 with k_scale. Any strides with a dense last dimension; others are
            copied, and cannot be written. `torch.compile` does not copy caches that are written,
            unless both are views of one tensor and inputs of the compiled function.
        v_cache: likewise, of value_dim, which may differ from head_dim; both are at most 512. The
            caches must not overlap where they are written.
        key: shape (batch, kv_heads, new_rows, head_dim), query's dtype: keys to be written. Any
            number of rows, query's or not.
        value: shape (batch, kv_heads, new_rows, value_dim); comes together with key.
        cache_seqlens: shape (batch,), int32: rows of each cache in use before this call; or one
            number for all. None is the whole cache, where nothing is written. Not changed.
        block_table: shape (batch, max_pages), int32: row j of sequence b is row j % page_size of
            page block_table[b, j // page_size]. Entries after the last row in use, or before the
            first that a window or cache_leftpad leaves, are not read. Sequences may share pages,
            but a row that one of them writes must not be read at another place.
        cache_batch_idx: shape (batch,), int32: the cache of each sequence; not with block_table.
        cache_leftpad: shape (batch,), int32: the number of rows at the beginning of each cache that
            are not keys. Positions count them.
        rotary_cos, rotary_sin: shape (positions, rotary_dim / 2), query's dtype or float32: cosines
            and sines of the rotation of key and query in their first rotary_dim dimensions (Su, Lu,
            Pan, Murtadha, Wen, Liu: RoFormer, 2021). A new key is rotated by its row in the cache
            before it is written. Query row i is rotated by cache_seqlens[b] + i with a window or
            is_causal, else by cache_seqlens[b], as in flash-attention; where key has another number
            of rows than query, that is not its position in a window. Only with key: keys in the
            caches are already rotated.
        rotary_interleaved: pairs are dimensions (2i, 2i + 1); else (i, i + rotary_dim / 2).
        scale: of the scores; None is 1 / sqrt(head_dim).
        is_causal: a query attends to no key after its position: the same as 0 on the right of
            window_size. No effect on a single query.
        window_size: (left, right): a query sees keys from position - left to position + right;
            -1 is no limit. Keys that no query of a sequence sees are not read.
        softcap, alibi_slopes, sinks: as in `scaled_dot_product_attention`, without gradients.
        k_scale, v_scale: the caches hold codes of 8 bits, and a row of theirs is its scale times
            its codes, -127 to 127. Float32, of the caches' shapes without the last dimension, any
            strides. A new row, rotated and in query's dtype, is written with the scale largest
            magnitude / 127 and codes row / scale, rounded to nearest even; a row with NaN or Inf
            reads as NaN. Codes are multiplied in float32, exactly. On CPU alone. Where a compiled
            function writes them, codes and scales must not be views of one tensor.
        num_splits: flash-attn's argument, ignored: the splits of the keys depend on a sequence's
            length, head_dim and dtype alone, so no result depends on the rest of the batch.
        return_lse: also return the logarithm of the softmax's denominator, which
            `merge_attention_states` needs.

    Returns:
        Tensor of shape (batch, heads, seq_q, value_dim) in query's dtype, with query's order of
        heads and seq_q in memory. With return_lse a pair of it and the log-sum-exp of the scores,
        sinks included: (batch, heads, seq_q), float32, natural logarithm. A query without a key has
        output 0 and log-sum-exp -inf (the sink, where there is one). Under autocast query, key and
        value are cast to the caches' dtype (key and value to query's, beside codes); caches never
        are.

    Raises:
        RuntimeError: a shape, dtype, device, length, page number or position does not fit; a cache
            that is to be written has no dense last dimension or is expanded; two sequences would
            write the same rows, or a written row would be read at another place. The message names
            the argument, and nothing has been written. Or a gradient would be recorded: there are
            none, decode under `torch.no_grad()`. On CUDA the values of lengths, cache and page
            numbers, and positions beyond rotary_cos, are not checked, which would wait for the
            device.
        TypeError: an argument is of a wrong type.
        ValueError: only one of key and value, or rotary_cos or rotary_sin without them;
            window_size is malformed.

    Examples:
        >>> k_cache, v_cache = (torch.randn(1, 2, 16, 64) for _ in range(2))  # 9 tokens are used
        >>> query, key, value = (torch.randn(1, heads, 1, 64) for heads in (8, 2, 2))
        >>> y = onepass.functional.attention_with_kv_cache(
        ...     query, k_cache, v_cache, key, value, cache_seqlens=9
        ... )
        >>> torch.equal(k_cache[:, :, 9:10], key)
        True
    """
    try:
        op = "attention_with_kv_cache"
        if not type(is_causal) is type(rotary_interleaved) is type(return_lse) is bool:
            raise TypeError  # which check_arguments names
        left, right = _window(op, window_size)
        if key is None or value is None:
            _check_no_key(op, key=key, value=value, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        if is_differentiated(
            query, key, value, k_cache, v_cache, alibi_slopes, sinks, rotary_cos, rotary_sin,
            k_scale, v_scale,
        ):  # fmt: skip
            _check_no_gradient(
                op, query=query, key=key, value=value, k_cache=k_cache, v_cache=v_cache,
                alibi_slopes=alibi_slopes, sinks=sinks, rotary_cos=rotary_cos,
                rotary_sin=rotary_sin, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
        if isinstance(cache_seqlens, float):
            raise TypeError(
                f"{op}: cache_seqlens must be a tensor or a whole number, got {cache_seqlens}"
            )
        if _is_autocast(query):
            dtype = k_cache.dtype if k_scale is None else query.dtype
            query, key, value = _cast(dtype, query, key, value)
        window = (left, 0 if is_causal else right)
        options = score_options(
            query, scale, window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        if cache_seqlens is not None:
            if not isinstance(cache_seqlens, Tensor):
                cache_seqlens = query.new_full(query.shape[:1], cache_seqlens, dtype=torch.int32)
            options["cache_seqlens"] = cache_seqlens
        if block_table is not None:
            options["block_table"] = block_table
        if cache_batch_idx is not None:
            options["cache_batch_idx"] = cache_batch_idx
        if cache_leftpad is not None:
            options["cache_leftpad"] = cache_leftpad
        if k_scale is not None:
            options["k_scale"] = k_scale
        if v_scale is not None:
            options["v_scale"] = v_scale
        if rotary_cos is not None:
            options["rotary_cos"] = rotary_cos
        if rotary_sin is not None:
            options["rotary_sin"] = rotary_sin
        if not rotary_interleaved and key is not None:
            options["rotary_interleaved"] = False
        output, lse = attention_decode(query, k_cache, v_cache, key, value, options)
        return (output, lse) if return_lse else output
    except Exception:
        check_arguments(attention_with_kv_cache, locals())
        raise


def _check_no_key(op: str, *, key, value, rotary_cos, rotary_sin) -> None:
    if key is not value:
        alone, missing = ("key", "value") if value is None else ("value", "key")
        raise ValueError(f"{op}: {alone} must be given together with {missing}, got {alone} alone")
    for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if tensor is not None:
            raise ValueError(f"{op}: {name} must not be given without key, got one")


def _check_no_gradient(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                f"{op}: {name} must not require gradients, use torch.no_grad(), got one that does"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{op}: {name} must have no tangent, got one that has")


def merge_attention_states(
    outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The attention to all keys, from attentions of the same queries to parts of them.

    ``lse = logsumexp(lses)`` and ``output = sum(exp(lses[i] - lse) * outputs[i])`` (Milakov,
    Gimelshein: Online normalizer calculation for softmax, 2018), which is exact. For chunked
    prefill, a prefix that sequences share, keys on several machines. The parts must be disjoint,
    and a sink in one of them alone. Computed in float32 (float64 for float64) in the order of the
    parts, rounded once; differentiable, and one kernel under `torch.compile`.

    Args:
        outputs: the parts' outputs, each of shape (..., dim), such as (batch, heads, seq_q, dim); a
            sequence of tensors or one with the parts in its first dimension.
        lses: their log-sum-exps, natural logarithm, each of shape (...), as from `return_lse`. A
            part that has no key for a query has -inf there, and its output is not used.

    Returns:
        A pair: Tensor of shape (..., dim) in outputs' dtype, and its log-sum-exp, (...), in float32
        (float64 for float64). Where no part has a key they are 0 and -inf.

    Raises:
        RuntimeError: there are no parts, or their number, shapes or dtypes do not fit.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> query, key = (torch.randn(1, 2, 8, 64) for _ in range(2))
        >>> attend = onepass.functional.scaled_dot_product_attention
        >>> outputs, lses = zip(
        ...     *(attend(query, keys, keys, return_lse=True) for keys in key.split(4, dim=2))
        ... )
        >>> y, lse = onepass.functional.merge_attention_states(outputs, lses)
        >>> y.shape, lse.shape
        (torch.Size([1, 2, 8, 64]), torch.Size([1, 2, 8]))
    """
    try:
        op = "merge_attention_states"
        for name, parts in (("outputs", outputs), ("lses", lses)):
            if isinstance(parts, Tensor) and parts.dim() == 0:
                raise RuntimeError(
                    f"{op}: {name} must have the parts in its first dimension, got none"
                )
        outputs, lses = list(outputs), list(lses)
        if not all(isinstance(part, Tensor) for part in (*outputs, *lses)):
            check_arguments(merge_attention_states, locals())
        if not outputs:
            raise RuntimeError(f"{op}: outputs must hold at least one tensor, got none")
        if len(lses) != len(outputs):
            raise RuntimeError(
                f"{op}: lses must hold as many tensors as outputs, {len(outputs)}, got {len(lses)}"
            )
        first = outputs[0]
        for output, lse in zip(outputs, lses, strict=True):
            if output.dim() == 0 or output.shape != first.shape or output.dtype != first.dtype:
                raise RuntimeError(
                    f"{op}: outputs must have one shape (..., dim) and dtype, "
                    f"got {_about(first)} and {_about(output)}"
                )
            if lse.shape != output.shape[:-1]:
                raise RuntimeError(
                    f"{op}: lses must have shape {tuple(output.shape[:-1])}, that of outputs "
                    f"without the last dimension, got {tuple(lse.shape)}"
                )
        accumulator = torch.float64 if first.dtype is torch.float64 else torch.float32
        stacked = torch.stack(lses).to(accumulator)
        without_key = stacked == -math.inf
        nowhere = without_key.all(0)
        stacked = stacked.masked_fill(nowhere, 0.0)  # else 0 / 0 and its gradient
        parts = (
            weight[..., None] * output.masked_fill(mask[..., None], 0.0)
            for weight, output, mask in zip(stacked.softmax(0), outputs, without_key, strict=True)
        )
        lse = stacked.logsumexp(0).masked_fill(nowhere, -math.inf)
        return functools.reduce(torch.add, parts).to(first.dtype), lse
    except Exception:
        check_arguments(merge_attention_states, locals())
        raise


def _about(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
