"""Attention and decoding."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from onepass import functional
from onepass.reference.attention_decode import quantize_rows
from tests.support.calls.call import RAW, Call, flat, ints, public, randn, raw

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 5, 7, 8
PAGES, PAGE = 6, 4


def _dense():
    return {
        "query": randn(BATCH, HEADS, ROWS, DIM), "key": randn(BATCH, KV_HEADS, KEYS, DIM),
        "value": randn(BATCH, KV_HEADS, KEYS, DIM, seed=1),
    }  # fmt: skip


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


def _terms():
    """The terms that are added to scores, and the mask."""
    return {
        "bias": randn(1, HEADS, ROWS, KEYS, seed=4),
        "mask": randn(BATCH, 1, ROWS, KEYS, seed=5) > -1,
        "alibi_slopes": randn(HEADS, seed=6).abs(),
        "sinks": randn(HEADS, seed=7),
    }


def _attention():
    terms = ("alibi_slopes", "sinks")

    def stock(query, key, value, attn_mask):
        return [F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)]

    def with_terms():
        found = _terms()
        return _dense() | {"attn_mask": found["bias"]} | {name: found[name] for name in terms}

    def masked():
        return _dense() | {"attn_mask": _terms()["mask"]}

    sdpa, of = "scaled_dot_product_attention", {"differentiable": True}
    options = {"dropout_p": 0.2, "enable_gqa": True, "return_lse": True}
    optional = ("attn_mask", *terms)
    yield public(sdpa, with_terms, " with options", options=options, optional=optional, **of)
    yield public(sdpa, masked, "", stock, {"enable_gqa": True}, optional=("attn_mask",), **of)

    def packed_terms():
        return _packed() | {name: _terms()[name] for name in terms}

    lengths = {"max_q": 3, "max_k": 6, "cu_seq_k": None, "enable_gqa": True, "return_lse": True}
    yield public("varlen_attention", packed_terms, options=lengths, optional=terms, **of)
    yield public("varlen_attention", _paged, " paged", options=lengths, optional=("block_table",))

    everything = (*_terms(), "cu_seq_k", "seqused_k", "block_table")

    def raw_dense():
        lengths = {"seqused_k": ints(6, 7), "seed": torch.tensor([3, 4])}
        return _dense() | _terms() | lengths

    def raw_blocks():
        tiles = randn(3, 3, 4, seed=8) > -1
        return _dense() | {"mask": tiles, "block_mask": ints([[[0, 1], [1, 1]]])}

    long, of = {"max_q": 3, "max_k": 6}, {"scale": 0.3, "optional": everything}
    yield from raw("attention_forward", raw_dense, dropout_p=0.2, **of)
    yield from raw("attention_forward", _packed, " packed", **long, **of)
    yield from raw("attention_forward", _paged, " paged", **long, **of)
    yield from raw("attention_forward", raw_blocks, " of blocks", scale=0.3)

    def backward_tensors(own, **options):
        results = RAW.attention_forward(**own, scale=0.3, **options)
        own |= dict(zip(("output", "lse", "lse_rest"), results, strict=True))
        upstream = {"doutput": randn(*own["query"].shape), "dlse": randn(*own["lse"].shape)}
        return upstream | own

    upstream = ("doutput", "dlse", "lse_rest")
    for text, make, more, options in (
        ("", raw_dense, everything, {"dropout_p": 0.2}),
        (" packed", _packed, everything, long),
        (" of blocks", raw_blocks, (), {}),
    ):

        def saved(make=make, options=options):
            return backward_tensors(make(), **options)

        grad_mask = 7 + 8 * (make is raw_dense)  # which has a bias
        yield from raw("attention_backward", saved, text, optional=(*upstream, *more), scale=0.3,
                       grad_mask=grad_mask, **options)  # fmt: skip

    def merge_tensors():
        parts, rows = (2, BATCH, HEADS, ROWS), {}
        return rows | {"outputs": randn(*parts, DIM), "lses": randn(*parts)}

    def merge(outputs, lses):
        return flat(functional.merge_attention_states(outputs, lses))

    name, of = "functional.merge_attention_states", {"differentiable": True, "composed": True}
    yield Call(name, merge_tensors, merge, **of)


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

    def coded(new=True):
        own = cached(new)
        for name in ("k", "v"):
            codes, scale = quantize_rows(own[f"{name}_cache"])
            own |= {f"{name}_cache": codes, f"{name}_scale": scale}
        return own

    optional = ("cache_seqlens", "block_table", *extras(), *rotary())
    caches = ("k_cache", "v_cache")
    scaled = {"written": (*caches, "k_scale", "v_scale")}

    def with_rotary():
        return cached() | rotary()

    name, lse = "attention_with_kv_cache", {"options": {"return_lse": True}}
    of = {"written": caches, "optional": (*optional, "key", "value"), **lse}
    yield public(name, with_rotary, **of)
    yield public(name, paged, " paged", **of)
    yield public(name, coded, " codes", **of | scaled)
    yield public(name, lambda: cached(False), " reading", optional=optional, **lse)

    of = {"scale": 0.3, "optional": optional}
    yield from raw("attention_decode", lambda: cached(False), **of)
    yield from raw("attention_decode", lambda: paged(False), " paged", **of)
    yield from raw("attention_decode", lambda: coded(False), " codes", **of)
    yield from raw("attention_decode_append", coded, " codes", **of | scaled)
    yield from raw("attention_decode_append", with_rotary, written=caches, **of)
    yield from raw("attention_decode_append", paged, " paged", written=caches, **of)


def calls() -> Iterator[Call]:
    yield from _attention()
    yield from _decoding()
