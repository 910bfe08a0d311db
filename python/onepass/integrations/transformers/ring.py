"""Ring attention by transformers' registry: a model whose sequence is on several processes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from onepass.distributed import ring_attention
from onepass.distributed.sequence import LAYOUTS, chunks, place
from onepass.integrations.transformers.attention import _refuse

RING = "onepass_ring"
_OP = "onepass.integrations.transformers.register_ring"
_CHECKED = "_onepass_positions"  # on position ids: the (rank, size, layout) that they fit
_ABSENT = object()


def register_ring(
    group: dist.ProcessGroup | None = None, *, layout: str = "zigzag", name: str = RING
) -> str:
    """Adds `onepass.distributed.ring_attention` to transformers' registries, under a name.

    `model.set_attn_implementation("onepass_ring")` then makes a model attend to the whole sequence
    from each process's part of it. Every process calls the model with its part of `input_ids`, of
    `position_ids`, which are those of the whole sequence, and of labels that were shifted before
    (`shift_labels`); see `onepass.distributed.shard_sequence`. The loss is a mean over its own
    tokens, and gradients are those of its own tokens: average both.

    Causal and bidirectional attention, sliding windows, softcaps, sinks, dropout and grouped heads
    are computed. Everything else that a mask may say is refused: padding, packed sequences, chunks,
    prefixes that see each other; and so are KV caches (`use_cache=False`).

    Args:
        group: the processes; None is torch's default group.
        layout: the part of each process, as in `shard_sequence`.
        name: of the entry, for more than one group or layout.

    Returns:
        The name.

    Raises:
        ValueError: layout is unknown; or, in a model's forward, an option is refused, or its
            `position_ids` are not those of this process's part.

    Examples:
        >>> from onepass.integrations.transformers import register_ring
        >>> register_ring()
        'onepass_ring'
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{_OP}: layout must be 'zigzag' or 'contiguous', got {layout!r}")
    options = {"group": group, "layout": layout}
    AttentionInterface.register(name, functools.partial(ring_forward, **options))
    AttentionMaskInterface.register(name, functools.partial(ring_mask, **options))
    return name


def ring_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config=None,
    group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    **_,
) -> None:
    """No mask: positions are enough. Raises ValueError for a mask with more information."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"{_OP}: attention_mask must mask nothing, got one with padding")
    if kv_length != q_length or q_offset != 0:
        raise ValueError(f"{_OP}: use_cache must be False, got keys of a cache")
    if use_vmap or getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(f"{_OP}: a mask must be causal, with a window or full, got another")
    if mask_function is None or q_length == 0:
        return None
    # Of local rows: those at the edges of the pieces. Positions that jump between two pieces look
    # like two packed sequences to transformers, which cut the mask there.
    half = q_length // 2
    _, size = place(_OP, group)
    rows = sorted({0, min(1, q_length - 1), max(half - 1, 0), half, q_length - 1})
    query = torch.tensor(rows, device="cpu")[None, None, :, None]
    key = torch.arange(kv_length, device="cpu")[None, None, None]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device="cpu")
    given = mask_function(zero, zero, query, key).expand(1, 1, len(rows), kv_length)
    causal = key <= query
    if local_size is not None:
        causal = causal & (key > query - local_size)
    allowed = [causal] if local_size is not None else [causal, torch.ones_like(causal)]
    if layout == "zigzag" and size > 1:
        allowed += [mask & ((key < half) == (query < half)) for mask in allowed]
    if not any(torch.equal(given, mask) for mask in allowed):
        raise ValueError(f"{_OP}: a mask must be causal, with a window or full, got another")
    return None


def ring_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window=_ABSENT,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    deterministic: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    **others,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it: this process's queries, the keys of all processes.

    Arguments and result are those of `onepass.integrations.transformers.attention`'s.
    """
    _refuse(others)
    for name in ("position_bias", "indices", "cu_seq_lens_q"):
        if others.get(name) is not None:
            raise ValueError(f"{_OP}: {name} must be None, got {type(others[name]).__name__}")
    if attention_mask is not None:
        got = tuple(attention_mask.shape)
        raise ValueError(f"{_OP}: attention_mask must be None, got one of shape {got}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{_OP}: use_cache must be False, got keys of a cache")
    if sliding_window is _ABSENT:
        sliding_window = None
        if getattr(getattr(module, "config", None), "sliding_window", None) is not None:
            raise ValueError(
                f"{_OP}: {type(module).__name__} must pass its sliding_window, got none"
            )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if sliding_window is not None and not is_causal:
        raise ValueError(f"{_OP}: sliding_window must come with causal attention, got full")
    if position_ids is not None and position_ids.dim() == 2:
        _check_positions(position_ids, query.shape[2], group, layout)
    if s_aux is not None and s_aux.dtype not in (torch.float32, query.dtype):
        s_aux = s_aux.float()
    output = ring_attention(
        query, key, value, group, layout=layout, dropout_p=dropout, is_causal=bool(is_causal),
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, -1),
        softcap=softcap or 0.0, sinks=s_aux, deterministic=bool(deterministic),
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def _check_positions(
    position_ids: Tensor, rows: int, group: dist.ProcessGroup | None, layout: str
) -> None:
    """Checks positions, once for all layers of a forward: on a device that waits."""
    rank, size = place(_OP, group)
    if getattr(position_ids, _CHECKED, None) == (rank, size, layout):
        return
    pieces = chunks(rank, size, rows, layout)
    expected = [
        torch.arange(c.position, c.position + c.end - c.begin, device="cpu") for c in pieces
    ]
    if not bool((position_ids.cpu() == torch.cat(expected)).all()):
        raise ValueError(
            f"{_OP}: position_ids must be those of this process's part, "
            f"shard_sequence(torch.arange({size * rows}), 0, layout={layout!r}) for each row, got "
            "others"
        )
    setattr(position_ids, _CHECKED, (rank, size, layout))
