"""Attention: tensors of any strides, broadcast and offset; the layout of the results."""

from dataclasses import replace

import pytest
import torch

from onepass import functional, numerics
from tests.attention.cases import NAN, Case, assert_same, backward, forward, ours
from tests.emulator.executors import each, everywhere
from tests.support.dtypes import BF16, F32
from tests.support.layouts import LAYOUTS, strided

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]

# Tails in every direction; keys that whole tiles of queries do not see.
CASE = Case(
    F32, 40, 24, heads=4, kv_heads=2, seq_q=70, seq_k=150, window_left=90, window_right=0,
    bottom_right=True, bias="hq", mask="bq", dropout_p=0.2, dlse=True, alibi="b", sinks=F32,
)  # fmt: skip
CASES = [CASE, replace(CASE, dtype=BF16, head_dim=64, value_dim=64)]
cases = pytest.mark.parametrize("case", CASES, ids=["float32", "bfloat16"])


def named(**changes) -> list:
    return [pytest.param(replace(case, **changes), id=str(case.dtype)) for case in CASES]


# On CUDA rows are copied by 16 bytes, by 8, by 4 or by elements: smaller cases cover all four.
laid_out = each("case", cpu=named(), cuda=named(heads=2, kv_heads=1, seq_q=17, seq_k=70))
NAMES = ["query", "key", "value", "bias", "mask", "doutput"]


@laid_out
@pytest.mark.parametrize("layout", ["tokens first", *LAYOUTS])
def test_each_tensor_in_each_layout(executor, case, layout):
    t = case.tensors()
    expected = ours(case, t)
    for name in NAMES:
        assert_same(ours(case, t | {name: strided(t[name], layout)}), expected, name)
    every = {name: strided(t[name], layout) for name in NAMES}
    found = forward(case, t | every, out_bshd=True)
    found["output"] = strided(found["output"], layout)
    assert_same(found | backward(case, t | every, found, out_bshd=True), expected)


@everywhere
@cases
def test_broadcast_of_bias_and_mask_by_stride_or_size(case):
    """The forward is the same; the gradient has the shape of the argument."""
    t = case.tensors()
    shape = (2, case.heads, case.seq_q, case.seq_k)
    narrow = ours(case, t)
    wide = ours(case, t | dict(bias=t["bias"].expand(shape), mask=t["mask"].expand(shape)))
    assert wide["dbias"].shape == shape
    for name, result in narrow.items():
        if name != "dbias":
            assert torch.equal(result, wide[name]), name
    ref, rounded = (
        dbias.sum_to_size(t["bias"].shape) for dbias in (wide["dbias"].double(), wide["dbias"])
    )
    numerics.assert_close(narrow["dbias"], ref, rounded)


@everywhere
@pytest.mark.parametrize("apart", [4, 2, 1])
def test_pages_whose_stride_16_bytes_do_not_divide(apart):
    """On CUDA their rows are copied by 8, by 4 bytes, by elements; the first page is aligned."""
    case = Case(BF16, 64, storage="paged", seq_q=20, seq_k=90)
    t = case.tensors()
    expected = ours(case, t)

    def spaced(pages: torch.Tensor) -> torch.Tensor:
        page = pages[0].numel()
        buffer = torch.full((len(pages) * (page + apart),), NAN, dtype=pages.dtype)
        view = buffer.as_strided(pages.shape, (page + apart, *pages.stride()[1:]))
        view.copy_(pages)
        return view

    assert_same(ours(case, t | {name: spaced(t[name]) for name in ("key", "value")}), expected)


# ---- the layout of results ----------------------------------------------------------------------


@everywhere
@cases
@pytest.mark.parametrize("out_bshd", [False, True])
def test_results_are_contiguous_in_the_asked_order(case, out_bshd):
    t = case.tensors()
    results = ours(case, t, out_bshd=out_bshd)
    assert_same(results, ours(case, t))
    for name in ("output", "dquery", "dkey", "dvalue"):
        result = results[name]
        assert (result.transpose(1, 2) if out_bshd else result).is_contiguous(), name
    assert results["lse"].is_contiguous() and results["dbias"].is_contiguous()


@everywhere
def test_output_follows_the_layout_of_the_query():
    """A transposed (batch, seq, heads, dim) gives back one that transposes without a copy."""
    x = torch.randn(2, 10, 3, 8)
    bshd, bhsd = x.transpose(1, 2), x.transpose(1, 2).contiguous()
    attend = functional.scaled_dot_product_attention
    assert attend(bshd, bhsd, bhsd).transpose(1, 2).is_contiguous()
    assert attend(bhsd, bshd, bshd).is_contiguous()
    # Strides of dimensions with one element, or of expanded ones, mean nothing.
    for size in ((2, 1, 3, 8), (2, 10, 1, 8), (1, 1, 1, 8)):
        q = torch.randn(size).transpose(1, 2)
        assert attend(q, bhsd[: size[0], : size[2]], bhsd[: size[0], : size[2]]).is_contiguous()
    expanded = torch.randn(2, 10, 1, 8).expand(2, 10, 3, 8).transpose(1, 2)
    assert attend(expanded, bhsd, bhsd).is_contiguous()
    q, k, v = (t.detach().requires_grad_() for t in (bshd, bhsd, bhsd))
    dq, dk, dv = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    assert all(g.transpose(1, 2).is_contiguous() for g in (dq, dk, dv))
