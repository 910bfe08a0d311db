"""Attention and decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from tests.support.calls.call import RAW, Call, flat, ints, randn

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 5, 7, 8
PAGES, PAGE = 6, 4


# ---- attention -----------------------------------------------------------------------------------


def _dense():
    return {
        "query": randn(BATCH, HEADS, ROWS, DIM),
        "key": randn(BATCH, KV_HEADS, KEYS, DIM),
        "value": randn(BATCH, KV_HEADS, KEYS, DIM, seed=1),
    }


def _packed():
    return {
        "query": randn(ROWS, HEADS, DIM),
        "key": randn(KEYS, KV_HEADS, DIM),
        "value": randn(KEYS, KV_HEADS, DIM, seed=1),
        "cu_seq_q": ints(0, 2, ROWS),
        "cu_seq_k": ints(0, 3, KEYS),
    }


def _paged():
    own = _packed()
    del own["cu_seq_k"]
    own["key"] = randn(PAGES, PAGE, KV_HEADS, DIM)
    own["value"] = randn(PAGES, PAGE, KV_HEADS, DIM, seed=1)
    tables = {"block_table": ints([1, 4], [0, 2]), "seqused_k": ints(3, 6)}
    return own | tables


def _terms(dims=4):
    """The terms that are added to scores, and the mask."""
    return {
        "bias": randn(1, HEADS, ROWS, KEYS, seed=4),
        "mask": randn(BATCH, 1, ROWS, KEYS, seed=5) > -1,
        "alibi_slopes": randn(HEADS, seed=6).abs(),
        "sinks": randn(HEADS, seed=7),
    }


def _attention():
    terms = ("alibi_slopes", "sinks")

    def dense(query, key, value, attn_mask, alibi_slopes, sinks):
        return flat(
            functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                0.2,
                enable_gqa=True,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                return_lse=True,
            )  # fmt: skip
        )

    def plain(query, key, value, attn_mask):
        sdpa = functional.scaled_dot_product_attention
        return [sdpa(query, key, value, attn_mask, enable_gqa=True)]

    def stock(query, key, value, attn_mask):
        return [F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)]

    def with_terms():
        found = _terms()
        return _dense() | {"attn_mask": found["bias"]} | {name: found[name] for name in terms}

    def masked():
        return _dense() | {"attn_mask": _terms()["mask"]}

    sdpa = "functional.scaled_dot_product_attention"
    optional = ("attn_mask", *terms)
    yield Call(f"{sdpa} with options", with_terms, dense, optional=optional, differentiable=True)
    yield Call(sdpa, masked, plain, stock, optional=("attn_mask",), differentiable=True)

    def varlen(query, key, value, cu_seq_q, cu_seq_k=None, **options):
        lengths = (cu_seq_q, cu_seq_k, 3, 6)
        more = {"enable_gqa": True, "return_lse": True, **options}
        return flat(functional.varlen_attention(query, key, value, *lengths, **more))

    def packed_terms():
        return _packed() | {name: _terms()[name] for name in terms}

    yield Call(
        "functional.varlen_attention", packed_terms, varlen, optional=terms, differentiable=True
    )
    yield Call("functional.varlen_attention paged", _paged, varlen, optional=("block_table",))

    def raw(op, **options):
        def run(query, key, value, **tensors):
            return flat(op(query, key, value, **tensors, scale=0.3, **options))

        return run

    everything = (*_terms(), "cu_seq_k", "seqused_k", "block_table")

    def raw_dense():
        lengths = {"seqused_k": ints(6, 7), "seed": torch.tensor([3, 4])}
        return _dense() | _terms() | lengths

    def raw_blocks():
        tiles = randn(3, 3, 4, seed=8) > -1
        return _dense() | {"mask": tiles, "block_mask": ints([[[0, 1], [1, 1]]])}

    for name in ("attention_forward", "attention_forward_check"):
        op, long = getattr(RAW, name), {"max_q": 3, "max_k": 6}
        yield Call(f"ops.{name}", raw_dense, raw(op, dropout_p=0.2), optional=everything)
        yield Call(f"ops.{name} packed", _packed, raw(op, **long), optional=everything)
        yield Call(f"ops.{name} paged", _paged, raw(op, **long), optional=everything)
        yield Call(f"ops.{name} of blocks", raw_blocks, raw(op))

    def backward_tensors(own, **options):
        results = RAW.attention_forward(**own, scale=0.3, **options)
        own |= dict(zip(("output", "lse", "lse_rest"), results, strict=True))
        upstream = {"doutput": randn(*own["query"].shape), "dlse": randn(*own["lse"].shape)}
        return upstream | own

    def backward(op, **more):
        def run(doutput, dlse, query, key, value, output, lse, lse_rest, **tensors):
            saved = (doutput, dlse, query, key, value, output, lse, lse_rest)
            grad_mask = 7 + 8 * (tensors.get("bias") is not None)
            return flat(op(*saved, **tensors, **more, grad_mask=grad_mask, scale=0.3))

        return run

    def dense_saved():
        return backward_tensors(raw_dense(), dropout_p=0.2)

    def packed_saved():
        return backward_tensors(_packed(), max_q=3, max_k=6)

    def blocks_saved():
        return backward_tensors(raw_blocks())

    upstream = ("doutput", "dlse", "lse_rest")
    optional = (*upstream, *everything)
    for name in ("attention_backward", "attention_backward_check"):
        op = getattr(RAW, name)
        yield Call(f"ops.{name}", dense_saved, backward(op, dropout_p=0.2), optional=optional)
        yield Call(f"ops.{name} packed", packed_saved, backward(op, **long), optional=optional)
        yield Call(f"ops.{name} of blocks", blocks_saved, backward(op), optional=upstream)

    def merge_tensors():
        parts, rows = (2, BATCH, HEADS, ROWS), {}
        return rows | {"outputs": randn(*parts, DIM), "lses": randn(*parts)}

    def merge(outputs, lses):
        return flat(functional.merge_attention_states(outputs, lses))

    yield Call(
        "functional.merge_attention_states",
        merge_tensors,
        merge,
        differentiable=True,
        composed=True,
    )


# ---- decoding ------------------------------------------------------------------------------------


def _decoding():
    def cached(new=True):
        own = {
            "query": randn(BATCH, HEADS, 1, DIM),
            "k_cache": randn(BATCH, KV_HEADS, KEYS, DIM),
            "v_cache": randn(BATCH, KV_HEADS, KEYS, DIM, seed=1),
        }
        if new:
            own["key"] = randn(BATCH, KV_HEADS, 1, DIM, seed=2)
            own["value"] = randn(BATCH, KV_HEADS, 1, DIM, seed=3)
        return own | {"cache_seqlens": ints(3, 5), **extras()}

    def extras():
        return {
            "cache_leftpad": ints(0, 1),
            "cache_batch_idx": ints(1, 0),
            "alibi_slopes": randn(HEADS, seed=6).abs(),
            "sinks": randn(HEADS, seed=7),
        }

    def rotary():
        return {"rotary_cos": randn(KEYS + 1, DIM // 2), "rotary_sin": randn(KEYS + 1, DIM // 2)}

    def paged(new=True):
        own = cached(new)
        del own["cache_batch_idx"], own["cache_leftpad"]
        own["k_cache"] = randn(PAGES, PAGE, KV_HEADS, DIM)
        own["v_cache"] = randn(PAGES, PAGE, KV_HEADS, DIM, seed=1)
        return own | {"block_table": ints([1, 4], [0, 2])}

    optional = ("cache_seqlens", "block_table", *extras(), *rotary())
    caches = ("k_cache", "v_cache")

    def public(query, k_cache, v_cache, key=None, value=None, **tensors):
        decode = functional.attention_with_kv_cache
        return flat(decode(query, k_cache, v_cache, key, value, return_lse=True, **tensors))

    def with_rotary():
        return cached() | rotary()

    name = "functional.attention_with_kv_cache"
    yield Call(name, with_rotary, public, written=caches, optional=(*optional, "key", "value"))
    yield Call(f"{name} paged", paged, public, written=caches, optional=(*optional, "key", "value"))
    yield Call(f"{name} reading", lambda: cached(False), public, optional=optional)

    def raw(op):
        def run(query, k_cache, v_cache, *new, **tensors):
            new = [tensors.pop(name) for name in ("key", "value") if name in tensors]
            return flat(op(query, k_cache, v_cache, *new, **tensors, scale=0.3))

        return run

    for name, op in ((n, getattr(RAW, n)) for n in ("attention_decode", "attention_decode_check")):
        yield Call(f"ops.{name}", lambda: cached(False), raw(op), optional=optional)
        yield Call(f"ops.{name} paged", lambda: paged(False), raw(op), optional=optional)
    for name in ("attention_decode_append", "attention_decode_append_check"):
        of = {"optional": optional, "written": () if name.endswith("check") else caches}
        yield Call(f"ops.{name}", with_rotary, raw(getattr(RAW, name)), **of)
        yield Call(f"ops.{name} paged", paged, raw(getattr(RAW, name)), **of)


def calls() -> Iterator[Call]:
    yield from _attention()
    yield from _decoding()
