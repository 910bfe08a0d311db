"""Attention in float32 whose products take factors rounded to bfloat16, because the user said so.

Options and storages are those of all calls; the CPU level that has dot products computes them.
"""

from dataclasses import replace

import pytest
import torch

import onepass
from onepass import explain, functional
from onepass._policy import precision as policy
from tests.attention.cases import Case, assert_same, combination, definition, forward, ours
from tests.attention.cases import check as check_case
from tests.attention.test_values import AXES, LENGTHS
from tests.linear.test_precision import global_precision, needs_dots
from tests.support.dtypes import F32, F64
from tests.support.pairs import pairwise

pytestmark = needs_dots
sdpa = functional.scaled_dot_product_attention
ROUNDED = Case(F32, rounded=True)
ROWS = [row | dict(dtype=F32) for row in pairwise(AXES)]


def operands(heads: int = 2, rows: int = 70, head_dim: int = 32):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, rows, head_dim, generator=random) for _ in range(3)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths):
    for causal in ({}, dict(window_right=0, bottom_right=True)):
        check_case(replace(ROUNDED, seq_q=lengths[0], seq_k=lengths[1], **causal))


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=pytest.mark.slow if i % 6 else ()) for i, r in enumerate(ROWS)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_pairs_of_options(row):
    check_case(replace(combination(row), rounded=True))


def test_the_distance_from_float32_is_that_of_bfloat16():
    """Weights and values are off by 2^-9 of themselves, and scores by 2^-8 of their terms."""
    case = replace(ROUNDED, head_dim=64, seq_q=200, seq_k=200)
    t = case.tensors()
    exact = definition(replace(case, rounded=False), t, F64)
    found = ours(case, t)
    for name, result in exact.items():
        error = (found[name].double() - result).norm() / result.norm()
        assert 2**-14 < error < 2**-6, name


def test_a_row_has_the_same_bits_in_any_batch_with_any_threads():
    q, k, v = operands(heads=4, rows=200)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = sdpa(q, k, v, is_causal=True, precision="medium")
        one = sdpa(q[:, 1:2], k[:, 1:2], v[:, 1:2], is_causal=True, precision="medium")
        assert torch.equal(one, whole[:, 1:2])
        torch.set_num_threads(2)
        assert torch.equal(sdpa(q, k, v, is_causal=True, precision="medium"), whole)
    finally:
        torch.set_num_threads(before)


def test_torchs_global_setting_is_followed():
    q, k, v = operands()
    begins = torch.tensor([0, 30, 70], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    calls = (
        lambda **given: sdpa(q, k, v, **given),
        lambda **given: functional.varlen_attention(*packed, begins, begins, 40, 40, **given),
    )
    for call in calls:
        medium, exact = (call(precision=p) for p in ("medium", "highest"))
        assert not torch.equal(medium, exact)
        for precision, expected in (("highest", exact), ("high", exact), ("medium", medium)):
            with global_precision(precision):
                assert torch.equal(call(), expected)
                assert torch.equal(call(precision="highest"), exact)
    module = onepass.nn.MultiheadAttention(64, 2, bias=False)
    x = torch.randn(30, 1, 64, generator=torch.Generator().manual_seed(1))
    exact, _ = module(x, x, x, need_weights=False)
    with global_precision("medium"):
        assert not torch.equal(module(x, x, x, need_weights=False)[0], exact)


def test_the_backward_has_the_precision_of_its_forward():
    q, k, v = (x.requires_grad_() for x in operands())
    with global_precision("medium"):
        y = sdpa(q, k, v)
        inside = torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(map(torch.equal, inside, outside))


def test_16_bits_and_autocast_decide_before_it():
    tensors = operands()
    narrow = [x.bfloat16() for x in tensors]
    expected = sdpa(*narrow)
    assert torch.equal(sdpa(*narrow, precision="medium"), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sdpa(*tensors, precision="medium"), expected)
    wide = [x.double() for x in tensors]
    assert torch.equal(sdpa(*wide, precision="medium"), sdpa(*wide))


def test_what_no_query_sees_may_hold_anything():
    q, k, v = operands()
    mask = torch.ones(70, 70, dtype=torch.bool)
    mask[:, 13] = False
    expected = sdpa(q, k, v, mask, precision="medium")
    k[..., 13, :], v[..., 13, :] = float("nan"), float("inf")
    assert torch.equal(sdpa(q, k, v, mask, precision="medium"), expected)


def test_one_key_passes_its_value_on():
    """And its weight is 1, so no gradient reaches the score."""
    case = replace(ROUNDED, seq_k=1, seq_q=40)
    t = case.tensors()
    found = ours(case, t)
    value = t["value"].bfloat16().float()
    groups = case.heads // t["value"].shape[1]
    expected = value.repeat_interleave(groups, 1).expand_as(found["output"])
    assert torch.equal(found["output"], expected)
    assert not found["dquery"].any()


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_change_of_the_global_setting_compiles_again(backend):
    q, k, v = (x.requires_grad_() for x in operands())
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sdpa(*x), backend=backend, fullgraph=True)
    for precision in ("highest", "medium", "highest"):
        with global_precision(precision):
            found = compiled(q, k, v)
        expected = sdpa(q, k, v, precision=precision)
        assert torch.equal(found, expected)
        pairs = (torch.autograd.grad(y.sum(), (q, k, v)) for y in (found, expected))
        assert all(map(torch.equal, *pairs))


def test_second_derivatives_are_those_of_rounded_factors():
    q, k, v = (x.double().requires_grad_() for x in operands(1, 9, 8))
    ours_ = [x.detach().float().requires_grad_() for x in (q, k, v)]

    def second(given, y):
        first = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    expected = second(
        (q, k, v), onepass.reference.attention.attention(q, k, v, round_factors=True)[0]
    )
    found = second(ours_, sdpa(*ours_, precision="medium"))
    for mine, right in zip(found, expected, strict=True):
        assert (mine - right).abs().max() <= 0.02 * right.abs().max()


def test_explain_names_the_rounding():
    q, k, v = operands()
    (call,) = explain(lambda: sdpa(q, k, v, precision="medium")).calls
    assert "rounded while packing" in call["reason"] and "rounding allowed" in call["arguments"]


def test_a_cache_is_read_in_float32():
    """Reading it is the limit, and rounding would not shorten that."""
    q, k, v = operands()
    lengths = torch.tensor([70], dtype=torch.int32)
    exact = functional.attention_with_kv_cache(q[:, :, :1], k, v, cache_seqlens=lengths)
    with global_precision("medium"):
        found = functional.attention_with_kv_cache(q[:, :, :1], k, v, cache_seqlens=lengths)
    assert torch.equal(found, exact)


def test_without_dot_products_nothing_changes(monkeypatch):
    monkeypatch.setattr(policy, "HAS_PAIR_PRODUCTS", False)
    q, k, v = operands()
    exact = sdpa(q, k, v, precision="highest")
    assert torch.equal(sdpa(q, k, v, precision="medium"), exact)


def test_a_row_alone_has_the_same_outputs_with_other_storages():
    """A packed sequence as a dense one."""
    case = replace(ROUNDED, batch=1, seq_q=100, seq_k=100)
    t = case.tensors()
    dense = forward(case, t)
    packed = replace(case, storage="packed", lengths=((100, 100),))
    of = {n: x[0].transpose(0, 1) if n in ("query", "key", "value") else x for n, x in t.items()}
    of |= {n: torch.tensor([0, 100], dtype=torch.int32) for n in ("cu_seq_q", "cu_seq_k")}
    found = forward(packed, {n: x for n, x in of.items() if n != "doutput"})
    assert_same(dict(output=found["output"].transpose(0, 1)[None]), dict(output=dense["output"]))
