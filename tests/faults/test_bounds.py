"""Lengths, windows and offsets near the ends of int64: an answer, or an error that names them.

Never an endless wait, and never wrong numbers.
"""

import pytest
import torch

from onepass import functional
from tests.attention.cases import cumulated, int32
from tests.support.calls import flat

OPS = torch.ops.onepass
HUGE = (2**31, 2**40, 2**62, 2**63 - 64, 2**63 - 1)
LENGTHS = [3, 0, 5]


def packed(dtype=torch.float32) -> dict:
    torch.manual_seed(0)
    q = torch.randn(8, 4, 8, dtype=dtype)
    k, v = torch.randn(8, 2, 8, dtype=dtype), torch.randn(8, 2, 8, dtype=dtype)
    ends = cumulated(LENGTHS)
    return dict(query=q, key=k, value=v, cu_seq_q=ends, cu_seq_k=ends, scale=0.3)


def paged() -> dict:
    torch.manual_seed(0)
    pages = torch.randn(4, 4, 2, 8)
    return dict(
        query=torch.randn(8, 4, 8), key=pages, value=pages + 1, cu_seq_q=cumulated(LENGTHS),
        seqused_k=int32([3, 0, 7]), block_table=int32([[0, 1], [9, 9], [2, 3]]), scale=0.3,
    )  # fmt: skip


def same(ones, others) -> None:
    for one, other in zip(flat(ones), flat(others), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_upper_bounds_of_packed_sequences_may_be_anything(dtype):
    call = packed(dtype)
    tight = OPS.attention_forward(**call, max_q=5, max_k=5)
    assert tight[0].abs().sum() > 0
    ones = torch.ones_like(tight[0])
    grads = dict(output=tight[0], lse=tight[1], lse_rest=tight[2], grad_mask=7)
    expected = OPS.attention_backward(ones, None, **call, **grads, max_q=5, max_k=5)
    for bound in HUGE:
        for bounds in (
            dict(max_q=bound, max_k=5), dict(max_q=5, max_k=bound), dict(max_q=bound, max_k=bound)
        ):  # fmt: skip
            same(OPS.attention_forward(**call, **bounds), tight)
            same(OPS.attention_backward(ones, None, **call, **grads, **bounds), expected)


def test_of_pages_likewise():
    tight = OPS.attention_forward(**paged(), max_q=5, max_k=7)
    for bound in HUGE:
        same(OPS.attention_forward(**paged(), max_q=bound, max_k=bound), tight)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_bias_is_as_large_as_its_bounds_and_so_is_its_gradient(rows):
    """Elements beyond the longest sequence are written as well."""
    call = packed() | dict(bias=torch.randn(1, 4, rows, 7), max_q=6, max_k=7)
    output, lse, rest = OPS.attention_forward(**call)
    grads = dict(output=output, lse=lse, lse_rest=rest, grad_mask=15)
    dbias = OPS.attention_backward(torch.ones_like(output), None, **call, **grads)[3][0]
    assert dbias.shape == (1, 4, rows, 7)
    assert torch.all(dbias[..., 5:] == 0) and torch.all(dbias[..., 5:, :] == 0)
    if rows == 1:
        expected = OPS.attention_backward(torch.ones_like(output), None, **call, **grads)[3][0]
        for bound in HUGE[1:]:
            wide = call | dict(max_q=bound)
            found = OPS.attention_backward(torch.ones_like(output), None, **wide, **grads)[3][0]
            assert torch.equal(found, expected)


def test_windows_near_the_ends():
    call = packed() | dict(max_q=5, max_k=5)
    everything = OPS.attention_forward(**call)
    for left in HUGE:
        for right in HUGE:
            same(OPS.attention_forward(**call, window_left=left, window_right=right), everything)


def test_sizes_whose_product_overflows():
    """Expanded tensors have sizes that no memory limits."""
    pages = torch.randn(1, 1, 1, 8).expand(1, 2**40, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**40)
    query = torch.randn(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match="block_table must have sizes whose product int64 holds"):
        OPS.attention_decode(
            query, pages, pages, block_table=table, cache_seqlens=int32([1]), scale=1.0
        )
    many = torch.empty(2**33, 0, 2**33, 8, device="meta")
    with pytest.raises(RuntimeError, match="product int64 holds|overflow"):
        OPS.attention_forward_check(many, many, many, scale=1.0)


def test_no_memory():
    """The operator's error has the bytes, in torch's words, which other code looks for."""
    wide = torch.randn(1, 8).expand(2**50, 8)
    heads = wide[None, None]
    few = heads[..., :2, :]
    weight = torch.randn(1).expand(2**50)
    said = "DefaultCPUAllocator: can't allocate memory: tried to allocate"
    for op, elements, call in (
        ("layer_norm", 2**53, lambda: functional.layer_norm(wide, (8,))),
        ("layer_norm", 2**50, lambda: functional.layer_norm(weight, (2**50,), weight)),
        ("linear", 2**53, lambda: functional.linear(wide, wide[:8])),
        ("linear", 2**50, lambda: functional.linear(wide[:1], wide)),
        ("add_dropout", 2**53, lambda: functional.add_dropout(wide, wide, 0.5)),
        ("attention", 2**53, lambda: functional.scaled_dot_product_attention(heads, few, few)),
    ):
        with pytest.raises(RuntimeError, match=f"{op}: {said} {4 * elements} bytes"):
            call()
