"""Decoding where sizes or numbers are extreme, empty or not finite."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.attention_decode.cases import (
    DTYPES,
    NAN,
    Case,
    assert_same,
    check,
    check_changed,
    equal,
    int32,
    ours,
    read,
    same_bits,
    with_copied_caches,
    write,
)
from tests.emulator.executors import everywhere
from tests.support.dtypes import BF16, F32

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF = math.inf


# ---- sizes --------------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("new_rows", [-1, 0, 2])
def test_nothing(new_rows, page_size, dtype):
    """No sequences, no queries, no heads, no keys, and pairs of these."""
    for options in ({}, dict(window_right=0, window_left=3, alibi="b", pads=(2,), softcap=1.0)):
        case = Case(dtype, 16, new_rows=new_rows, page_size=page_size, **options)
        none = dict(heads=0, kv_heads=0)
        for sizes in (dict(lengths=()), dict(seq_q=0), dict(lengths=(), seq_q=0), none):
            of = replace(case, **sizes)
            found = ours(of)
            assert found["output"].shape == (of.batch, of.heads, of.seq_q, 16)
            assert found["lse"].shape == (of.batch, of.heads, of.seq_q)
    none = Case(dtype, 16, seq_q=3, lengths=(0, 0), room=0, new_rows=min(new_rows, 0))
    for of in (none, replace(none, page_size=page_size), replace(none, pads=(5,))):
        found = ours(of)
        assert not found["output"].any() and (found["lse"] == -INF).all()


@everywhere
@dtypes
def test_new_rows_of_no_number_write_nothing(dtype):
    """Also where lengths leave no room, and two sequences have one cache."""
    case = Case(dtype, 16, lengths=(9, 9), room=0, new_rows=0, seq_q=2, window_right=0)
    t, read = case.tensors(), replace(case, new_rows=-1)
    for numbers in ([0, 1], [1, 1]):
        caches = {name: t[name][numbers] for name in ("k_cache", "v_cache")}
        expected = ours(read, read.tensors() | caches)
        found = ours(case, t | dict(cache_batch_idx=int32(numbers)))
        assert_same({name: found[name] for name in expected}, expected)


@everywhere
@dtypes
def test_a_cache_may_be_read_by_several_sequences(dtype):
    case = Case(dtype, 16, lengths=(9, 9, 9), scattered=True, seq_q=2)
    t = case.tensors()
    t["cache_batch_idx"][:] = t["cache_batch_idx"][0]
    t["query"][:] = t["query"][:1]
    found = ours(case, t)
    for result in found.values():
        assert same_bits(result[1], result[0]) and same_bits(result[2], result[0])


# ---- masks --------------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("page_size", [0, 4])
def test_rows_without_keys(page_size, sinks, dtype):
    """Output 0 and LSE -inf, or the sink: before the first key, outside a window, in padding."""
    sinks = dtype if sinks else None
    case = Case(dtype, 32, seq_q=7, lengths=(3, 0, 7, 20), sinks=sinks, page_size=page_size)
    for options, dead in (
        (dict(window_right=0), [[0, 1, 2, 3], range(7), [], []]),
        (dict(window_right=0, window_left=2), [[0, 1, 2, 3], range(7), [], []]),
        (dict(window_right=0, pads=(6,)), [[0, 1, 2, 3], range(7), [], []]),
        (dict(window_left=1), [[], range(7), [], []]),
        (dict(window_right=0, new_rows=2), [[0, 1], [0, 1, 2, 3, 4], [], []]),
        ({}, [[], range(7), [], []]),
    ):
        of = replace(case, **options)
        check(of)
        t = of.tensors()
        found = ours(of, t)
        alone = t["sinks"].float()[:, None] if sinks else torch.tensor(-INF)
        for b, rows in enumerate(dead):
            without = torch.zeros(7, dtype=torch.bool)
            without[list(rows)] = True
            assert not found["output"][b, :, without].any()
            assert (found["lse"][b, :, without] == alone).all()
            assert found["output"][b, :, ~without].any(-1).all()
            assert found["lse"][b, :, ~without].isfinite().all()


@everywhere
@dtypes
def test_a_sink_of_minus_infinity_is_none(dtype):
    case = Case(dtype, 16, lengths=(9, 0, 200), seq_q=2, window_right=0, sinks=F32)
    t = case.tensors()
    t["sinks"] = torch.full((4,), -INF)
    without = {name: x for name, x in t.items() if name != "sinks"}
    assert_same(ours(case, t), ours(replace(case, sinks=None), without))


@everywhere
def test_windows_beyond_all_positions():
    case = Case(F32, 16, lengths=(9, 200), seq_q=3)
    t = case.tensors()
    expected = ours(case, t)
    for window in (2**31, 2**40, 2**63 - 1):
        wide = replace(case, window_left=window, window_right=window)
        assert_same(ours(wide, t), expected)


# ---- large numbers ------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 200.0])
@pytest.mark.parametrize("new_rows", [-1, 2])
def test_huge_scores(new_rows, magnitude, dtype):
    """One key takes all; no score overflows where a difference to the largest does not."""
    case = Case(dtype, 64, seq_q=2, lengths=(90, 1000), new_rows=new_rows)
    change = lambda t: dict(query=(t["query"] * magnitude).to(dtype))  # noqa: E731
    check_changed(case, change)
    check_changed(replace(case, window_right=0, softcap=50.0), change)


@everywhere
@dtypes
@pytest.mark.parametrize("sign", [-1, 1])
def test_lse_far_from_zero(sign, dtype):
    """Where exp(lse) has no float32, in chunks that differ in it."""
    case = Case(dtype, 64, seq_q=2, lengths=(90, 3000), factor=0.5)

    def change(t):
        """A large mean of query and key: every score is about 130 or -130."""
        caches = {n: t[n].clone() for n in ("k_cache", "v_cache")}
        caches["k_cache"] += 4
        return caches | dict(query=(t["query"] / 4 + 8 * sign).to(dtype))

    check_changed(case, change)
    t = case.tensors()
    assert (ours(case, t | change(t))["lse"] * sign > 88).all()


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scores_beyond_the_exponential(dtype):
    """Scores of some 1e6, far from each other."""
    case = Case(dtype, 16, seq_q=3, lengths=(700,), room=0, heads=2)
    t = case.tensors()
    t["query"], t["k_cache"] = t["query"] * 1e3, t["k_cache"] * 1e3
    found = ours(case, t)["output"].double()
    best = (t["query"].double() @ t["k_cache"].double().mT).argmax(-1)
    expected = t["v_cache"].double().gather(2, best[..., None].expand(-1, -1, -1, 16))
    assert torch.equal(found, expected)


# ---- not finite ---------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["query", "k_cache", "v_cache"])
def test_not_finite_inputs_spread_as_in_torch(name, value, dtype):
    case = Case(dtype, 32, seq_q=5, lengths=(300, 300), room=0, heads=4, kv_heads=4)
    t = case.tensors()
    clean = ours(case, t)["output"]
    row = 3 if name == "query" else 133
    t[name][1, 0, row, 7] = value
    found = ours(case, t)["output"]
    with sdpa_kernel(SDPBackend.MATH):  # the fused one gives 0 for an infinite score in bfloat16
        expected = F.scaled_dot_product_attention(
            t["query"], t["k_cache"], t["v_cache"], scale=case.scale
        )
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[0], clean[0]) and torch.equal(found[1, 1:], clean[1, 1:])


@everywhere
@dtypes
@pytest.mark.parametrize("page_size", [0, 7])
@pytest.mark.parametrize("new_rows", [-1, 2])
@pytest.mark.parametrize(
    "seq_q, left, right",
    [(3, 20, 0), (40, 20, 0), (1, 100, 0), (9, 5, -1), (20, -1, 0), (9, 40, 2)],
)
@pytest.mark.grid(2)
def test_unseen_rows_of_a_cache_never_spread_what_they_hold(
    seq_q, left, right, new_rows, page_size, dtype
):
    """Before and after the windows of all queries: a part of a chunk, and more."""
    case = Case(dtype, 40, lengths=(700, 131, 37), pads=(0, 3), seq_q=seq_q, new_rows=new_rows,
                page_size=page_size, window_left=left, window_right=right)  # fmt: skip
    t = case.tensors()
    clean = ours(case, t)
    for value in (NAN, INF):
        spoilt = with_copied_caches(t)
        for b, (pad, length) in enumerate(zip(case.padding, case.lengths, strict=True)):
            unseen = ~case.seen(length + case.appends).any(0)[:length]
            for name in ("k_cache", "v_cache"):
                rows = read(spoilt, name, b, pad, pad + length)
                rows[:, unseen] = value
                write(spoilt, name, b, pad, rows)
        assert_same(ours(case, spoilt), clean)


@everywhere
@dtypes
def test_not_finite_new_rows(dtype):
    """They are written unchanged, and affect only their own sequence."""
    case = Case(dtype, 32, seq_q=2, new_rows=2, lengths=(9, 9), window_right=0)
    t = case.tensors()
    clean = ours(case, t)
    t["key"][1, :, 1], t["value"][1, 0, 0, 3] = NAN, INF
    found = ours(case, t)
    assert equal(found["k_cache"], t["key"]) and equal(found["v_cache"], t["value"])
    assert torch.equal(found["output"][0], clean["output"][0])
    assert found["output"][1, :, 1].isnan().all() and found["lse"][1, :, 1].isnan().all()
    assert torch.equal(found["lse"][1, :, 0], clean["lse"][1, :, 0])
    assert found["output"][1, :2, 0, 3].isinf().all()


@everywhere
@dtypes
def test_what_another_call_left_in_memory_is_not_read(dtype):
    """A workspace holds values of another call."""
    case = Case(dtype, 40, seq_q=3, lengths=(700, 5, 0), window_right=0, new_rows=1)
    t = case.tensors()
    clean = ours(case, t)
    for _ in range(3):
        ours(case, {n: torch.full_like(x, NAN) if n == "query" else x for n, x in t.items()})
        assert_same(ours(case, t), clean)
