"""The ops that read a KV cache: fakes, and one entry for both, `attention_decode`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass._compiling import require_fixed_offsets
from onepass._ops.attention_layout import empty_rows, is_bshd
from onepass._ops.dispatch_log import logged

_decode = torch.ops.onepass.attention_decode.default
_decode_check = torch.ops.onepass.attention_decode_check.default
_append = torch.ops.onepass.attention_decode_append.default
_append_check = torch.ops.onepass.attention_decode_append_check.default


@logged
def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    cache_seqlens: Tensor | int | None,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of the raw ops, whose arguments these are: of the one that appends if there is
    a key, which is then written into the caches.

    `cache_seqlens` may be one number for all sequences; `scale` None is 1 / sqrt(head_dim);
    `window` is (window_left, window_right).
    """
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    # Only what is not the default: every keyword costs the dispatcher a look.
    options: dict[str, object] = {"scale": scale}
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
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        options["sinks"] = sinks
    if window[0] != -1:
        options["window_left"] = window[0]
    if window[1] != -1:
        options["window_right"] = window[1]
    if softcap:
        options["softcap"] = softcap
    if num_splits:
        options["num_splits"] = num_splits
    if is_bshd(query):
        options["out_bshd"] = True
    if key is None:
        return _decode(query, k_cache, v_cache, **options)
    if rotary_cos is not None:
        options["rotary_cos"] = rotary_cos
    if rotary_sin is not None:
        options["rotary_sin"] = rotary_sin
    if not rotary_interleaved:
        options["rotary_interleaved"] = False
    results = _append(query, k_cache, v_cache, key, value, **options)
    if not torch.compiler.is_compiling():  # which does it by itself
        for cache in (k_cache, v_cache):
            if not cache.is_inference():  # those have no version
                torch.autograd.graph.increment_version(cache)
    return results


@torch.library.register_fake("onepass::attention_decode")
def _(query, k_cache, v_cache, **options):
    if type(query) in (Tensor, Parameter):  # a meta tensor, whose sizes are numbers
        _decode_check(query, k_cache, v_cache, **options)
    return _results(query, v_cache, options)


@torch.library.register_fake("onepass::attention_decode_append")
def _(query, k_cache, v_cache, key, value, **options):
    if type(query) in (Tensor, Parameter):
        _append_check(query, k_cache, v_cache, key, value, **options)
    else:
        require_fixed_offsets("attention_decode_append", k_cache=k_cache, v_cache=v_cache)
    return _results(query, v_cache, options)


def _results(query: Tensor, v_cache: Tensor, options: dict[str, object]) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:-1], v_cache.shape[-1])
    output = empty_rows(query, shape, query.dtype, options.get("out_bshd"))
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)
