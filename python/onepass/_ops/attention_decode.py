"""The ops that read a KV cache: fakes, and one entry for both, `attention_decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._compiling import require_fixed_offsets
from onepass._mapping import refuse_mapped, run_each
from onepass._negative import refuse_where_written
from onepass._ops import fake_checks
from onepass._ops.attention_layout import empty_rows
from onepass._ops.attention_options import Options
from onepass._ops.dispatch_log import logged
from onepass._ops.placement import placed

_decode = torch.ops.onepass.attention_decode.default
_decode_check = torch.ops.onepass.attention_decode_check.default
_append = torch.ops.onepass.attention_decode_append.default
_append_check = torch.ops.onepass.attention_decode_append_check.default

refuse_where_written(_append)
refuse_mapped(_append)
run_each(_decode_check)
run_each(_append_check)


@logged
@placed
def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(output, lse) of a raw op with the keywords `options`. With a key it is the op that appends:
    key and value are written into the caches.
    """
    if key is None:
        return _decode(query, k_cache, v_cache, **options)
    results = _append(query, k_cache, v_cache, key, value, **options)
    if not torch.compiler.is_compiling():  # a compiler does it by itself
        for cache in (k_cache, v_cache):
            if not cache.is_inference():  # inference tensors have no version
                torch.autograd.graph.increment_version(cache)
    return results


@torch.library.register_fake("onepass::attention_decode")
def _(query, k_cache, v_cache, **options):
    fake_checks.check(_decode_check, query, k_cache, v_cache, **options)
    return _results(query, v_cache, options)


@torch.library.register_fake("onepass::attention_decode_append")
def _(query, k_cache, v_cache, key, value, **options):
    fake_checks.check(_append_check, query, k_cache, v_cache, key, value, **options)
    require_fixed_offsets("attention_decode_append", k_cache=k_cache, v_cache=v_cache)
    return _results(query, v_cache, options)


def _results(query: Tensor, v_cache: Tensor, options: dict[str, object]) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:-1], v_cache.shape[-1])
    output = empty_rows(query, shape, query.dtype, options.get("out_bshd"))
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)
