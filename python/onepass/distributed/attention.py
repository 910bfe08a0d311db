"""Attention of a sequence that is divided among processes: the public function."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from onepass._arguments import check_arguments
from onepass.distributed import ring
from onepass.distributed.sequence import check_layout, place
from onepass.functional._attention_options import rounds, score_options
from onepass.functional.attention import _autocast, _window


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    layout: str = "zigzag",
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` of a sequence that is divided among a group's processes.

    Each process holds a shard of query, key and value, and gets its queries' attention to the keys
    of all. Keys and values go round in a ring, and each shard is attended to while the next one
    arrives; the parts are merged by their log-sum-exps (Liu, Zaharia, Abbeel: Ring Attention with
    Blockwise Transformers for Near-Infinite Context, ICLR 2024). In the backward they go round once
    more, with their gradients. No process ever holds more than two shards of keys and values beside
    its own. Shards that no query of a process sees, by the diagonal or the window, are passed on
    and not computed.

    A process sends (size - 1) * (K + V) bytes in the forward, and in the backward the same plus
    size * (dK + dV), where K is a shard's keys in bytes and dK its elements in float32 (float64).

    Every process of the group calls it, in the same order as its other collectives, with shards of
    the same shapes and dtypes, which is not checked. Without a process group this process holds the
    whole sequence, and the result is that of `scaled_dot_product_attention`.

    Args:
        query: shape (batch, heads, seq_q, head_dim), this process's part of size * seq_q queries.
        key: shape (batch, kv_heads, seq_k, head_dim), its part of the keys.
        value: shape (batch, kv_heads, seq_k, value_dim).
        group: the processes; None is torch's default group.
        layout: the part of each process, see `shard_sequence`. With "zigzag", which gives all
            processes equal work for causal attention, seq_q and seq_k must be even.
        dropout_p, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks, deterministic: as
            in `scaled_dot_product_attention`. Dropout drops the same weights as in one process: the
            seed comes from the generator of the group's first process.
        is_causal: a query attends to no key after its position in the whole sequence.
        return_lse: also return the logarithm of the softmax' denominator.

    Returns:
        Tensor of shape (batch, heads, seq_q, value_dim) in query's dtype, as close to the exact
        result as that of one process (parts are added up in float32, rounded once). With
        return_lse a pair of it and the log-sum-exp, (batch, heads, seq_q), natural logarithm,
        float32 (float64 for float64). The gradients of alibi_slopes and sinks are those of this
        process's queries: as of any weight that all processes hold, their sum is the gradient.

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit; the message names the argument.
            A second derivative is asked for.
        ValueError: layout is unknown, or window_size is malformed.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> from onepass.distributed import ring_attention
        >>> query, key, value = (torch.randn(1, 8, 128, 64) for _ in range(3))  # of this process
        >>> y = ring_attention(query, key, value, is_causal=True)
        >>> y.shape
        torch.Size([1, 8, 128, 64])
    """
    try:
        op = "ring_attention"
        flags = (is_causal, enable_gqa, deterministic, return_lse)
        if any(type(flag) is not bool for flag in flags):
            raise TypeError  # which check_arguments names
        left, right = _window(op, window_size)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise RuntimeError(
                    f"{op}: {name} must have 4 dimensions, got shape {tuple(tensor.shape)}"
                )
        heads, kv_heads = query.shape[1], key.shape[1]
        if kv_heads not in (heads, 1) and not enable_gqa:
            raise RuntimeError(
                f"{op}: key must have query's {heads} heads without enable_gqa, got {kv_heads}"
            )
        _, size = place(op, group)
        for name, tensor in (("query", query), ("key", key)):
            check_layout(op, name, layout, tensor.shape[2], size)
        query, key, value = _autocast(query, key, value)
        window = (left, 0 if is_causal else right)
        options = score_options(
            query, scale, window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        if rounds(query):
            options["round_factors"] = True
        if dropout_p != 0.0:
            options["dropout_p"] = dropout_p
        output, lse = ring.attention(query, key, value, options, layout, group, deterministic)
        return (output, lse) if return_lse else output
    except Exception:
        check_arguments(ring_attention, locals())
        raise
