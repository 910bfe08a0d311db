"""flash_attn's names against their documented meaning, by the reference in plain torch."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from onepass import functional, numerics
from onepass.integrations import flash_attn
from onepass.reference.attention import attention as formula
from tests.support.dtypes import BF16, F16, F32, F64

OPTIONS = {
    "plain": {}, "causal": dict(causal=True), "window": dict(window_size=(5, 3)),
    "causal window": dict(causal=True, window_size=(9, -1)),
    "softcap": dict(causal=True, softcap=2.0, softmax_scale=0.7),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "alibi of batches": dict(alibi_slopes=torch.arange(8.0).reshape(2, 4) / 16),
}  # fmt: skip


def definition(
    q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, packed=(None, None), **options
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) by the reference; `packed`: where sequences begin."""
    left, right = window_size
    if packed[0] is None:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    output, lse = formula(
        q, k, v, window_left=left, window_right=0 if causal else right, scale=softmax_scale,
        bottom_right=True, cu_seq_q=packed[0], cu_seq_k=packed[1], **options,
    )  # fmt: skip
    return output if packed[0] is not None else output.transpose(1, 2), lse


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...], draw: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(function, tensors, upstream) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    output, lse = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return [output.detach(), lse.detach(), *gradients]


def check(function, stock, *shapes: tuple[int, ...]) -> None:
    """`function` against its definition, in float64, so that only a wrong meaning shows; the last
    shape is that of the output. The precision of other dtypes is tested with attention."""
    *tensors, upstream = drawn(F64, *shapes)
    results = with_gradients(function, tensors, upstream)
    expected = with_gradients(stock, tensors, upstream)
    assert [t.shape for t in results] == [t.shape for t in expected]
    for result, ref in zip(results, expected, strict=True):
        numerics.assert_close(result, ref, ref)


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("seq", [(33, 33), (17, 40), (1, 65)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name, seq):
    options = OPTIONS[name]

    def function(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]

    check(
        function,
        lambda q, k, v: definition(q, k, v, **options),
        *((2, seq[0], 4, 16), (2, seq[1], 2, 16), (2, seq[1], 2, 24), (2, seq[0], 4, 24)),
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dense_is_our_own_function(dtype):
    q, k, v = drawn(dtype, (2, 17, 4, 16), (2, 40, 2, 16), (2, 40, 2, 24))
    output, lse, nothing = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(output, flash_attn.flash_attn_func(q, k, v, causal=True))
    assert output.dtype == dtype and lse.dtype == F32 and nothing.numel() == 0
    assert output.is_contiguous()  # a reshape to (batch, seq, heads * dim) copies nothing
    own = functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True,
        causal_alignment="bottom_right", return_lse=True,
    )  # fmt: skip
    assert torch.equal(output, own[0].transpose(1, 2)) and torch.equal(lse, own[1])


@pytest.mark.parametrize("name", ["causal window", "alibi"])
def test_packed_tensors(name):
    options = OPTIONS[name]
    q, kv, qkv, upstream = drawn(
        F32, (2, 20, 4, 16), (2, 31, 2, 4, 16), (2, 20, 3, 4, 16), (2, 20, 4, 16)
    )
    for apart, together, packed in (
        ((q, *kv.unbind(2)), flash_attn.flash_attn_kvpacked_func, (q, kv)),
        (qkv.unbind(2), flash_attn.flash_attn_qkvpacked_func, (qkv,)),
    ):
        runs = []
        for function, tensors in ((flash_attn.flash_attn_func, apart), (together, packed)):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            output = function(*leaves, **options)
            gradients = torch.autograd.grad(output, leaves, upstream)
            runs.append((output, gradients))
        (expected, each), (output, gradients) = runs
        assert torch.equal(output, expected)
        packed_gradient = torch.stack(each[-2:], 2) if len(packed) == 2 else torch.stack(each, 2)
        assert torch.equal(gradients[-1], packed_gradient)


LENGTHS_Q, LENGTHS_K = (7, 1, 0, 20), (9, 30, 4, 15)


def bounds(lengths) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_one_behind_the_other(name):
    packed, options = (bounds(LENGTHS_Q), bounds(LENGTHS_K)), dict(OPTIONS[name])
    if name == "alibi of batches":
        options["alibi_slopes"] = torch.arange(16.0).reshape(4, 4) / 16

    def function(q, k, v):
        return flash_attn.flash_attn_varlen_func(
            q, k, v, *packed, 20, 30, return_attn_probs=True, **options
        )[:2]

    def stock(q, k, v):
        return definition(q, k, v, packed=packed, **options)

    check(function, stock, (28, 4, 16), (58, 2, 16), (58, 2, 16), (28, 4, 16))


def test_packed_tensors_of_sequences():
    cu_q, cu_k = bounds(LENGTHS_Q), bounds(LENGTHS_K)
    q, kv, qkv = drawn(F32, (28, 4, 16), (58, 2, 4, 16), (28, 3, 4, 16))
    function, options = flash_attn.flash_attn_varlen_func, dict(causal=True)
    apart = function(q, *kv.unbind(1), cu_q, cu_k, 20, 30, **options)
    together = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 20, 30, **options)
    assert torch.equal(apart, together)
    apart = function(*qkv.unbind(1), cu_q, cu_q, 20, 20, **options)
    together = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 20, **options)
    assert torch.equal(apart, together)


def test_sequences_in_pages():
    cu_q, cu_k = bounds(LENGTHS_Q), bounds(LENGTHS_K)
    q, k, v = drawn(F32, (28, 4, 16), (58, 2, 16), (58, 2, 16))
    pages = [-(-length // 8) for length in LENGTHS_K]
    table = torch.zeros(4, max(pages), dtype=torch.int32)
    stores = [torch.full((sum(pages), 8, 2, 16), math.nan) for _ in range(2)]
    free = iter(reversed(range(sum(pages))))
    for b, (begin, end) in enumerate(itertools.pairwise(cu_k.tolist())):
        for page, row in enumerate(range(begin, end, 8)):
            table[b, page] = next(free)
            for store, rows in zip(stores, (k, v), strict=True):
                store[table[b, page], : min(8, end - row)] = rows[row : min(row + 8, end)]
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 30, causal=True)
    got = flash_attn.flash_attn_varlen_func(
        q, *stores, cu_q, cu_k, 20, 30, causal=True, block_table=table
    )
    assert torch.equal(got, expected)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "alibi"])
def test_cache(dtype, name):
    options = OPTIONS[name]
    used, new = torch.tensor([12, 3], dtype=torch.int32), 4
    q, k_cache, v_cache, k, v = drawn(
        dtype, (2, 4, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16), (2, new, 2, 16), (2, new, 2, 16)
    )
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for b, begin in enumerate(used.tolist()):
        for cache, rows in zip(expected, (k, v), strict=True):
            cache[b, begin : begin + new] = rows[b]
    output, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=used, return_softmax_lse=True, **options
    )
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])
    for b, begin in enumerate(used.tolist()):
        of_one = [t[b : b + 1, : begin + new] for t in expected]
        base = definition(q[b : b + 1], *of_one, **options)
        ref = definition(*(t.double() for t in (q[b : b + 1], *of_one)), **options)
        numerics.assert_close(output[b : b + 1], ref[0], base[0])
        numerics.assert_close(lse[b : b + 1], ref[1], base[1])
    again = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used + new, **options
    )
    assert torch.equal(again, output)


def test_cache_in_pages_of_one_length_with_rotation():
    q, k, v, k_cache, v_cache, angles = drawn(
        F32, (2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 2, 16), (2, 16, 2, 16), (2, 16, 2, 16), (16, 4)
    )
    rotation = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
    pages = [cache.clone().reshape(4, 8, 2, 16) for cache in (k_cache, v_cache)]
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    expected = functional.attention_with_kv_cache(
        q.transpose(1, 2), *(cache.clone().transpose(1, 2) for cache in (k_cache, v_cache)),
        k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=9, **rotation,
    ).transpose(1, 2)  # fmt: skip
    dense = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=9, **rotation
    )
    paged = flash_attn.flash_attn_with_kvcache(
        q, *pages, k, v, cache_seqlens=9, block_table=table, **rotation
    )
    assert torch.equal(dense, expected) and torch.equal(paged, expected)
    assert torch.equal(pages[0].reshape(2, 16, 2, 16), k_cache)


# ---------------------------------------------------------------- torch and errors


def test_dropout_follows_the_seed():
    q, k, v = drawn(F32, (1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(flash_attn.flash_attn_func(q, k, v, 0.3))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_compiled_caches_are_written():
    q, k, v = drawn(F32, (2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 2, 16))
    compiled = torch.compile(
        flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"
    )
    used = torch.tensor([3, 5], dtype=torch.int32)
    results = []
    for function in (compiled, flash_attn.flash_attn_with_kvcache):
        caches = drawn(F32, (2, 8, 2, 16), (2, 8, 2, 16))
        results.append([function(q, *caches, k, v, cache_seqlens=used), *caches])
    assert all(map(torch.equal, *results))
