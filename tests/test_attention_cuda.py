"""Attention's forward kernels under the emulator: values, layouts, traffic, races."""

from __future__ import annotations

from dataclasses import replace

import attention_cases
import emulated
import pytest
from attention_cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    Case,
    assert_same,
    forward,
    pairwise,
)
from attention_cuda_cases import (
    AXES,
    BRANCHES,
    CAUSAL,
    DTYPES,
    INSTANCES,
    LONG_DIMS,
    SEQUENCES,
    TILED,
    TILED_DIMS,
    branches,
    check,
    combination,
    dtypes,
    half_and_float,
    kinds,
    of_kind,
    on_cuda,
    once_per_tile,
)
from emulated_attention import PROGRAM
from emulated_ops import all_instances


def forward_instances(build: str) -> set[str]:
    return {name for name in all_instances(build, PROGRAM) if "attention_forward" in name}


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    return on_cuda(monkeypatch, ops=("forward",))


# ---- values --------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("head_dim", TILED_DIMS + LONG_DIMS)
@pytest.mark.grid(2)
def test_head_dims(head_dim, kind):
    check(Case(head_dim=head_dim, **of_kind(kind), batch=1, heads=1, seq_q=66, seq_k=130, **CAUSAL))


@half_and_float
@pytest.mark.parametrize("value_dim", [1, 24, 72, 200, 512])
@pytest.mark.grid
def test_value_dims(value_dim, dtype):
    for head_dim in (8, 64, 136):
        check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=40, seq_k=110))


# Of nothing but a row, of whole tiles, of one more and one less; several of both.
LENGTHS = [(1, 1), (1, 385), (385, 1), (128, 96), (127, 95), (129, 97), (64, 64), (150, 230)]


@kinds
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.grid(2)
def test_lengths(lengths, kind):
    seq_q, seq_k = lengths
    case = Case(batch=1, heads=1, seq_q=seq_q, seq_k=seq_k, **of_kind(kind))
    for window in ({}, dict(window_right=0), CAUSAL):
        if seq_k > 1 or kind in TILED:
            check(replace(case, **window))


WINDOW = dict(window_left=40, window_right=20)
# Of one key, beyond the keys, behind the diagonal, narrower and wider than a tile.
WINDOWS = [(0, 0), (5, 3), (0, -1), (-1, 5), (63, 0), (100, 30), (1000, 0)]


@half_and_float
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.grid
def test_windows(window, dtype):
    left, right = window
    for seq_q, seq_k in ((150, 230), (200, 90)):
        for bottom_right in (False, True):
            check(
                Case(dtype, 32, batch=1, heads=1, seq_q=seq_q, seq_k=seq_k, window_left=left,
                     window_right=right, bottom_right=bottom_right)
            )  # fmt: skip


@half_and_float
@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (6, 2), (5, 5)])
@pytest.mark.grid
def test_groups(heads, kv_heads, dtype):
    check(Case(dtype, 32, heads=heads, kv_heads=kv_heads, seq_q=40, seq_k=70, window_right=0))


@half_and_float
@pytest.mark.parametrize("pattern", ["", "b", "h", "q", "bh", "bq", "hq", "bhq"])
@pytest.mark.grid
def test_bias_and_mask_of_one_pattern(pattern, dtype):
    case = Case(dtype, 16, heads=2, seq_q=70, seq_k=200)
    check(replace(case, bias=pattern))
    check(replace(case, mask=pattern))
    check(replace(case, bias=pattern, mask=pattern, **CAUSAL))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("other", [F32, BF16, F16], ids=str)
@pytest.mark.grid
def test_dtypes_of_bias_and_sinks(dtype, other):
    for seq_k in (90, 136):  # rows that 16 bytes do not divide, and rows that they do
        check(Case(dtype, 32, heads=1, seq_q=60, seq_k=seq_k, bias="hq", bias_dtype=other))
    if other in (F32, dtype):
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=90, sinks=other))
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=40, sinks=other, alibi="b", **CAUSAL))


@kinds
@pytest.mark.parametrize(
    "options",
    [dict(alibi=""), dict(alibi="b", **CAUSAL), dict(softcap=2.0), dict(softcap=20.0, factor=9.0),
     dict(dropout_p=0.3), dict(factor=-0.7), dict(factor=0.0)],
    ids=str,
)  # fmt: skip
@pytest.mark.grid(2)
def test_options(options, kind):
    case = Case(heads=2, kv_heads=1, seq_q=70, seq_k=200, **of_kind(kind))
    check(replace(case, **options))


@half_and_float
@pytest.mark.parametrize("terms", [{}, dict(bias="hq"), dict(dropout_p=0.3)], ids=str)
def test_positions_of_a_shard(terms, dtype):
    """Far beyond 32 bits, and beginning within the eight keys that share random numbers."""
    case = Case(dtype, 40, batch=2, heads=2, seq_q=70, seq_k=130, window_left=60, window_right=20)
    for first in (0, 2**33):
        for key in (0, 3, 50, 117):
            check(replace(case, query_offset=first + 40, key_offset=first + key, **terms))


@kinds
@pytest.mark.parametrize("storage", ["packed", "packed used", "used", "paged"])
@pytest.mark.grid(2)
def test_sequences_of_their_own_lengths(storage, kind):
    case = Case(head_dim=40, value_dim=24, heads=2, kv_heads=1, storage=storage, lengths=SEQUENCES,
                **of_kind(kind))  # fmt: skip
    check(case)
    check(replace(case, **CAUSAL))
    check(replace(case, bias="bhq", mask="bq", alibi="b", sinks=F32, dropout_p=0.3, softcap=3.0,
                  window_left=40, bottom_right=True, bias_dtype=case.dtype))  # fmt: skip


@dtypes
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.grid
def test_page_sizes(page_size, dtype):
    sequences = ((1, 130), (9, 16), (4, 0), (0, 20), (64, 257))
    case = Case(dtype, 64, heads=2, kv_heads=1, storage="paged", lengths=sequences,
                page_size=page_size)  # fmt: skip
    check(case)
    check(replace(case, window_left=30, alibi="", sinks=dtype, **CAUSAL))


@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_pairs_of_options(row):
    check(combination(row))


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 72, 256])
def test_plain_kernels_take_what_tiles_do(monkeypatch, head_dim, dtype):
    calls = on_cuda(monkeypatch, ops=("forward",), path="plain")
    check(Case(dtype, head_dim, heads=2, kv_heads=1, seq_q=70, seq_k=130, **CAUSAL))
    check(Case(dtype, head_dim, heads=1, seq_q=33, seq_k=70, bias="bhq", dropout_p=0.3))
    assert {call["kernel"] for call in calls.done} == {"attention_forward_plain_kernel"}


@pytest.mark.parametrize(
    "dtype, head_dim, value_dim, kernel",
    [(dtype, head_dim, value_dim,
      "attention_forward_kernel" if dtype in TILED and max(head_dim, value_dim) <= 256 else
      "attention_forward_plain_kernel")
     for dtype in DTYPES for head_dim, value_dim in ((64, 64), (256, 1), (257, 8), (8, 264))],
    ids=str,
)  # fmt: skip
def test_which_kernel(cuda, dtype, head_dim, value_dim, kernel):
    check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=5, seq_k=9))
    assert {call["kernel"] for call in cuda.done} == {kernel}


# ---- layouts -------------------------------------------------------------------------------------

LAID_OUT = Case(
    BF16, 64, heads=2, kv_heads=2, seq_q=70, seq_k=130, window_left=90, bias="bhq", mask="bhq",
    **CAUSAL,
)  # fmt: skip


@half_and_float
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.grid
def test_each_tensor_in_each_layout(layout, dtype):
    """Bit for bit, whether rows are copied by 16 bytes, by 8, by 4 or by elements."""
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    expected = forward(case, t)
    names = ("query", "key", "value", "bias", "mask")
    every = {name: attention_cases.strided(t[name], layout) for name in names}
    for changed in ({name: every[name]} for name in names):
        assert_same(forward(case, t | changed), expected, str(list(changed)))
    assert_same(forward(case, t | every, out_bshd=True), expected)


@dtypes
@pytest.mark.parametrize("name", ["query", "key", "value", "output", "bias", "mask"])
@pytest.mark.grid(2)
def test_one_tensor_that_is_not_aligned(monkeypatch, name, dtype):
    case = replace(LAID_OUT, dtype=dtype, head_dim=40)
    t = case.tensors()
    expected = forward(case, t)
    for misalign in {dtype.itemsize, 4, 8}:
        on_cuda(monkeypatch, ops=("forward",), misalign=misalign, misaligned=name)
        assert_same(forward(case, t), expected)


@kinds
@pytest.mark.parametrize("head_dim", [1, 3, 40, 97, 200])
@pytest.mark.grid(2)
def test_no_tensor_is_aligned(monkeypatch, head_dim, kind):
    case = Case(head_dim=head_dim, heads=1, seq_q=70, seq_k=130, **CAUSAL, **of_kind(kind))
    on_cuda(monkeypatch, ops=("forward",), misalign=case.dtype.itemsize)
    check(case)


@half_and_float
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.grid
def test_expanded_tensors(dims, dtype):
    """Stride 0 is as good as copies."""
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    for name in ("query", "key", "value", "bias", "mask"):
        first = t[name]
        for dim in dims:
            first = first[(slice(None),) * dim + (slice(0, 1),)]
        expanded = first.expand(t[name].shape)
        copied = forward(case, t | {name: expanded.contiguous()})
        assert_same(forward(case, t | {name: expanded}), copied, name)


@half_and_float
@pytest.mark.parametrize("far", ["sequences", "heads", "rows"])
@pytest.mark.grid
def test_offsets_beyond_32_bits(monkeypatch, far, dtype):
    """The memory between what lies so far apart is never touched."""
    case = Case(dtype, 64, heads=2, seq_q=20, seq_k=70, bias="bhq", mask="bhq", **CAUSAL)
    t = case.tensors()
    expected = forward(case, t)
    on_cuda(monkeypatch, ops=("forward",), far=far)
    assert_same(forward(case, t), expected)


# ---- contract ------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("terms", [{}, dict(bias="bh", mask="b", alibi="b")], ids=["", "terms"])
@pytest.mark.grid
def test_a_row_does_not_depend_on_its_batch(terms, kind):
    """Bit for bit: nor on other heads, nor on how many other rows there are."""
    case = Case(head_dim=40, batch=3, heads=4, kv_heads=2, seq_q=130, seq_k=150, **CAUSAL, **terms,
                **of_kind(kind))  # fmt: skip
    t = case.tensors()
    whole = forward(case, t)
    for b, kv in ((slice(0, 1), slice(0, 1)), (slice(1, 3), slice(1, 2)), (slice(2, 3),) * 2):
        kv = slice(kv.start % 2, 2)
        h = slice(2 * kv.start, 2 * kv.stop)
        part = {"query": t["query"][b, h]} | {name: t[name][b, kv] for name in ("key", "value")}
        if terms:
            part |= dict(
                bias=t["bias"][b, h], mask=t["mask"][b], alibi_slopes=t["alibi_slopes"][b, h]
            )
        expected = {name: result[b, h] for name, result in whole.items()}
        assert_same(forward(case, part), expected, f"{b} {kv}")
    for rows in (slice(100, 130), slice(0, 1)):  # as another call, of these queries alone
        part = t | dict(query=t["query"][:, :, rows])
        shifted = replace(case, bottom_right=False, query_offset=rows.start + 20)
        expected = {name: result[:, :, rows] for name, result in whole.items()}
        assert_same(forward(shifted, part), expected, f"rows {rows}")


@kinds
def test_any_order_of_blocks_and_threads(monkeypatch, kind):
    case = replace(LAID_OUT, dropout_p=0.3, **of_kind(kind))
    t = case.tensors()
    expected = forward(case, t)
    for seed in (1, 2):
        on_cuda(monkeypatch, ops=("forward",), seed=seed)
        assert_same(forward(case, t), expected)


@half_and_float
def test_any_number_of_heads_in_turns(monkeypatch, dtype):
    """Each by itself, and two at a time, which leaves one of three over."""
    case = Case(dtype, 40, batch=3, heads=2, kv_heads=1, seq_q=150, seq_k=170, window_right=0)
    t = case.tensors()
    expected = forward(case, t)
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", "1")
    for share in (0, 2):
        monkeypatch.setenv("EMULATOR_L2", str(2 * share * 2 * t["key"][0].nbytes))
        assert_same(forward(case, t), expected)


@dtypes
def test_lse_rest_is_what_rounding_took(dtype):
    case = Case(dtype, 32, heads=1, seq_q=70, seq_k=90, bias="", window_right=0)
    t = case.tensors()
    t["bias"] = (t["bias"].double() - 1000).to(dtype)
    found, exact = forward(case, t), attention_cases.definition(case, t, F64)["lse"]
    rest = found.lse_rest
    assert rest.shape == found["lse"].shape
    if dtype is not F64:  # of which the definition is no better
        assert rest.any()
        with_rest = (found["lse"].double() + rest.double() - exact).abs().max()
        assert with_rest < (found["lse"].double() - exact).abs().max()


# ---- traffic and resources -----------------------------------------------------------------------

ONE_PASS = {
    "64": Case(BF16, 64, batch=1, seq_q=150, seq_k=230),
    "64, causal": Case(F16, 64, batch=2, seq_q=300, seq_k=230, window_right=0),
    "40 and 72": Case(BF16, 40, 72, heads=4, kv_heads=2, seq_q=150, seq_k=230, **CAUSAL),
    "128, window": Case(F16, 128, batch=1, seq_q=300, seq_k=200, window_left=20, window_right=5),
    "256": Case(BF16, 256, batch=1, seq_q=150, seq_k=100, window_right=0),
    "36 and 70": Case(BF16, 36, 70, batch=1, seq_q=150, seq_k=130),  # rows in pieces of 8 and 4
    "8": Case(BF16, 8, batch=1, seq_q=150, seq_k=230),
    "float32": Case(F32, 64, heads=2, kv_heads=1, seq_q=150, seq_k=230, **CAUSAL),
    "float64": Case(F64, 64, batch=1, seq_q=70, seq_k=100),
}  # fmt: skip
ONE_PASS["float32 as TF32"] = replace(ONE_PASS["float32"], tf32=True)


def counted(cuda, case: Case) -> dict:
    forward(case, case.tensors())
    return cuda.done[-1]


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass(cuda, name):
    """Q, O and the LSE once, K and V once for each tile of queries that sees them; to the byte."""
    case = ONE_PASS[name]
    call = counted(cuda, case)
    assert call["read"] == sum(once_per_tile(case, call["rows_per_tile"]))
    statistics = 2 * (8 if case.dtype is F64 else 4)
    row = (case.value_dim or case.head_dim) * case.dtype.itemsize + statistics
    assert call["written"] == case.batch * case.heads * case.seq_q * row
    assert call["workspace_bytes"] == 0 and call["launches"] == 1


TERMS = [
    (dict(bias="bhq"), 2), (dict(mask="q"), 1), (dict(bias="", bias_dtype=F32, mask="bh"), 5),
    (dict(alibi="b"), 0), (dict(dropout_p=0.3), 0), (dict(sinks=F32), 0), (dict(softcap=3.0), 0),
]  # fmt: skip


@pytest.mark.parametrize("terms, size", TERMS, ids=str)
@pytest.mark.parametrize("name", ["64", "128, window", "256"])
def test_terms_of_scores_are_read_once(cuda, name, terms, size):
    """Those of scores that count, in groups of 8 keys where 16 bytes divide them; numbers of a
    head, and the seed, by each thread for itself."""
    case = replace(ONE_PASS[name], dtype=BF16, **terms)
    call = counted(cuda, case)
    least = sum(once_per_tile(case, call["rows_per_tile"]))
    least += size * int(case.allowed().sum()) * case.batch * case.heads
    (launch,) = call["launched"]
    groups = size * 2 * 7 * case.seq_q * case.batch * case.heads
    assert least <= call["read"] <= least + groups + 24 * launch.threads * launch.blocks
    assert call["workspace_bytes"] == 0


def test_pages_are_read_once(cuda):
    """Beside their numbers, which are looked up for every row."""
    paged = Case(BF16, 64, storage="paged", lengths=((70, 130), (150, 40)), page_size=16)
    packed = replace(paged, storage="packed", bias="bhq")
    read = [counted(cuda, case)["read"] for case in (paged, packed)]
    bias = 2 * 2 * (70 * 130 + 150 * 40)
    assert read[0] <= read[1] - bias + 2 * 2 * (130 + 2 * 40) * 16 * 4


@kinds
@pytest.mark.parametrize("limit", [99, 163, 227])
@pytest.mark.grid
def test_shared_memory_fits_every_device(monkeypatch, limit, kind):
    """Of compute capability 8.6, 8.9 and 12.0, of 8.0, and of 9.0 and 10.0."""
    cuda = on_cuda(monkeypatch, ops=("forward",), shared=limit * 1024)
    case = Case(batch=1, heads=1, seq_q=3, seq_k=5, **of_kind(kind))
    for head_dim in (64, 128, 256, 512):
        for terms in ({}, dict(bias="")):
            call = counted(cuda, replace(case, head_dim=head_dim, **terms))
            assert 0 < call["shared"] <= limit * 1024
            # A multiprocessor has 1 KiB more than a block may have, and keeps 1 KiB of each.
            two_fit = 2 * (call["shared"] + 1024) <= (limit + 1) * 1024
            if kind in TILED and head_dim <= 256:
                assert two_fit == (head_dim <= 128 or limit == 227)


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("shared", [99, 163])
@pytest.mark.grid
def test_tiles_of_fewer_keys_where_shared_memory_is_short(monkeypatch, shared, dtype):
    """So that two blocks fit; the bytes that are read and written stay the same."""
    cuda = on_cuda(monkeypatch, ops=("forward",), shared=shared * 1024)
    for head_dim, value_dim, window in ((72, 128, {}), (128, 72, CAUSAL), (96, 96, WINDOW)):
        for lengths in ((150, 230), (129, 33), (1, 65), (130, 31)):
            case = Case(dtype, head_dim, value_dim, batch=1, heads=2, kv_heads=1, seq_q=lengths[0],
                        seq_k=lengths[1], **window)  # fmt: skip
            check(case)
            (launch,) = cuda.done[-1]["launched"]
            assert launch.shared == 128 * (128 + 2 * (32 if shared == 99 else 64)) * 2
            assert cuda.done[-1]["read"] == sum(once_per_tile(case, 128))


# ---- every instance, in every build --------------------------------------------------------------


@pytest.mark.parametrize("build", emulated.SLOW_UNDER_SANITIZERS)
def test_each_instance(monkeypatch, build):
    """Without races or bad accesses; none is left out."""
    calls = on_cuda(monkeypatch, ops=("forward",), build=build, seed=1)
    for case in INSTANCES:
        check(case)
    calls.shared = 99 * 1024
    for case in INSTANCES:
        if case.dtype in TILED and case.head_dim == 72 and case.bias is None:
            check(case)
    assert calls.instances == forward_instances(build)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["address", "thread"])
@branches
def test_sanitizers_are_silent(monkeypatch, name, kind, build):
    """On the branches within an instance that the test above does not take."""
    on_cuda(monkeypatch, ops=("forward",), build=build, seed=2)
    case = replace(Case(head_dim=40, heads=2, kv_heads=1, **of_kind(kind)), **BRANCHES[name])
    t = case.tensors()
    forward(case, t)
