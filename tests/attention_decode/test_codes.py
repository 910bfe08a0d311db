"""Caches that hold codes of 8 bits: rows are quantised by the definition, bit for bit, and
attention is that to the numbers that they stand for, by the numerics rule."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass import functional
from onepass.reference.attention_decode import quantize_rows
from tests.attention_decode.cases import (
    DTYPES,
    NAN,
    ROTARY,
    Case,
    appended,
    assert_bits,
    base,
    call,
    check,
    definition,
    read,
    same_bits,
    with_copied_caches,
)
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = [pytest.mark.isa]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

CASES = {
    "a token": Case(lengths=(300, 0, 1, 70), new_rows=1),
    "one head a head": Case(heads=3, kv_heads=3, lengths=(600, 20), head_dim=128),
    "pages": Case(page_size=16, new_rows=3, seq_q=3, window_right=0, lengths=(513, 16, 0)),
    "any cache": Case(scattered=True, pads=(0, 3, 70), new_rows=2, window_left=40, window_right=0),
    "odd sizes": Case(head_dim=59, value_dim=111, heads=6, kv_heads=6, lengths=(130, 9), seq_q=2),
    "one column": Case(head_dim=1, value_dim=24, lengths=(40, 2), new_rows=1),
    "drafted": Case(seq_q=7, new_rows=7, heads=8, kv_heads=1, window_right=0, lengths=(257, 2)),
    "blocks of queries": Case(seq_q=90, new_rows=90, window_right=0, lengths=(300, 5), head_dim=40),
    "terms": Case(alibi="b", sinks=F32, softcap=3.0, lengths=(200, 7), new_rows=1, out_bshd=True),
}
cases = pytest.mark.parametrize("name", CASES)


def coded(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Caches of codes, in larger buffers, and their scales. What is no key has the scale NaN."""
    t = dict(t)
    for name in ("k", "v"):
        codes, scale = quantize_rows(t[f"{name}_cache"])
        buffer = torch.full((codes.numel() + 128,), 77, dtype=torch.int8)
        t[f"{name}_cache"] = buffer[64:-64].view(codes.shape).copy_(codes)
        t[f"{name}_scale"] = scale
    return t


def copied(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return with_copied_caches(t) | {name: t[name].clone() for name in ("k_scale", "v_scale")}


def run(case: Case, t: dict[str, Tensor], **changes) -> tuple[Tensor, Tensor]:
    return call(case, t, k_scale=t["k_scale"], v_scale=t["v_scale"], **changes)


def numbers(t: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the caches hold, appended rows included, without the rows to append."""
    kept = {name: x for name, x in t.items() if name not in ("key", "value", *ROTARY)}
    for name in ("k", "v"):
        codes, scale = t[f"{name}_cache"], t[f"{name}_scale"]
        kept[f"{name}_cache"] = (codes.double() * scale.double()[..., None]).to(dtype)
    return kept


def compute(case: Case):
    t = copied(coded(case.tensors()))
    output, lse = run(case, t)
    t["cache_seqlens"] = t["cache_seqlens"] + case.appends
    reading = replace(case, new_rows=-1)
    found = dict(output=output, lse=lse)
    of_definition = definition(reading, numbers(t, F64), F64)
    return found, of_definition, base(reading, numbers(t, case.dtype))


@dtypes
@cases
def test_values(name, dtype):
    check(replace(CASES[name], dtype=dtype), compute)


# ---- what is written -----------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("page_size", [0, 7])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
def test_rows_are_quantised_after_their_rotation(rotary, page_size, dtype):
    """Those that a cache of numbers gets; nothing else is written."""
    case = Case(dtype, 59, 40, new_rows=5, page_size=page_size, rotary=rotary, rotary_dim=26)
    t = case.tensors()
    plain = with_copied_caches(t)
    call(case, plain)
    before = coded(t)
    after = copied(before)
    run(case, after)
    for name in ("k", "v"):
        expected = quantize_rows(torch.stack(appended(case, plain, f"{name}_cache")))
        for of, right in zip((f"{name}_cache", f"{name}_scale"), expected, strict=True):
            rows = after if "scale" not in of else {**after, of: after[of][..., None]}
            found = torch.stack(appended(case, rows, of)).reshape(right.shape)
            assert same_bits(found, right), of
            kept = before if "scale" not in of else {**before, of: before[of][..., None]}
            for b, used in enumerate(case.used):
                old, now = (read(x, of, b, 0, used) for x in (kept, rows))
                assert same_bits(old, now), of
    for name in ("k_cache", "v_cache"):
        storage = after[name].untyped_storage()
        ends = torch.tensor(storage.tolist(), dtype=torch.uint8)
        assert (ends[:64] == 77).all() and (ends[-64:] == 77).all()


ROWS = {
    "zeros": [0.0, -0.0, 0.0],
    "subnormal scale": [1.4e-45, -2.8e-45, 2e-43],
    "a scale that is 0": [1.4e-45, -1.4e-45, 0.0],
    "large": [3.4e38, -1.0, 1e37],
    "ties": [127.0, 2.5, -3.5],
    "NaN": [NAN, 1.0, 0.0],
    "inf": [math.inf, 1.0, -math.inf],
}


@pytest.mark.parametrize("name", ROWS)
def test_hard_rows(name):
    row = torch.tensor(ROWS[name]).view(1, 1, 1, 3)
    codes, scales = torch.ones(2, 1, 1, 4, 3, dtype=torch.int8), torch.ones(2, 1, 1, 4)
    output = functional.attention_with_kv_cache(
        torch.ones(1, 1, 1, 3), *codes, row, row, cache_seqlens=0, k_scale=scales[0],
        v_scale=scales[1], scale=0.0,
    )  # fmt: skip
    right, scale = quantize_rows(row)
    assert right.abs().max() <= 127
    for of, found in zip(codes, scales, strict=True):
        assert same_bits(of[:, :, :1], right) and same_bits(found[:, :, :1], scale)
        assert (of[:, :, 1:] == 1).all() and (found[:, :, 1:] == 1).all()
    assert torch.equal(output.isnan().any(), ~row.isfinite().all())
    if row.isfinite().all():
        assert torch.equal(output, right * scale[..., None])


def test_the_error_of_a_number_is_half_a_scale():
    rows = torch.randn(50, 64)
    codes, scale = quantize_rows(rows)
    assert torch.equal(scale, rows.abs().amax(-1) / 127)
    error = (codes.double() * scale.double()[:, None] - rows.double()).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 1e-5)).all() and error.max() > 0


# ---- bits ----------------------------------------------------------------------------------------


@cases
def test_bits_do_not_depend_on_threads_or_storage(name):
    case = replace(CASES[name], dtype=BF16)
    t = coded(case.tensors())
    expected = run(case, copied(t))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_bits(run(case, copied(t)), expected)
    other = replace(case, page_size=0 if case.page_size else 16, scattered=False)
    assert_bits(run(other, coded(other.tensors())), expected)


@pytest.mark.parametrize("page_size", [0, 16])
def test_codes_and_their_scale_in_one_row(page_size):
    """As the cache for transformers has them: four bytes after a row's codes."""
    case = Case(F16, 40, new_rows=2, page_size=page_size)
    t = coded(case.tensors())
    expected = run(case, copied(t))
    rows = {}
    for name in ("k", "v"):
        scale = t[f"{name}_scale"][..., None].view(torch.int8)
        row = torch.cat([t[f"{name}_cache"], scale], -1)
        rows |= {f"{name}_cache": row[..., :40], f"{name}_scale": row.view(F32)[..., -1]}
    assert_bits(run(case, t | rows), expected)


# ---- contract ------------------------------------------------------------------------------------


def test_autocast_leaves_the_query():
    query, key, value = (torch.randn(1, 2, 1, 8) for _ in range(3))
    codes, scales = torch.zeros(2, 1, 2, 4, 8, dtype=torch.int8), torch.ones(2, 1, 2, 4)
    with torch.autocast("cpu"):
        output = functional.attention_with_kv_cache(
            query, *codes, key.bfloat16(), value, cache_seqlens=0, k_scale=scales[0],
            v_scale=scales[1],
        )  # fmt: skip
    assert output.dtype is F32 and codes.any()


WRONG = {
    "k_scale must be given where k_cache has dtype int8, got none": dict(
        k_scale=None, v_scale=None
    ),
    "k_scale must be given together with v_scale, got v_scale alone": dict(k_scale=None),
    "k_scale must be given together with v_scale, got it alone": dict(v_scale=None),
    "k_cache must have dtype int8 with a scale for each row, got float32": dict(
        k_cache=torch.zeros(1, 2, 4, 8)
    ),
    "v_cache must have dtype int8 with a scale for each row, got uint8": dict(
        v_cache=torch.zeros(1, 2, 4, 8, dtype=torch.uint8)
    ),
    "v_scale must have dtype float32, got bfloat16": dict(v_scale=torch.ones(1, 2, 4).bfloat16()),
    "k_scale must have shape (1, 2, 4), got (1, 2, 4, 1)": dict(k_scale=torch.ones(1, 2, 4, 1)),
    "v_scale must have shape (1, 2, 4), got (1, 2, 5)": dict(v_scale=torch.ones(1, 2, 5)),
    "k_scale must not be expanded, it is written in place, got strides (8, 0, 1)": dict(
        k_scale=torch.ones(1, 2, 4).as_strided((1, 2, 4), (8, 0, 1))
    ),
    "v_scale must not require gradients, use torch.no_grad(), got one that does": dict(
        v_scale=torch.ones(1, 2, 4, requires_grad=True)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_messages(message):
    new = torch.randn(1, 2, 1, 8)
    given = dict(
        k_cache=torch.zeros(1, 2, 4, 8, dtype=torch.int8), k_scale=torch.ones(1, 2, 4),
        v_cache=torch.zeros(1, 2, 4, 8, dtype=torch.int8), v_scale=torch.ones(1, 2, 4),
    ) | WRONG[message]  # fmt: skip
    with pytest.raises(RuntimeError) as error:
        functional.attention_with_kv_cache(new, key=new, value=new, cache_seqlens=0, **given)
    assert message in str(error.value)
    assert not given["k_cache"].any() and not given["v_cache"].any()


def test_scales_in_one_place():
    new, scale = torch.randn(1, 2, 1, 8), torch.ones(1, 2, 4)
    codes = torch.zeros(2, 1, 2, 4, 8, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="v_scale must not lie where k_scale does"):
        functional.attention_with_kv_cache(
            new, *codes, new, new, cache_seqlens=0, k_scale=scale, v_scale=scale
        )
    assert not codes.any()


def test_refused_on_cuda(cuda):
    case = Case(lengths=(9,))
    message = "k_scale must not be given on CUDA, where no kernel reads codes, got one"
    with pytest.raises(RuntimeError, match=message):
        run(case, coded(case.tensors()))
