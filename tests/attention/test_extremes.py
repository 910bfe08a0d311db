"""Attention where numbers or sizes are extreme, empty or not finite."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass import _C, functional, numerics
from tests.attention.cases import (
    DTYPES,
    NAN,
    Case,
    assert_same,
    base,
    check_changed,
    definition,
    equal,
    forward,
    ours,
    stock,
)
from tests.emulator.executors import everywhere
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.layouts import strided

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]
INF = math.inf


# ---- sizes --------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [dict(seq_q=0), dict(seq_k=0), dict(seq_q=0, seq_k=0), dict(batch=0)], ids=str
)
def test_nothing(sizes, dtype):
    case = Case(dtype, 16, **dict(batch=2, heads=4, kv_heads=2, seq_q=9, seq_k=70) | sizes)
    terms = dict(bias="bhq", mask="q", alibi="b", dropout_p=0.5, window_left=3, bottom_right=True)
    for options in ({}, dict(window_right=0), terms):
        of = replace(case, dlse=True, **options)
        t = of.tensors()
        results = ours(of, t)
        assert results["output"].shape == (case.batch, 4, case.seq_q, 16)
        assert (results.pop("lse") == -INF).all()
        for name, result in results.items():
            assert not result.any(), name
            assert name == "output" or result.shape == t[name[1:]].shape, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_q", [5, 200])
def test_no_keys_but_a_sink(executor, seq_q, dtype):
    case = Case(dtype, 16, seq_q=seq_q, seq_k=0, sinks=dtype, dlse=True)
    t = case.tensors()
    t["dlse"] = t["dlse"].float().to(t["dlse"].dtype)  # float64 adds them exactly, in any order
    results = ours(case, t)
    assert not results["output"].any()
    assert equal(results["lse"], t["sinks"].to(results["lse"].dtype)[:, None].expand(2, 2, seq_q))
    exact, rounded = (t["dlse"].to(wide).sum((0, 2)) for wide in (F64, dtype))
    numerics.assert_close(results["dsinks"], exact, rounded)
    assert executor.is_cuda or torch.equal(results["dsinks"], exact.to(dtype))


@pytest.mark.parametrize("seq_q, seq_k", [(1, 5), (5, 5), (40, 70), (1, 200)])
def test_subnormal_bfloat16(seq_q, seq_k):
    """AVX-512's dot instructions take subnormal bfloat16 numbers as 0 (docs/limits.md), as factors
    and as results; the other levels keep them, as torch's attention does."""
    has_dots = _C.cpu_level() == "avx512_bf16"
    query = torch.full((1, 1, seq_q, 32), 1e-40, dtype=BF16)
    signs = torch.ones(1, 1, seq_k, 32, dtype=BF16)
    signs[:, :, ::2] = -1
    attend = functional.scaled_dot_product_attention
    found = attend(query, 1e38 * signs, signs, scale=3.0)
    exact = query.double() * 0 if has_dots else query.double()
    wide = (1e38 * signs).double(), signs.double()
    expected = F.scaled_dot_product_attention(exact, *wide, scale=3.0)
    base = F.scaled_dot_product_attention(query.float(), *(t.float() for t in wide), scale=3.0)
    numerics.assert_close(found, expected, expected.to(BF16))
    assert has_dots or bool((base > 0.3).all())
    small = attend(0 * query, signs, 1e-40 * signs.abs())
    assert torch.equal(small, torch.zeros_like(query) if has_dots else query)


# ---- masks --------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", ["mask", "bias", "both", "causal"])
def test_rows_without_keys(how, sinks, dtype):
    """Output 0 and LSE -inf, or the sink; gradients are 0, not NaN."""
    case = Case(dtype, 32, seq_q=100, seq_k=70, sinks=dtype if sinks else None, dlse=True)
    dead = torch.zeros(100, dtype=torch.bool)
    if how == "causal":
        case = replace(case, window_right=0, bottom_right=True)
        dead[:30] = True
    else:
        dead[[0, 3, 4, 77]] = True
        dead[32:64] = True
        masks = {"mask": "q" if how != "bias" else None, "bias": "q" if how != "mask" else None}
        case = replace(case, **masks)

    def change(t):
        if "mask" in t:
            seen = t["mask"] & ~dead[:, None]
            seen[..., 0] = ~dead
            return {"mask": seen}
        return {"bias": t["bias"].masked_fill(dead[:, None], -INF)} if how == "bias" else {}

    check_changed(case, change)
    t = case.tensors()
    t = t | change(t)
    results = ours(case, t)
    assert not results["output"][:, :, dead].any() and not results["dquery"][:, :, dead].any()
    alone = t["sinks"].to(results["lse"].dtype)[:, None] if sinks else torch.tensor(-INF)
    assert (results["lse"][:, :, dead] == alone).all()
    assert (results["lse"][:, :, ~dead] > -INF).all()
    assert "dbias" not in results or not results["dbias"][:, :, dead].any()


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["bias", "mask"])
@pytest.mark.parametrize("length", [64, 192, 320])
@pytest.mark.grid(2)
def test_half_a_tile_with_a_mask_and_a_small_lse(length, mask, dtype):
    """S mod 128 = 64 and LSE below -88, where exp(score) and exp(-lse) have no float32."""
    case = Case(dtype, 64, batch=1, seq_q=length, seq_k=length, factor=0.5)
    case = replace(case, **{mask: "bq" if mask == "mask" else "q"}, dlse=True)

    def change(t):
        """A large mean of query and key of opposite sign: every score is about -130."""
        key = (t["key"] + 4).to(dtype)
        return dict(query=(t["query"] / 4 - 8).to(dtype), key=key)

    check_changed(case, change)
    t = case.tensors()
    lse = forward(case, t | change(t))["lse"]
    assert (lse[lse > -INF] < -88).all()


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
def test_lse_far_from_zero(sign, dtype):
    case = Case(dtype, 32, seq_q=70, seq_k=90, window_right=0, bias="", dlse=True)
    check_changed(case, lambda t: dict(bias=t["bias"] + sign * 200))
    check_changed(replace(case, bias=None, sinks=dtype), lambda t: dict(sinks=t["sinks"] + 60))


def smallest_numbers(case: Case, t: dict[str, Tensor], whole: bool) -> dict[str, Tensor]:
    """A bias that is 0 and finfo.min, or the latter alone, in some rows or in all."""
    smallest = torch.finfo(t["bias"].dtype).min
    bias = torch.zeros_like(t["bias"]).masked_fill(t["bias"] < 0, smallest)
    bias[:, :, slice(None) if whole else slice(3, 9)] = smallest
    return dict(bias=bias)


smallest_cases = pytest.mark.parametrize(
    "case",
    [
        *(Case(dtype, 32, seq_q=40, seq_k=70, bias="q") for dtype in DTYPES),
        # float32's smallest number beside 16-bit queries.
        *(Case(dtype, 32, seq_q=40, seq_k=70, bias="q", bias_dtype=F32) for dtype in (BF16, F16)),
    ],
    ids=["float32", "bfloat16", "float16", "float64", "mixed bfloat16", "mixed float16"],
)


@everywhere
@smallest_cases
@pytest.mark.parametrize("whole", [False, True], ids=["some rows", "all rows"])
def test_rows_of_the_smallest_number_average_as_in_torch(case, whole):
    """finfo.min is not a mask if a row has nothing else. Gradients are of the average that the
    forward computes, as in torch's unfused function."""
    for options in (dict(window_right=0), {}):
        of = replace(case, **options)
        t = of.tensors()
        t |= smallest_numbers(of, t, whole)
        found, ref, stocks = ours(of, t), definition(of, t, F64), definition(of, t, of.dtype)
        stocks |= {name: base(of, t)[name] for name in ("output", "lse")}
        for name in ref if not options else ("output", "lse"):
            numerics.assert_close(found[name], ref[name], stocks[name], name)
    if case.bias_dtype is F32 or case.dtype is not F16:  # in float16 scores still fit beside -65504
        # Measured by torch's attention, as value.mean() adds in pairs, more exactly than either.
        found, fused = (of["output"][:, :, 3:9] for of in (found, stock(case, t)))
        mean = t["value"].double().mean(2, keepdim=True).expand_as(found)
        numerics.assert_close(found, mean, fused)


# ---- large numbers ------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 200.0])
def test_huge_scores(magnitude, dtype):
    """One key takes all; no score overflows where a difference to the largest does not."""
    case = Case(dtype, 64, seq_q=70, seq_k=90, dlse=True)
    change = lambda t: dict(query=(t["query"] * magnitude).to(dtype))  # noqa: E731
    check_changed(case, change)
    if magnitude < 100:  # else gradients are too small for float16
        check_changed(replace(case, window_right=0, softcap=50.0), change)


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scores_beyond_the_exponential(dtype):
    """Scores of some 1e6, far from each other."""
    case = Case(dtype, 16, seq_q=20, seq_k=30)
    t = case.tensors()
    t["query"], t["key"] = t["query"] * 1e3, t["key"] * 1e3
    output = forward(case, t)["output"].double()
    best = (t["query"].double() @ t["key"].double().mT).argmax(-1)
    expected = t["value"].double().gather(2, best[..., None].expand(-1, -1, -1, 16))
    assert torch.equal(output, expected)


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_keys_that_are_all_alike(dtype):
    """dquery is 0 up to cancellation, to which float64's relative bound does not apply."""
    case = Case(dtype, 32, seq_q=70, seq_k=129)
    check_changed(case, lambda t: dict(key=t["key"][:, :, :1].expand_as(t["key"]).contiguous()))


# ---- not finite ---------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_not_finite_inputs_spread_as_in_torch(name, value, dtype):
    case = Case(dtype, 32, seq_q=70, seq_k=90)
    t = case.tensors()
    clean = forward(case, t)
    t[name][1, 0, 33, 7] = value
    found = forward(case, t)["output"]
    with sdpa_kernel(SDPBackend.MATH):  # the fused one gives 0 for an infinite score in bfloat16
        expected = F.scaled_dot_product_attention(
            t["query"], t["key"], t["value"], scale=case.scale
        )
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[0], clean["output"][0]) and torch.equal(
        found[1, 1], clean["output"][1, 1]
    )


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_not_finite_gradients_stay_in_their_head(dtype):
    case = Case(dtype, 32, seq_q=70, seq_k=90, window_right=0)
    t = case.tensors()
    clean = ours(case, t)
    t["doutput"][1, 0, 33, 7] = NAN
    found = ours(case, t)
    for name in ("dquery", "dkey", "dvalue"):
        assert found[name][1, 0].isnan().any()
        assert torch.equal(found[name][0], clean[name][0])
        assert torch.equal(found[name][1, 1], clean[name][1, 1])
    others = torch.arange(70) != 33
    assert equal(found["dquery"][:, :, others], clean["dquery"][:, :, others])


UNSEEN = {
    "causal": dict(window_right=0),
    "window": dict(window_left=3, window_right=30),
    "bottom-right window": dict(window_left=4, window_right=0, bottom_right=True),
    "one mask": dict(mask=""),
    "mask of a batch": dict(mask="b"),
    "mask of a head": dict(mask="h"),
    "mask of a query": dict(mask="q"),
    "mask of all": dict(mask="bhq"),
    "mask and causal": dict(mask="hq", window_right=0),
    "every term": dict(mask="b", window_left=5, softcap=3.0, alibi="b", dropout_p=0.3, sinks=F32),
}


def bshd(tensor: Tensor) -> Tensor:
    return strided(tensor, "tokens first")


def unseen_keys(case: Case, t: dict[str, Tensor]) -> Tensor:
    """(batch, kv_heads, seq_k) whether no query of any head that shares a key sees it."""
    seen = case.allowed() & t.get("mask", torch.tensor(True))
    seen = seen.expand(case.batch, case.heads, case.seq_q, case.seq_k)
    return ~seen.unflatten(1, (case.kv_heads, -1)).any(3).any(2)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("seq_k", [130, 129, 300])
@pytest.mark.grid(4)
def test_unseen_keys_never_spread_what_they_hold(seq_k, name, dtype):
    """Not to output, LSE or gradients, with contiguous rows or not; their own gradients are 0. In
    tiles whose other keys are seen, and of 300 keys in whole tiles of any size up to 128."""
    terms = dict(UNSEEN[name])
    if "sinks" in terms and dtype is F64:
        terms["sinks"] = F64
    case = Case(dtype, 40, 24, heads=2, kv_heads=1, seq_q=21, seq_k=seq_k, bias="q", **terms)
    t = case.tensors()
    if "mask" in t:
        t["mask"][..., 64:] = True  # no tile is left out of fewer
        t["mask"][..., 128:256] &= seq_k < 300
        t["mask"][..., 5:20] = False
        if name == "mask and causal":  # allowed to those that are before it
            t["mask"][..., 20] = torch.arange(21) < 20
    unseen = unseen_keys(case, t)
    assert unseen.any() and not unseen.all()
    clean = ours(case, t)
    assert unseen[..., 20].all() or name != "mask and causal"
    for value, layout in ((NAN, Tensor.contiguous), (INF, bshd)):
        spoilt = {n: layout(t[n].masked_fill(unseen[..., None], value)) for n in ("key", "value")}
        assert_same(ours(case, t | spoilt), clean, f"{value}")
    assert not clean["dkey"][unseen].any() and not clean["dvalue"][unseen].any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_is_not_finite_does_not_depend_on_threads(dtype):
    """A key that a query of another block sees."""
    case = Case(dtype, 40, batch=1, heads=1, seq_q=512, seq_k=131, mask="q")
    t = case.tensors()
    t["mask"][..., 3] = False
    t["mask"][..., 200, 3] = True
    t["value"][..., 3, :] = NAN
    expected = ours(case, t)
    nan = expected["output"].isnan()
    assert nan[:, :, 200].all() and not nan.all()
    for threads in (2, 8):
        torch.set_num_threads(threads)
        assert_same(ours(case, t), expected)


@everywhere
@pytest.mark.parametrize("keys", [4, 5, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_at_a_low_lse_are_finite(dtype, keys):
    """After an odd number of keys tiles are padded, and there exp(0 - lse) is infinite."""
    query = torch.full((1, 1, 4, 8), 5.0, dtype=dtype)
    key = -query[:, :, :1].expand(-1, -1, keys, -1).contiguous()
    value = torch.randn(1, 1, keys, 8).to(dtype)
    output, lse, rest = torch.ops.onepass.attention_forward(query, key, value, scale=1.0)
    assert (lse < -88).all()
    *gradients, _ = torch.ops.onepass.attention_backward(
        torch.randn_like(output), None, query, key, value, output, lse, rest, scale=1.0, grad_mask=7
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_minus_infinity_is_no_sink(dtype):
    """Also for rows without a key: nothing is NaN."""
    case = Case(dtype, 16, seq_q=9, seq_k=5, window_right=0, bottom_right=True, sinks=F32)
    t = case.tensors()
    t["sinks"] = torch.full_like(t["sinks"], -INF)
    results = ours(case, t)
    without = {name: tensor for name, tensor in t.items() if name != "sinks"}
    expected = ours(replace(case, sinks=None), without)
    assert not results.pop("dsinks").any()
    assert_same(results, expected)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_another_call_left_in_memory_is_not_read(dtype, softcap):
    """Where a window skips parts of a tile, the workspace still holds older numbers as scores."""
    case = Case(dtype, 64, seq_q=128, seq_k=128, window_right=59, softcap=softcap)
    t = case.tensors()
    clean = ours(case, t)
    for _ in range(3):
        ours(case, {name: torch.full_like(tensor, NAN) for name, tensor in t.items()})
        assert_same(ours(case, t), clean)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 96, 128, 200])
@pytest.mark.parametrize("seq_q, seq_k, window", [(1, 1, -1), (19, 1, -1), (150, 150, 0)])
def test_scores_whose_key_has_all_the_weight_have_no_gradient(seq_q, seq_k, window, dim, dtype):
    """dP and delta cancel to the bit, see backward_ends.h."""
    case = Case(dtype, dim, seq_q=seq_q, seq_k=seq_k, window_left=window, window_right=window)
    gradients = ours(case, case.tensors())
    assert not gradients["dquery"].any() and not gradients["dkey"].any()
    assert gradients["dvalue"].any()
