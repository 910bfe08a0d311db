"""Attention of dense and packed sequences, with torch's signatures and a few more arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops.attention import attention
from onepass._policy.precision import check_precision
from onepass.functional._attention_options import given, rounds, score_options
from onepass.functional._block_mask import blocks_and_tiles


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    block_mask: object = None,
    query_offset: int = 0,
    key_offset: int = 0,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``dropout(softmax(score)) @ value``, as `torch.nn.functional.scaled_dot_product_attention`.

    ``score = softcap(scale * query @ key^T) - slope * |position - j| + attn_mask`` where the mask,
    the window and the diagonal allow it, computed a block at a time and never stored (Dao, Fu,
    Ermon, Rudra, Re: FlashAttention, NeurIPS 2022): memory grows with the length of the sequences,
    not with its square. A query without a key has output 0. Blocks whose keys are all masked take
    no time. A key that no query sees may hold anything, NaN too. If some queries see a key, its NaN
    and Inf may reach others, as in torch.

    Args:
        query: shape (..., heads, seq_q, head_dim), or (seq_q, head_dim); float32, bfloat16, float16
            or float64. Any strides: a dense last dimension is read in place, other layouts are
            copied once. float32 on CUDA is multiplied in TF32 if torch's matrix products may be
            (`torch.backends.cuda.matmul.fp32_precision`), else to float32's accuracy.
        key: shape (..., heads, seq_k, head_dim), dtype of query.
        value: shape (..., heads, seq_k, value_dim), dtype of query. The leading dimensions of all
            three broadcast; head_dim and value_dim are at most 512.
        attn_mask: broadcasts to (..., heads, seq_q, seq_k): boolean, True where a query may attend
            to a key; or float, added to the scores. Its gradient is summed over broadcast
            dimensions. Error messages call it mask or bias.
        dropout_p: probability of dropping a weight; applies whenever it is above 0, as torch's
            does. No mask is stored, the backward regenerates it. It is quantised to 1/65536.
        is_causal: a query attends to no key after its position. With attn_mask both apply.
        scale: of the scores; None is 1 / sqrt(head_dim).
        enable_gqa: key and value may have fewer heads than query, a divisor of query's number;
            query's head i reads head i // (heads // kv_heads).
        causal_alignment: "top_left" puts query i at position i, "bottom_right" at
            i + seq_k - seq_q.
        window_size: (left, right): a query sees keys from position - left to position + right;
            -1 is no limit.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c).
        alibi_slopes: shape (heads,) or (batch, heads), float32 (Press, Smith, Lewis: Train short,
            test long, ICLR 2022). Has a gradient.
        sinks: shape (heads,), float32 or query's dtype: one more score per row, which counts in the
            softmax but has no value. Has a gradient.
        deterministic: gradients that repeat bit for bit; on a CPU they always do. On CUDA this, or
            `torch.use_deterministic_algorithms(True)`, sums query's gradient in a fixed order.
        return_lse: also return the logarithm of the softmax's denominator.
        block_mask: a `torch.nn.attention.flex_attention.BlockMask` of seq_q queries and seq_k keys,
            its batch and heads query's or 1. Blocks in neither of its lists are skipped; `mask_mod`
            is evaluated on those that are not full, once for each BlockMask. It combines with all
            other options except a boolean attn_mask. There is no `score_mod`: softcap,
            alibi_slopes and a float attn_mask change scores. CPU only.
        query_offset, key_offset: the positions of the first query and the first key, if these are
            parts of longer sequences: query i is at query_offset + i (plus what "bottom_right"
            adds), key j at key_offset + j. The causal mask, windows, ALiBi and dropout use
            positions, so parts see and drop the same as the whole. Not negative, below 2^40.
        precision: of float32 products on a CPU, as in `linear`: with "medium" the factors of all
            products, forward and backward, are rounded to bfloat16; the softmax, sums and results
            are float32. "int8" is of linear layers alone, and None here.

    Returns:
        Tensor of shape (..., heads, seq_q, value_dim) in query's dtype (under autocast: in
        autocast's), with query's order of heads and seq_q in memory. With return_lse a pair of it
        and the log-sum-exp of the scores, sinks included: (..., heads, seq_q), natural logarithm,
        float32 (float64 for float64), -inf where there is no key; it has a gradient.

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: causal_alignment, window_size or precision is malformed; block_mask has other
            lengths.

    Examples:
        >>> query = torch.randn(2, 8, 128, 64)  # (batch, heads, tokens, head_dim)
        >>> key, value = (torch.randn(2, 2, 128, 64) for _ in range(2))
        >>> y = onepass.functional.scaled_dot_product_attention(
        ...     query, key, value, is_causal=True, enable_gqa=True, window_size=(32, -1)
        ... )
        >>> y.shape
        torch.Size([2, 8, 128, 64])
    """
    try:
        op = "scaled_dot_product_attention"
        if (
            not type(is_causal)
            is type(enable_gqa)
            is type(deterministic)
            is type(return_lse)
            is bool
        ):
            raise TypeError  # which check_arguments names
        if causal_alignment not in ("top_left", "bottom_right"):
            raise ValueError(
                f"{op}: causal_alignment must be 'top_left' or 'bottom_right', "
                f"got {causal_alignment!r}"
            )
        left, right = _window(op, window_size)
        check_precision(op, precision)
        if query.is_nested or key.is_nested or value.is_nested:
            raise RuntimeError(
                f"{op}: query must not be nested, got a nested tensor; varlen_attention takes "
                "packed sequences"
            )
        query, key, value = _autocast(query, key, value)
        dims = max(query.dim(), key.dim(), value.dim())
        query, key, value, lead = _batched(op, query, key, value, enable_gqa)
        bias, mask = _score_terms(attn_mask, lead, key.shape[2])
        window = (left, 0 if is_causal else right)
        options = score_options(
            query, scale, window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        if bias is not None:
            options["bias"] = bias
        if mask is not None:
            options["mask"] = mask
        if block_mask is not None:
            if mask is not None:
                raise RuntimeError(
                    f"{op}: attn_mask must be a float mask with block_mask, got a boolean one"
                )
            lengths = query.shape[2], key.shape[2]
            options["block_mask"], options["mask"] = blocks_and_tiles(op, block_mask, lengths)
        if rounds(query, precision):
            options["round_factors"] = True
        if dropout_p != 0.0:
            options["dropout_p"] = dropout_p
        if causal_alignment == "bottom_right":
            options["bottom_right"] = True
        if query_offset != 0:
            options["query_offset"] = query_offset
        if key_offset != 0:
            options["key_offset"] = key_offset
        output, lse = attention(query, key, value, options, deterministic)
        if dims != 4:
            rows = (*lead, *output.shape[1:3])[1 - dims :]
            output, lse = output.reshape(*rows, output.shape[-1]), lse.reshape(rows)
        return (output, lse) if return_lse else output
    except Exception:
        check_arguments(scaled_dot_product_attention, locals())
        raise


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    return_lse: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    is_causal: bool = False,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    deterministic: bool = False,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences of different lengths, one after the other, without padding.

    As `torch.nn.attention.varlen.varlen_attn`, with the options of
    `scaled_dot_product_attention`. Query i of a sequence is at position i + keys - queries of
    that sequence: causal attention is aligned at the bottom right.

    Args:
        query: shape (total_q, heads, head_dim).
        key: shape (total_k, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with
            block_table.
        value: shape (total_k, kv_heads, value_dim), or paged like key.
        cu_seq_q, cu_seq_k: shape (batch + 1,), int32: where each sequence begins; the last element
            is the total. With block_table cu_seq_k is not read.
        max_q, max_k: at least the length of the longest sequence.
        return_aux: a `torch.nn.attention.varlen.AuxRequest`; one with `lse` has the effect of
            return_lse.
        return_lse: also return the log-sum-exp.
        window_size: (left, right), -1 is no limit; (-1, 0) is causal.
        is_causal: the same as 0 on the right of window_size.
        enable_gqa: key and value may have fewer heads than query, a divisor of query's number.
        seqused_k: shape (batch,), int32: the number of keys of each sequence; later ones are not
            read.
        block_table: shape (batch, max_pages), int32: the pages that hold a sequence's keys, in
            order; needs seqused_k. With gradients, the pages are first gathered.
        num_splits: torch's argument, ignored: neither the splits of a sequence's keys nor its
            result depends on the rest of the batch.
        attn_mask: boolean or float, broadcasts to (batch, heads, max_q, max_k), indexed by
            positions within the sequences.
        scale, dropout_p, softcap, alibi_slopes, sinks, deterministic, precision: as in
            `scaled_dot_product_attention`.

    Returns:
        Tensor of shape (total_q, heads, value_dim); with return_lse a pair of it and the
        log-sum-exp, (heads, total_q).

    Raises:
        RuntimeError: a shape, dtype, device, length or page number does not fit; the message names
            the argument. On CUDA the values of lengths and page numbers are not checked, which
            would wait for the device: they must fit max_q, max_k and the rows in memory.
        ValueError: key's heads are not query's and enable_gqa is not set; window_size or precision
            is malformed.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> begins = torch.tensor([0, 50, 128], dtype=torch.int32)  # sequences of 50 and 78 tokens
        >>> query, key, value = (torch.randn(128, 8, 64) for _ in range(3))
        >>> y = onepass.functional.varlen_attention(
        ...     query, key, value, begins, begins, 78, 78, is_causal=True
        ... )
        >>> y.shape
        torch.Size([128, 8, 64])
    """
    try:
        op = "varlen_attention"
        if (
            not type(is_causal)
            is type(enable_gqa)
            is type(deterministic)
            is type(return_lse)
            is bool
        ):
            raise TypeError
        left, right = _window(op, window_size)
        check_precision(op, precision)
        heads = (query.shape[1], key.shape[-2]) if query.dim() > 1 and key.dim() > 1 else (1, 1)
        if heads[0] != heads[1] and not enable_gqa:
            raise ValueError(
                f"{op}: key must have query's {heads[0]} heads without enable_gqa, got {heads[1]}"
            )
        bias = mask = None
        if attn_mask is not None and cu_seq_q.dim() == 1:
            bias, mask = _score_terms(attn_mask, (cu_seq_q.shape[0] - 1,), max_k)
        window = (left, 0 if is_causal else right)
        options = score_options(
            query, scale, window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        options |= dict(cu_seq_q=cu_seq_q, max_q=max_q, max_k=max_k, bottom_right=True)
        options |= given(bias=bias, mask=mask, seqused_k=seqused_k, block_table=block_table)
        if rounds(query, precision):
            options["round_factors"] = True
        if cu_seq_k is not None and block_table is None:
            options["cu_seq_k"] = cu_seq_k
        if dropout_p != 0.0:
            options["dropout_p"] = dropout_p
        output, lse = attention(query, key, value, options, deterministic)
        return (output, lse) if return_lse or getattr(return_aux, "lse", False) else output
    except Exception:
        check_arguments(varlen_attention, locals())
        raise


def _window(op: str, window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError) as error:
        kind = type(error) if isinstance(error, ValueError) else TypeError
        raise kind(f"{op}: window_size must be (left, right), got {window_size!r}") from None
    return left, right


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to autocast's dtype if it is on, as autocast does for torch's own function."""
    if not _is_autocast(tensors[0]):
        return tensors
    return _cast(torch.get_autocast_dtype(tensors[0].device.type), *tensors)


def _is_autocast(tensor: Tensor) -> bool:
    # Not by device.type: in a model, where other operators have evicted the caches, making that
    # string takes longer than all else here.
    if tensor.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return tensor.is_cuda and torch.is_autocast_enabled("cuda")


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the tensors that autocast would cast to dtype; returns the others unchanged."""
    return tuple(
        t if t is None or t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in tensors
    )


def _batched(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """All three as (batch, heads, seq, dim), and the leading sizes that batch combines."""
    if query.dim() == key.dim() == value.dim() == 4:
        of_query, of_key, of_value = query.shape, key.shape, value.shape
        if of_query[0] == of_key[0] == of_value[0] and of_key[1] == of_value[1]:
            # The operator itself shares one head of key, or with enable_gqa several.
            if enable_gqa or of_key[1] == of_query[1] or of_key[1] == 1:
                return query, key, value, (of_query[0],)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{op}: {name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}"
            )
    dims = max(4, query.dim(), key.dim(), value.dim())
    query, key, value = (t[(None,) * (dims - t.dim())] for t in (query, key, value))

    sizes = [t.shape[-3] for t in (query, key, value)]
    if not enable_gqa:
        (heads,) = _broadcast(op, "heads (or enable_gqa)", *((size,) for size in sizes))
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
        if sizes[1] != sizes[2]:
            key, value = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (key, value))
    elif sizes[1] != sizes[2]:
        key, value = (
            t.repeat_interleave(sizes[0] // t.shape[-3], -3)
            if t.shape[-3] and sizes[0] % t.shape[-3] == 0
            else t
            for t in (key, value)
        )

    lead = _broadcast(op, "leading dimensions", *(t.shape[:-3] for t in (query, key, value)))
    query, key, value = (t.expand(*lead, *t.shape[-3:]).flatten(0, -4) for t in (query, key, value))
    return query, key, value, lead


def _broadcast(op: str, what: str, *sizes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*sizes))
    except RuntimeError:
        query, key, value = (tuple(size) for size in sizes)
        raise RuntimeError(
            f"{op}: key and value must have {what} that broadcast with query's {query}, "
            f"got {key} and {value}"
        ) from None


def _score_terms(
    attn_mask: Tensor | None, lead: tuple[int, ...], seq_k: int
) -> tuple[Tensor | None, Tensor | None]:
    """(bias, mask) of the op: four-dimensional, with a column for each key."""
    if attn_mask is None:
        return None, None
    if attn_mask.dim() == 0:
        raise IndexError(
            "scaled_dot_product_attention: attn_mask must have a dimension for keys, got shape ()"
        )
    terms = attn_mask[(None,) * (len(lead) + 3 - attn_mask.dim())]
    if terms.shape[-1] == 1 and seq_k != 1:
        terms = terms.expand(*terms.shape[:-1], seq_k)
    if len(lead) > 1 and terms.dim() == len(lead) + 3:
        sizes = terms.shape[:-3]
        batched = terms if sizes.numel() == 1 else terms.expand(*lead, *terms.shape[-3:])
        terms = batched.flatten(0, -4)
    return (None, terms) if terms.dtype is torch.bool else (terms, None)
