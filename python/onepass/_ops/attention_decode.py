"""The operators that read a KV cache, and one entry for both, `attention_decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._compiling import require_fixed_offsets
from onepass._memory_order import empty_rows
from onepass._ops.differentiation import count_change
from onepass._ops.entry import entry
from onepass._ops.operator import Raw


def _results(query, v_cache, out_bshd):
    shape = (*query.shape[:-1], v_cache.shape[-1])
    output = empty_rows(query, shape, query.dtype, out_bshd)
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _results_of_append(query, k_cache, v_cache, k_scale, v_scale, out_bshd):
    scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    require_fixed_offsets("attention_decode_append", k_cache=k_cache, v_cache=v_cache, **scales)
    return _results(query, v_cache, out_bshd)


_decode = Raw("attention_decode", _results)
DEFAULTS = _decode.defaults
_append = Raw("attention_decode_append", _results_of_append).op


@entry
def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    options: dict[str, object],
) -> tuple[Tensor, Tensor]:
    """(output, lse) of a raw op with the keywords `options`. With a key it is the op that appends:
    key and value are written into the caches, and their scales into `k_scale` and `v_scale`.
    """
    if key is None:
        return _decode.op(query, k_cache, v_cache, **options)
    results = _append(query, k_cache, v_cache, key, value, **options)
    scales = [options[name] for name in ("k_scale", "v_scale") if name in options]
    count_change(k_cache, v_cache, *scales)
    return results
