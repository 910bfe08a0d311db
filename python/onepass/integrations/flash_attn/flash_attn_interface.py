"""flash_attn.flash_attn_interface: attention, see :mod:`onepass.integrations.flash_attn`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

from torch import Tensor

from onepass._arguments import check_arguments
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

# onepass's names of arguments, and flash_attn's.
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
    "scale": "softmax_scale",
    "is_causal": "causal",
}
_OF_SEQUENCES = {"cu_seq_q": "cu_seqlens", "cu_seq_k": "cu_seqlens"}
_OF_SEQUENCES |= {"max_q": "max_seqlen", "max_k": "max_seqlen"}
_IN_KV = {"key": "kv", "value": "kv"}
_IN_QKV = {"query": "qkv", "key": "qkv", "value": "qkv"}


def _in_its_words(**names: str) -> Callable:
    """Rewrites errors of onepass's functions for the decorated one: its name, its argument names
    (`names` where they differ from _NAMES), its layout. Errors of this file begin with "flash_attn"
    and have the layout already."""
    names = _NAMES | names

    def decorated(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
                check_arguments(function, given)
                text = _translated(function.__name__, str(error), names, given)
                if not text or type(error) not in (RuntimeError, TypeError, ValueError):
                    raise
                raise type(error)(text) from None

        return wrapper

    return decorated


def _with_options_of(plain: Callable) -> Callable:
    """Gives the decorated function the parameters of `plain` from dropout_p on."""
    names = list(inspect.signature(plain).parameters)
    names = names[names.index("dropout_p") : names.index("return_attn_probs") + 1]

    def decorated(function: Callable) -> Callable:
        signature = inspect.signature(function)
        own = list(signature.parameters.values())[:-2]
        options = [inspect.signature(plain).parameters[name] for name in names]
        function.__signature__ = signature.replace(parameters=[*own, *options])
        return function

    return decorated


def _translated(op: str, text: str, names: dict[str, str], given: dict[str, object]) -> str:
    """An error in onepass's form, rewritten for this function; empty for any other error."""
    match = re.match(r"\w+: ((\w+) .*)", text, re.DOTALL)
    if match is None:
        return ""
    rest, argument = match.groups()
    is_dense = not any(name.startswith("cu_seqlens") for name in given)
    in_pages = argument.endswith("_cache") and given.get("block_table") is not None
    if is_dense and not in_pages and not text.startswith("flash_attn:"):
        # onepass saw the heads before the sequence.
        rest = re.sub(r"\((\d+), (\d+), (\d+), (\d+)\)", r"(\1, \3, \2, \4)", rest)
    words = re.compile(rf"\b({'|'.join(names)})\b")
    return f"{op}: {words.sub(lambda word: names[word[0]], rest)}"


@_in_its_words()
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
    """`onepass.functional.scaled_dot_product_attention` with heads after the sequence.

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
            subtracted from the scores, and from those that the log-sum-exp is of (flash_attn's, of
            a causal row, may be off by a constant). Has a gradient.
        deterministic: gradients that repeat bit for bit on CUDA; on a CPU they always do.
        return_attn_probs: return the log-sum-exp too; there is no matrix of probabilities.

    Returns:
        Tensor of shape (batch, seq_q, heads, value_dim) in q's dtype; with return_attn_probs a
        triple of it, the log-sum-exp (batch, heads, seq_q), and an empty tensor.

    Raises:
        ValueError: return_attn_probs with dropout, where flash_attn's third result has the
            probabilities; or as onepass's own function does.
        RuntimeError: as that does.

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_func
        >>> q = torch.randn(2, 16, 8, 64)
        >>> k, v = (torch.randn(2, 16, 2, 64) for _ in range(2))  # two heads for eight
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _refuse_probabilities(return_attn_probs, dropout_p)
    _check_dense(q, k, v)
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


@_in_its_words(**_IN_KV)
@_with_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options, **named) -> Result:
    """`flash_attn_func` of q and kv, of shape (batch, seq_k, 2, kv_heads, head_dim).

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_kvpacked_func
        >>> q, kv = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 2, 64)
        >>> flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    return flash_attn_func.__wrapped__(q, *_parts("kv", kv, 5, 2), *options, **named)


@_in_its_words(**_IN_QKV)
@_with_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options, **named) -> Result:
    """`flash_attn_func` of qkv, of shape (batch, seq, 3, heads, head_dim).

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_qkvpacked_func
        >>> qkv = torch.randn(2, 16, 3, 8, 64)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    return flash_attn_func.__wrapped__(*_parts("qkv", qkv, 5, 3), *options, **named)


@_in_its_words()
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
    """`onepass.functional.varlen_attention`: sequences one after the other.

    Arguments that are not listed are those of `flash_attn_func`, in each sequence by itself.

    Args:
        q: shape (total_q, heads, head_dim).
        k: shape (total_k, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with
            block_table.
        v: shape (total_k, kv_heads, value_dim), or paged like k.
        cu_seqlens_q, cu_seqlens_k: shape (batch + 1,), int32: where each sequence begins, the total
            last; with block_table cu_seqlens_k says how many keys each sequence has.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        block_table: shape (batch, max_pages), int32: the pages with a sequence's keys, in order.


    Returns:
        Tensor of shape (total_q, heads, value_dim); with return_attn_probs a triple of it, the
        log-sum-exp (heads, total_q), and an empty tensor.

    Raises:
        ValueError, RuntimeError: as `flash_attn_func`.

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_varlen_func
        >>> q, k, v = (torch.randn(8, 4, 64) for _ in range(3))  # sequences of 3 and 5 tokens
        >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True).shape
        torch.Size([8, 4, 64])
    """
    _refuse_probabilities(return_attn_probs, dropout_p)
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


@_in_its_words(**_IN_KV)
@_with_options_of(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options,
    **named,
) -> Result:
    """`flash_attn_varlen_func` of q and kv, of shape (total_k, 2, kv_heads, head_dim).

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_varlen_kvpacked_func
        >>> q, kv = torch.randn(8, 4, 64), torch.randn(8, 2, 4, 64)
        >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 5, 5, causal=True).shape
        torch.Size([8, 4, 64])
    """
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    of_kv = _parts("kv", kv, 4, 2)
    return flash_attn_varlen_func.__wrapped__(q, *of_kv, *sequences, *options, **named)


@_in_its_words(**_OF_SEQUENCES, **_IN_QKV)
@_with_options_of(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options, **named
) -> Result:
    """`flash_attn_varlen_func` of qkv, of shape (total, 3, heads, head_dim).

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> qkv, ends = torch.randn(8, 3, 4, 64), torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True).shape
        torch.Size([8, 4, 64])
    """
    sequences = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    of_qkv = _parts("qkv", qkv, 4, 3)
    return flash_attn_varlen_func.__wrapped__(*of_qkv, *sequences, *options, **named)


@_in_its_words()
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
    """`onepass.functional.attention_with_kv_cache`: appends to caches and attends to them.

    Arguments that are not listed are those of onepass's own function.

    Args:
        q: shape (batch, seq_q, heads, head_dim).
        k_cache: shape (caches, max_seq, kv_heads, head_dim), or (pages, page_size, kv_heads,
            head_dim) with block_table; k is written into it.
        v_cache: likewise, of value_dim.
        k: shape (batch, new_rows, kv_heads, head_dim); None writes nothing.
        v: shape (batch, new_rows, kv_heads, value_dim); comes together with k.
        causal, window_size: as in `flash_attn_func`, of the keys in use, new ones included.

    Returns:
        Tensor of shape (batch, seq_q, heads, value_dim); with return_softmax_lse a pair of it and
        the log-sum-exp (batch, heads, seq_q), float32.

    Raises:
        RuntimeError, TypeError, ValueError: as onepass's own function does; there are no gradients.

    Examples:
        >>> from onepass.integrations.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 128, 2, 64)
        >>> q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5).shape
        torch.Size([2, 1, 8, 64])
        >>> k_cache[:, 5].equal(k[:, 0])  # written in place
        True
    """
    if block_table is None:  # pages have the same layout
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


def _refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0.0:
        raise ValueError(
            "flash_attn: return_attn_probs must be False with dropout, whose probabilities are "
            f"never stored, got dropout_p {dropout_p}"
        )


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses shapes that scaled_dot_product_attention would broadcast and flash_attn does not."""
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dim() != 4:
            raise RuntimeError(
                f"flash_attn: {name} must have shape (batch, seq, heads, head_dim), "
                f"got {tuple(tensor.shape)}"
            )
    if k.shape[0] != q.shape[0]:
        raise RuntimeError(
            f"flash_attn: key must have the batch size of query, {q.shape[0]}, got {k.shape[0]}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise RuntimeError(
            f"flash_attn: value must have batch, seq and heads of key, {tuple(k.shape[:3])}, "
            f"got {tuple(v.shape[:3])}"
        )


def _parts(name: str, packed: Tensor, dims: int, count: int) -> tuple[Tensor, ...]:
    """The tensors of a packed one, whose dimension is before the heads."""
    if packed.dim() != dims or packed.shape[dims - 3] != count:
        raise RuntimeError(
            f"flash_attn: {name} must have {dims} dimensions, the one before the heads of size "
            f"{count}, got shape {tuple(packed.shape)}"
        )
    return packed.unbind(dims - 3)


def _result(output: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    return (output, lse, output.new_empty(0)) if return_attn_probs else output
