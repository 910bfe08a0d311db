"""The functions that transformers' registries call: the masks and the attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import logging

from onepass._ops.differentiation import is_differentiated
from onepass._policy.precision import precision_of
from onepass.functional._internal import masked_attention
from onepass.functional.attention import _is_autocast, varlen_attention
from onepass.functional.attention_decode import attention_with_kv_cache
from onepass.integrations.transformers.cache import Int8Rows
from onepass.swapping.redirection import attend_visibly

NAME = "onepass"

# Queries for which `attention_with_kv_cache` beats the dense operator: for 8 heads on 2 or 8 and 64
# to 8192 keys, float32 and bfloat16, one query takes 0.07 to 0.25 of the time, 8 take 0.25 to 0.7,
# and 16 as long (a loop over both on one thread of a Zen 5).
_FEW_QUERIES = 8
# By model_type. These drop queries after the masks are made, unless the name is "sdpa": without a
# mask they would lose the diagonal.
_DROP_QUERIES = ("gemma4",)
# These models use the mask as a term added to the scores, so it cannot be boolean.
_ADD_MASKS = ("deepseek_v4",)

# One mask serves all layers of a forward. On masks made here: (version, result of _interval).
# Masks made elsewhere are not cached: memory shared with numpy changes without a version.
_FILLED = "_onepass_filled"

logger = logging.get_logger(__name__)


def register() -> None:
    """Adds "onepass" to transformers' registries of attention and of masks. Idempotent.

    Enough for `from_pretrained(..., attn_implementation="onepass")` and `set_attn_implementation`.
    transformers does not check whether a model class supports the name: `attach` does.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from onepass.integrations.transformers import register
        >>> register()
        >>> config._attn_implementation = "onepass"
        >>> LlamaForCausalLM(config)(torch.arange(8)[None]).logits.shape
        torch.Size([1, 8, 64])
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(*args, allow_is_causal_skip: bool = True, config=None, **named) -> Tensor | None:
    """The mask of "sdpa": boolean, or None if `is_causal` is enough.

    A model whose code needs the mask of "eager" gets that one: of floats, or at least not None.
    """
    model_type = "" if config is None else str(config.model_type)
    if model_type.startswith(_ADD_MASKS):
        return eager_mask(*args, config=config, **named)
    if model_type.startswith(_DROP_QUERIES):
        allow_is_causal_skip = False
    mask = sdpa_mask(*args, allow_is_causal_skip=allow_is_causal_skip, config=config, **named)
    if mask is not None and _can_be_looked_at(mask):
        setattr(mask, _FILLED, (None, None))
    return mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    Args:
        module: the caller; its `is_causal` counts if the argument is None, and without that it is
            causal, as with "sdpa". `num_key_value_groups` allows fewer heads of key and value.
        query: shape (batch, heads, seq_q, head_dim).
        key: shape (batch, kv_heads, seq_k, head_dim).
        value: shape (batch, kv_heads, seq_k, value_dim).
        attention_mask: boolean (True attends) or float (added), broadcasts to (batch, heads, seq_q,
            seq_k). Without one a causal module's query i attends to keys up to i; a single query
            attends to all.
        dropout: probability of dropping a weight.
        scaling: of the scores; None is 1 / sqrt(head_dim).
        position_bias: added to the scores, broadcasts like the mask; has a gradient.
        softcap: c turns a score s into c * tanh(s / c).
        s_aux: shape (heads,): sinks, one more score per row, without a value; has a gradient.
        indices: shape (batch, seq_q, selected): the only keys that a query may attend to.
        cu_seq_lens_q, cu_seq_lens_k: shape (sequences + 1,), int32: the first rows of sequences
            packed in a batch of one. Ignored with a mask, which contains them.
        deterministic: as in `onepass.functional.scaled_dot_product_attention`.
        others: ignored: sliding_window and position_ids, which the mask contains, max_length_q and
            max_length_k, and what models pass through (use_cache, labels, ...).

    Returns:
        (Tensor of shape (batch, seq_q, heads, value_dim), contiguous; None, as there are no
        weights).

    Raises:
        ValueError: an argument is one that only another implementation takes: a paged cache,
            block_indices, sinks of each query.
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
    """
    _refuse(others)
    seq_q = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = seq_q > 1 and attention_mask is None and is_causal  # the order matters to Dynamo
    if s_aux is not None and s_aux.dtype not in (torch.float32, query.dtype):
        s_aux = s_aux.float()
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, is_causal, seq_q, key.shape[2])
        is_causal = False
    if is_causal and key.shape[2] > seq_q and cu_seq_lens_q is None:
        # Rows of an empty static cache; or those that a layer appended a second time as a
        # checkpoint recomputed it, which compares shapes. The diagonal rules them out.
        key, value = key[:, :, :seq_q], value[:, :, :seq_q]
        if position_bias is not None:
            position_bias = position_bias[..., :seq_q]
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    options = {"softcap": softcap or 0.0, "sinks": s_aux}
    if cu_seq_lens_q is not None and attention_mask is None:
        options.update(dropout_p=dropout, scale=scaling, is_causal=is_causal)
        options["deterministic"] = bool(deterministic)
        options["precision"] = precision_of(module)
        _check_packed(query, key, value, cu_seq_lens_k, position_bias)
        return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, others, options), None
    plain = position_bias is None and not is_causal and not dropout
    if plain and _is_for_cache(query, key, value, s_aux):
        filled = _filled(attention_mask, query.shape[0], seq_q, key.shape[2])
        if filled is not None:
            if isinstance(key, Int8Rows):
                options.update(k_scale=key.scale, v_scale=value.scale)
                key, value = key.codes, value.codes
            output = attention_with_kv_cache(query, key, value, scale=scaling, **filled, **options)
            return output.transpose(1, 2).contiguous(), None
    if isinstance(key, Int8Rows):
        key, value = key.numbers(), value.numbers()
    options["deterministic"] = bool(deterministic)
    options["precision"] = precision_of(module)
    if position_bias is not None:
        output = _with_position_bias(
            query, key, value, position_bias, attention_mask, is_causal, dropout, scaling, grouped,
            **options,
        )  # fmt: skip
    else:
        batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
        shared = attention_mask is None or attention_mask.shape[1:-1] == (1, 1)
        if grouped and seq_q == 1 and s_aux is None and shared:
            # Heads that share keys become rows: a tile of them costs as much as a single row.
            query = query.reshape(batch, kv_heads, heads // kv_heads, query.shape[3])
        output = attend_visibly(
            query, key, value, attention_mask, dropout, is_causal, scaling, grouped, **options
        )
        if query.shape[1] != heads:
            output = output.reshape(output.shape[0], heads, 1, output.shape[3])
    return output.transpose(1, 2).contiguous(), None


def _refuse(others: dict) -> None:
    """Arguments that would change the result and cannot be computed here."""
    if others.get("output_attentions"):
        logger.warning_once(
            "onepass computes no matrix of attention weights: output_attentions=True gives None. "
            "Set the attention to `eager` to get one."
        )
    for name, why in _REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(
                f"onepass.integrations.transformers: {name} must be None, {why}, got "
                f"{type(others[name]).__name__}"
            )


_REFUSED = {
    "cache": "as transformers makes the masks of paged caches for its own implementations alone",
    "block_indices": "as blocks of selected keys are for sparse kernels",
    "sinks": "as sinks of each query are for eager attention; s_aux holds one for each head",
}


def _selected(
    indices: Tensor, mask: Tensor | None, is_causal: bool, seq_q: int, seq_k: int
) -> Tensor:
    """The mask without the keys that an indexer did not select, shape (batch, 1, seq_q, seq_k)."""
    kept = indices.new_zeros((*indices.shape[:2], seq_k), dtype=torch.bool)
    kept = kept.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return kept.tril() if is_causal else kept
    if mask.dtype is torch.bool:
        return mask & kept
    return mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


def _with_position_bias(
    query, key, value, bias, mask, is_causal, dropout, scaling, grouped, **options
) -> Tensor:
    plain = not (grouped or options["softcap"] or options["sinks"] is not None)
    if mask is not None and mask.dtype is torch.bool:
        if plain and query.shape[:2] == key.shape[:2] == value.shape[:2]:
            return masked_attention(
                query, key, value, bias=bias, mask=mask, dropout_p=dropout, is_causal=False,
                scale=scaling, precision=options["precision"],
            )  # fmt: skip
        bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
    elif mask is not None:
        bias = bias + mask
    return attend_visibly(query, key, value, bias, dropout, is_causal, scaling, grouped, **options)


def _check_packed(query, key, value, cu_seq_k, position_bias) -> None:
    batches = {tensor.shape[0] for tensor in (query, key, value)}
    if batches != {1} or cu_seq_k is None or position_bias is not None:
        got = [f"a batch of {max(batches)}"]
        got += ["no cu_seq_lens_k"] * (cu_seq_k is None)
        got += ["a position_bias"] * (position_bias is not None)
        raise ValueError(
            "onepass.integrations.transformers: cu_seq_lens_q must come with cu_seq_lens_k and a "
            f"batch of one, without position_bias, got {', '.join(got)}"
        )


def _packed(query, key, value, cu_seq_q, cu_seq_k, others: dict, options: dict) -> Tensor:
    longest = [others.get("max_length_q"), others.get("max_length_k")]
    longest = [
        given if isinstance(given, int) else tensor.shape[2]
        for given, tensor in zip(longest, (query, key), strict=True)
    ]
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attention(
        *rows, cu_seq_q.int(), cu_seq_k.int(), *longest, enable_gqa=True, **options
    )
    return output.unsqueeze(0).contiguous()


def _is_for_cache(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    """Whether a call without diagonal and dropout goes to the operator of KV caches, by shapes,
    dtypes and gradients."""
    return (
        query.shape[2] <= _FEW_QUERIES
        and query.dtype is key.dtype is value.dtype
        and query.dtype is not torch.float64
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and not _is_autocast(query)
        and not is_differentiated(query, key, value, sinks)
    )


def _filled(mask: Tensor | None, batch: int, seq_q: int, seq_k: int) -> dict[str, Tensor] | None:
    """The mask as a range of rows of each cache; None if it is no such mask.

    Padding on the left, a static cache and a window give a single query such masks. A mask on a
    device is not read, since that would wait for the device, nor one that is being traced.
    """
    if mask is None:
        return {}
    if seq_q != 1 or mask.dtype is not torch.bool or mask.shape != (batch, 1, 1, seq_k):
        return None
    if not mask.is_cpu or not _can_be_looked_at(mask):
        return None
    version = None if mask.is_inference() else mask._version
    known, filled = getattr(mask, _FILLED, (None, None))
    if version is None or known != version:
        filled = _interval(mask[:, 0, 0])
        if version is not None and hasattr(mask, _FILLED):
            setattr(mask, _FILLED, (version, filled))
    return filled


def _can_be_looked_at(tensor: Tensor) -> bool:
    """Whether its values can be read: it is not traced, faked or vmapped."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or type(tensor) is not Tensor
        or torch._C._are_functorch_transforms_active()
    )


def _interval(mask: Tensor) -> dict[str, Tensor] | None:
    """The first and last True of each row of (batch, seq_k); None if there are gaps."""
    seq_k = mask.shape[1]
    if not seq_k:
        return None
    numbers = mask.to(torch.uint8)
    count = numbers.sum(-1)
    first = numbers.argmax(-1)
    end = seq_k - numbers.flip(-1).argmax(-1)
    if not bool(((end - first == count) | (count == 0)).all()):
        return None
    end = torch.where(count == 0, first, end)
    return {"cache_leftpad": first.int(), "cache_seqlens": end.int()}
