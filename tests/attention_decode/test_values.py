"""Attention against a KV cache: values of every option and of their combinations.

Every result, and every row that was appended, is held to the reference in float64 by the numerics
rule; `base` is torch's function on each sequence's gathered keys where it has one. Rows that
are not keys are NaN, and memory that must not be written is compared bit for bit.
"""

from dataclasses import replace

import pytest
import torch

from onepass import reference
from tests.attention_decode.cases import DTYPES, Case, assert_same, check, definition, ours, read
from tests.emulator.executors import everywhere
from tests.support.dtypes import F32, F64
from tests.support.pairs import drawn, pairwise

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# No key, one key, a page of 16 and one less and more, likewise tiles and chunks (256 on CPU, 128 on
# CUDA).
LENGTHS = (0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 513, 1000)
GROUPS = [(1, 1), (4, 1), (8, 2), (6, 6), (12, 4), (24, 1)]  # heads, kv_heads
HEAD_DIMS = (1, 8, 40, 59, 64, 96, 111, 128, 160, 256, 264, 512)
QUERIES = (1, 2, 3, 7, 16, 17)
WINDOWS = [(-1, -1), (-1, 0), (60, 0), (33, 17), (3, 130), (0, 0), (2000, 0), (-1, 5)]

# ---- one thing at a time -------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("new_rows", [-1, 1, 3])
@pytest.mark.grid(2)
def test_lengths(executor, new_rows, page_size, dtype):
    # The emulator runs fewer cases, because it is slow.
    lengths = (*LENGTHS[:8], 400) if executor.name == "emulated" else LENGTHS
    case = Case(dtype, lengths=lengths, new_rows=new_rows, page_size=page_size)
    check(case)
    check(replace(case, seq_q=3, window_right=0))


@dtypes
@pytest.mark.parametrize("page_size", [0, 64])
def test_long_caches(page_size, dtype):
    """Beyond 4,096 and 16,384 rows, beside short ones."""
    case = Case(dtype, 64, heads=4, kv_heads=1, lengths=(4321, 2), page_size=page_size)
    check(replace(case, seq_q=2, window_right=0, new_rows=1))
    check(replace(case, head_dim=40, heads=2, lengths=(130, 16_500), new_rows=1))


@everywhere
@dtypes
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype):
    case = Case(dtype, head_dim, seq_q=2, lengths=(150, 9), new_rows=2, window_right=0)
    check(case)
    check(replace(case, value_dim=24, page_size=7, new_rows=-1))
    check(replace(case, head_dim=64, value_dim=head_dim, seq_q=1, heads=2, kv_heads=2))


@dtypes
@pytest.mark.parametrize(
    "seq_q, heads, kv_heads", [(64, 4, 2), (65, 4, 2), (129, 2, 2), (40, 8, 1)]
)
@pytest.mark.grid  # the pairs of options hold the others
def test_many_queries(seq_q, heads, kv_heads, dtype):
    """Blocks of query rows as pieces of work, from 129 rows of a kv head on."""
    case = Case(
        dtype, 40, 24, seq_q=seq_q, heads=heads, kv_heads=kv_heads, lengths=(140, 600, 0, 5)
    )
    check(case)
    check(replace(case, window_right=0, new_rows=seq_q, page_size=16, pads=(3, 0), rotary="halves"))
    check(replace(case, window_left=20, window_right=0, new_rows=3, sinks=F32, softcap=3.0))
    check(replace(case, alibi="b", scattered=True))


@everywhere
@dtypes
def test_the_whole_cache_without_lengths(dtype):
    case = Case(dtype, 32, seq_q=2, lengths=(90, 90), room=0, window_right=0)
    for of in (case, replace(case, page_size=15)):
        t = of.tensors()
        if of.page_size:
            t["block_table"] = t["block_table"][:, :6]
        expected = ours(of, t)
        del t["cache_seqlens"]
        assert_same(ours(of, t), expected)


# ---- rotary embedding ----------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 16, 26])
@pytest.mark.grid(2)
def test_rotary(rotary_dim, rotary, dtype):
    for rotary_dtype in {F32, dtype}:
        case = Case(dtype, 40, seq_q=3, new_rows=3, rotary=rotary, rotary_dim=rotary_dim,
                    rotary_dtype=rotary_dtype, lengths=(0, 5, 257))  # fmt: skip
        check(case)  # every query at the first new row
        check(replace(case, window_right=0, pads=(0, 7), head_dim=59))
        check(replace(case, window_left=50, page_size=7, heads=24, kv_heads=1))


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 9])
def test_the_reference_is_that_of_attention(window_left):
    """For each sequence alone, of the keys that it has after an append."""
    case = Case(F32, 16, 8, seq_q=3, new_rows=3, window_left=window_left, window_right=0,
                pads=(0, 2), alibi="", sinks=F32, softcap=3.0)  # fmt: skip
    t = case.tensors()
    found = definition(case, t, F64)
    options = case.options() | {name: t[name].double() for name in ("alibi_slopes", "sinks")}
    for b, (pad, used) in enumerate(zip(case.padding, case.used, strict=True)):
        rows = [
            torch.cat([read(t, cache, b, pad, used), t[new][b]], 1)[None].double()
            for cache, new in (("k_cache", "key"), ("v_cache", "value"))
        ]
        query = t["query"][b : b + 1].double()
        output, lse = reference.attention.attention(query, *rows, **options, bottom_right=True)
        torch.testing.assert_close(found["output"][b : b + 1], output)
        torch.testing.assert_close(found["lse"][b : b + 1], lse)


# ---- everything with everything ------------------------------------------------------------------

# Any two values of any two options occur together at least once.
AXES = dict(
    lengths=[(0, 1, 257), (15, 16, 17), (6, 7, 8), (63, 64, 65), (127, 128), (513, 3), (1000, 2)],
    head_dim=(1, 8, 40, 59, 64, 128, 256, 264),
    seq_q=QUERIES,
    window=WINDOWS,
    page_size=[0, 0, 1, 7, 16, 64],
    group=GROUPS,
    new_rows=[-1, 0, 1, 5, "seq_q"],
    rotary=[None, None, ("interleaved", 0, None), ("halves", 0, F32), ("interleaved", 6, F32),
            ("halves", 6, None)],
    dtype=DTYPES,
    pads=[(), (0, 3, 70), (1,)],
    alibi=[None, "", "b"],
    sinks=[None, F32, "dtype"],
    softcap=[0.0, 2.0],
    value_dim=[0, 24],
    scattered=[False, True],
    out_bshd=[False, True],
)  # fmt: skip


def combination(row: dict) -> Case:
    row = dict(row)
    (left, right), (heads, kv_heads) = row.pop("window"), row.pop("group")
    if row["new_rows"] == "seq_q":
        row["new_rows"] = row["seq_q"]
    if row["sinks"] == "dtype":
        row["sinks"] = row["dtype"]
    rotary = row.pop("rotary")
    if rotary and row["new_rows"] >= 0 and row["head_dim"] > 6:
        row |= dict(zip(("rotary", "rotary_dim", "rotary_dtype"), rotary, strict=True))
    return Case(window_left=left, window_right=right, heads=heads, kv_heads=kv_heads, **row)


ROWS = pairwise(AXES) + drawn(AXES, 6)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_pairs_of_options(row):
    check(combination(row))
