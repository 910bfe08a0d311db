"""Attention's backward kernels under the emulator: all six gradients, layouts, order, races.

The output and the LSE are the CPU's, so that what fails here is a fault of the backward; but for
TF32, of which the CPU has none.
"""

from __future__ import annotations

from dataclasses import replace

import attention_cases
import emulated
import pytest
import torch
from attention_cases import (
    BF16,
    F16,
    F32,
    F64,
    GRADIENTS,
    LAYOUTS,
    Case,
    assert_same,
    backward,
    check,
    forward,
    ours,
    pairwise,
)
from attention_cuda_cases import (
    AXES,
    BRANCHES,
    CAUSAL,
    INSTANCES,
    LONG_DIMS,
    SEQUENCES,
    TILED,
    TILED_DIMS,
    branches,
    combination,
    dtypes,
    half_and_float,
    kinds,
    of_kind,
    on_cuda,
)
from emulated_attention import PROGRAM
from emulated_ops import all_instances


def backward_instances(build: str) -> set[str]:
    others = ("attention_forward", "attention_decode")
    names = all_instances(build, PROGRAM)
    return {name for name in names if not any(other in name for other in others)}


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    return on_cuda(monkeypatch, ops=("backward",))


# ---- gradients -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("head_dim", TILED_DIMS + LONG_DIMS)
@pytest.mark.grid(2)
def test_head_dims(head_dim, kind):
    check(
        Case(
            head_dim=head_dim,
            **of_kind(kind),
            batch=1,
            heads=1,
            seq_q=66,
            seq_k=130,
            dlse=True,
            **CAUSAL,
        )
    )


@half_and_float
@pytest.mark.parametrize("value_dim", [1, 24, 72, 200, 512])
@pytest.mark.grid
def test_value_dims(value_dim, dtype):
    for head_dim in (8, 64, 136):
        check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=40, seq_k=110))


# Of nothing but a row, of whole tiles, of one more and one less; several of both.
LENGTHS = [(1, 1), (1, 385), (385, 1), (128, 64), (127, 63), (129, 65), (64, 128), (150, 230)]


@kinds
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.grid(2)
def test_lengths(lengths, kind):
    seq_q, seq_k = lengths
    case = Case(batch=1, heads=1, seq_q=seq_q, seq_k=seq_k, **of_kind(kind))
    for window in ({}, dict(window_right=0), CAUSAL):
        # Of one key all gradients of scores are what cancels, see attention_cases.pool.
        if seq_k > 1 or (case.dtype is not F32 and not window):
            check(replace(case, **window))


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
def test_dtypes_of_bias_and_sinks(dtype, other):
    check(Case(dtype, 32, heads=1, seq_q=60, seq_k=90, bias="hq", bias_dtype=other))
    if other in (F32, dtype):
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=90, sinks=other, dlse=True))
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=40, sinks=other, alibi="b", **CAUSAL))


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [16, 72, 160])
def test_rows_of_bias_and_mask_that_no_16_bytes_divide(head_dim, dtype):
    """Of a mask those that 16 bytes divide, 4, 2 or one; of a bias in pairs or one by one."""
    for seq_k in (144, 148, 146, 145):
        case = Case(dtype, head_dim, batch=1, heads=1, seq_q=70, seq_k=seq_k, bias="q", mask="q",
                    window_left=100, window_right=60)  # fmt: skip
        check(case)
        if seq_k == 148:
            check(replace(case, bias_dtype=F32, dropout_p=0.3, key_offset=3))
        if seq_k == 145:
            check(replace(case, bias="b", mask="b"))  # one row for all queries


@kinds
@pytest.mark.parametrize(
    "options",
    [dict(alibi=""), dict(alibi="b", **CAUSAL), dict(softcap=2.0), dict(softcap=20.0, factor=9.0),
     dict(dropout_p=0.3), dict(dropout_p=0.3, dlse=True, bias="q"), dict(factor=-0.7),
     dict(factor=0.0)],
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
@pytest.mark.parametrize("storage", ["packed", "packed used", "used"])
@pytest.mark.grid(2)
def test_sequences_of_their_own_lengths(storage, kind):
    case = Case(head_dim=40, value_dim=24, heads=2, kv_heads=1, storage=storage, lengths=SEQUENCES,
                **of_kind(kind))  # fmt: skip
    check(case)
    check(replace(case, **CAUSAL))
    check(replace(case, bias="bhq", mask="bq", alibi="b", sinks=F32, dropout_p=0.3, softcap=3.0,
                  window_left=40, bottom_right=True, bias_dtype=case.dtype, dlse=True))  # fmt: skip


@pytest.mark.parametrize("row", pairwise(AXES, 1), ids=lambda row: "-".join(map(str, row.values())))
def test_pairs_of_options(row):
    if row["storage"] == "paged":
        row = row | dict(storage="packed used")
    check(combination(row))


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 72, 256])
def test_plain_kernels_take_what_tiles_do(monkeypatch, head_dim, dtype):
    calls = on_cuda(monkeypatch, ops=("backward",), path="plain")
    check(Case(dtype, head_dim, heads=2, kv_heads=1, seq_q=70, seq_k=130, **CAUSAL))
    check(Case(dtype, head_dim, heads=1, seq_q=33, seq_k=70, bias="bhq", dropout_p=0.3, dlse=True))
    assert {call["kernel"] for call in calls.done} == {"attention_backward_plain_kernel"}


EVERYTHING = Case(
    BF16, 24, 40, heads=4, kv_heads=2, seq_q=70, seq_k=150, window_left=100, window_right=0,
    bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0, dropout_p=0.25,
    dlse=True,
)  # fmt: skip


@half_and_float
def test_each_gradient_alone(monkeypatch, dtype):
    on_cuda(monkeypatch, ops=("backward",), deterministic=True)
    case = replace(EVERYTHING, dtype=dtype)
    t = case.tensors()
    outputs = forward(case, t)
    every = backward(case, t, outputs)
    for name in GRADIENTS:
        alone = backward(case, t, outputs, wanted=[name])
        assert_same(alone, {f"d{name}": every[f"d{name}"]}, name)
    for names in (("query", "value"), ("key", "bias"), ("sinks", "alibi_slopes"), ()):
        expected = {f"d{name}": every[f"d{name}"] for name in GRADIENTS if name in names}
        assert_same(backward(case, t, outputs, wanted=names), expected, str(names))


@half_and_float
def test_gradients_of_the_lse_alone(dtype):
    case = Case(dtype, 32, seq_q=66, seq_k=80, window_right=0, bias="q", sinks=dtype, dlse=True)

    def compute(drawn: Case):
        t = {name: x for name, x in drawn.tensors().items() if name != "doutput"}
        found = ours(drawn, t)
        assert not found["dvalue"].any()
        return found, attention_cases.definition(drawn, t, F64), attention_cases.base(drawn, t)

    check(case, compute)


@half_and_float
def test_a_call_without_gradients_of_outputs_gives_zeros(dtype):
    case = Case(dtype, seq_q=20, seq_k=20, sinks=F32, bias="")
    t = {name: x for name, x in case.tensors().items() if name != "doutput"}
    gradients = backward(case, t, forward(case, t))
    assert set(gradients) == {"dquery", "dkey", "dvalue", "dbias", "dsinks"}
    assert all(not gradient.any() for gradient in gradients.values())


@half_and_float
def test_without_lse_rest_it_is_zero(dtype):
    case = replace(EVERYTHING, dtype=dtype)
    t = case.tensors()
    outputs = forward(case, t)
    zero = attention_cases.Results(outputs, torch.zeros_like(outputs.lse_rest))
    assert_same(backward(case, t, dict(outputs)), backward(case, t, zero))


# ---- layouts -------------------------------------------------------------------------------------

LAID_OUT = Case(
    BF16, 64, heads=2, kv_heads=2, seq_q=70, seq_k=130, window_left=90, bias="hq", mask="bhq",
    **CAUSAL,
)  # fmt: skip


@half_and_float
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.grid
def test_each_tensor_in_each_layout(monkeypatch, layout, dtype):
    """Bit for bit, whether rows are copied by 16 bytes, by 8, by 4 or by elements."""
    on_cuda(monkeypatch, ops=("backward",), deterministic=True)
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    outputs = forward(case, t)
    expected = backward(case, t, outputs)
    names = ("query", "key", "value", "bias", "mask", "doutput")
    every = {name: attention_cases.strided(t[name], layout) for name in names}
    for changed in ({name: every[name]} for name in names):
        assert_same(backward(case, t | changed, outputs), expected, str(list(changed)))
    outputs["output"] = attention_cases.strided(outputs["output"], layout)
    assert_same(backward(case, t | every, outputs, out_bshd=True), expected)


@dtypes
@pytest.mark.parametrize(
    "name", "query key value doutput output dquery dkey dvalue bias mask".split()
)
@pytest.mark.grid(2)
def test_one_tensor_that_is_not_aligned(monkeypatch, name, dtype):
    case = replace(LAID_OUT, dtype=dtype, head_dim=40, dlse=True)
    t = case.tensors()
    outputs = forward(case, t)
    found = []
    for misalign in sorted({0, dtype.itemsize, 4, 8}):
        on_cuda(monkeypatch, ops=("backward",), misalign=misalign, misaligned=name,
                deterministic=True)  # fmt: skip
        found.append(backward(case, t, outputs))
        assert_same(found[-1], found[0], str(misalign))


@kinds
@pytest.mark.parametrize("head_dim", [1, 3, 40, 97, 200])
@pytest.mark.grid(2)
def test_no_tensor_is_aligned(monkeypatch, head_dim, kind):
    case = Case(
        head_dim=head_dim, heads=1, seq_q=70, seq_k=130, dlse=True, **CAUSAL, **of_kind(kind)
    )
    on_cuda(monkeypatch, ops=("backward",), misalign=case.dtype.itemsize)
    check(replace(case, sinks=case.dtype))


@half_and_float
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=str)
def test_expanded_tensors(monkeypatch, dims, dtype):
    """Stride 0 is as good as copies, upstream too."""
    on_cuda(monkeypatch, ops=("backward",), deterministic=True)
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    for name in ("query", "key", "value", "bias", "mask", "doutput"):
        first = t[name]
        for dim in dims:
            first = first[(slice(None),) * dim + (slice(0, 1),)]
        expanded = first.expand(t[name].shape)
        copied = t | {name: expanded.contiguous()}
        outputs = forward(case, copied)
        expected = backward(case, copied, outputs)
        assert_same(backward(case, t | {name: expanded}, outputs), expected, name)


@half_and_float
@pytest.mark.parametrize("far", ["sequences", "heads", "rows"])
def test_offsets_beyond_32_bits(monkeypatch, far, dtype):
    """The memory between what lies so far apart is never touched."""
    case = Case(dtype, 64, heads=2, seq_q=20, seq_k=70, bias="bhq", mask="bhq", **CAUSAL)
    t = case.tensors()
    outputs = forward(case, t)
    found = []
    for where in (None, far):
        on_cuda(monkeypatch, ops=("backward",), far=where, deterministic=True)
        found.append(backward(case, t, outputs))
    assert_same(found[1], found[0])


# ---- contract ------------------------------------------------------------------------------------

# Everything that several blocks add to: queries that many tiles of keys are seen by, groups of
# heads, broadcast biases, sinks and slopes.
SHARED = {
    "long": Case(F16, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=500),
    "causal": Case(F16, 128, batch=1, heads=2, seq_q=300, seq_k=400, **CAUSAL),
    "wide": Case(F16, 200, batch=1, heads=1, seq_q=130, seq_k=250),
    "everything": replace(EVERYTHING, bias="", seq_k=300),
    "packed": replace(EVERYTHING, storage="packed used", seq_k=300, dtype=F16),
    "float32": Case(F32, 40, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=200, bias="q"),
    "tf32": Case(F32, 40, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=200, bias="q", tf32=True),
    "float64": Case(F64, 24, batch=2, heads=2, kv_heads=1, seq_q=70, seq_k=100, bias="", sinks=F64),
    "float32, everything": replace(EVERYTHING, dtype=F32, bias=""),
    "long dim": Case(BF16, 264, batch=1, heads=2, kv_heads=1, seq_q=70, seq_k=150, bias="h"),
}  # fmt: skip
shared = pytest.mark.parametrize("name", SHARED)


def in_orders(monkeypatch, case: Case, **options) -> list[dict]:
    """The gradients with one block after another, with a few at the same time and with all."""
    t = case.tensors()
    outputs = forward(case, t)
    found = []
    for seed, resident in enumerate((1, 3, 100)):
        on_cuda(monkeypatch, ops=("backward",), seed=seed, resident=resident, **options)
        found.append(backward(case, t, outputs))
    return found


@shared
def test_deterministic_is_bitwise_repeatable(monkeypatch, name):
    """In any order of blocks and threads, and with as little shared memory as any device has."""
    first, *others = in_orders(monkeypatch, SHARED[name], deterministic=True)
    others += in_orders(monkeypatch, SHARED[name], deterministic=True, shared=99 * 1024)[1:2]
    for other in others:
        assert_same(other, first)


@shared
def test_any_order_is_right(monkeypatch, name):
    """By the numerics rule, also where sums are atomic; what is no such sum is repeatable."""
    on_cuda(monkeypatch, ops=("backward",), seed=7, resident=3)
    check(SHARED[name])
    first, *others = in_orders(monkeypatch, SHARED[name], deterministic=False)
    for other in others:
        for gradient in first.keys() - {"dquery"}:
            assert torch.equal(first[gradient], other[gradient]), gradient
    if name in ("long", "causal", "wide"):  # else the test above would say nothing
        assert not all(torch.equal(first["dquery"], other["dquery"]) for other in others)


@pytest.mark.parametrize("dtype, head_dim, pair_bytes", [(BF16, 40, 64_000), (F32, 150, 600_000)])
@pytest.mark.parametrize("share", [0, 2])
def test_any_number_of_heads_in_turns(monkeypatch, dtype, head_dim, pair_bytes, share):
    """Each by itself, and two at a time, which leaves one of three over. A pair shares Q, dO and
    dQ, in float32 K, V, Q and dO."""
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", "1")
    monkeypatch.setenv("EMULATOR_L2", str(2 * share * pair_bytes))
    check(Case(dtype, head_dim, batch=3, heads=2, kv_heads=1, seq_q=100, seq_k=300, **CAUSAL))


@half_and_float
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_do_not_depend_on_other_sequences(monkeypatch, deterministic, dtype):
    """Bit for bit where sums are in order, of each (batch, kv head) of its own."""
    on_cuda(monkeypatch, ops=("backward",), deterministic=deterministic)
    case = Case(dtype, 40, batch=3, heads=4, kv_heads=2, seq_q=70, seq_k=150, **CAUSAL)
    t = case.tensors()
    outputs = forward(case, t)
    whole = backward(case, t, outputs)
    for b, kv in ((slice(0, 1), slice(0, 1)), (slice(1, 3), slice(1, 2))):
        h = slice(2 * kv.start, 2 * kv.stop)
        part = {"query": t["query"][b, h], "doutput": t["doutput"][b, h]}
        part |= {name: t[name][b, kv] for name in ("key", "value")}
        saved = {name: result[b, h] for name, result in outputs.items()}
        saved = attention_cases.Results(saved, outputs.lse_rest[b, h])
        found = backward(case, part, saved)
        expected = {n: x[b, h if n == "dquery" else kv] for n, x in whole.items()}
        if not deterministic:
            del found["dquery"], expected["dquery"]
        assert_same(found, expected, f"{b} {kv}")


# ---- traffic and resources -----------------------------------------------------------------------

ONE_PASS = {
    "64": Case(BF16, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=400),
    "64, causal": Case(F16, 64, batch=2, heads=2, seq_q=300, seq_k=300, window_right=0),
    "40 and 72": Case(BF16, 40, 72, batch=1, heads=4, kv_heads=2, seq_q=150, seq_k=230, **CAUSAL),
    "128, window": Case(F16, 128, batch=1, seq_q=300, seq_k=200, window_left=20, window_right=5),
    "256": Case(BF16, 256, batch=1, seq_q=150, seq_k=100, window_right=0),
    "36 and 70": Case(BF16, 36, 70, batch=1, seq_q=150, seq_k=130),  # rows in pieces of 8 and 4
    "float32": Case(F32, 64, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=230, **CAUSAL),
    "float64": Case(F64, 64, batch=1, seq_q=70, seq_k=100),
}  # fmt: skip
ONE_PASS["float32 as TF32"] = replace(ONE_PASS["float32"], tf32=True)


def counted(cuda, case: Case, **changes) -> dict:
    t = case.tensors()
    backward(case, t, forward(case, t), **changes)
    return cuda.done[-1]


def keys_of_tile(case: Case, call: dict) -> int:
    """As many as give the blocks that the plan has: one for each tile of each key head."""
    tiles = call["splits"] // (case.batch * (case.kv_heads or case.heads))
    return next(keys for keys in (32, 64, 128) if -(-case.seq_k // keys) == tiles)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [name for name in ONE_PASS if "float" not in name])
def test_one_pass(cuda, name, deterministic):
    """K, V, dK and dV once; Q and dO, and dQ in float32, once for each tile of keys that sees them,
    by whole tiles of queries; O once more, with dO. To the byte but for rows that fill up eight.
    """
    case = ONE_PASS[name]
    call = counted(cuda, case, deterministic=deterministic)
    tile, seen = call["rows_per_tile"], case.allowed()
    pairs = 0  # of a query and a tile of keys
    for keys in seen.split(keys_of_tile(case, call), 1):
        for queries in keys.split(tile):
            pairs += len(queries) * bool(queries.any())
    heads, key_heads = case.batch * case.heads, case.batch * (case.kv_heads or case.heads)
    head_dim, value_dim = case.head_dim, case.value_dim or case.head_dim
    both, rows = 2 * (head_dim + value_dim), heads * case.seq_q
    slabs = 4 * (-(-head_dim // 32) * 32)  # bytes of a row of dQ in float32
    numbers = 12  # lse, lse_rest, delta
    read = key_heads * case.seq_k * both + heads * pairs * (both + numbers)
    read += rows * (4 * value_dim + slabs)
    written = key_heads * case.seq_k * both + heads * pairs * slabs + rows * (2 * head_dim + 4)
    more = 8 * heads * slabs * -(-case.seq_k // keys_of_tile(case, call))  # rows of nothing
    turns = 64 * call["splits"] * -(-case.seq_q // tile) if deterministic else 0
    assert read <= call["read"] <= read + more + turns
    assert written <= call["written"] <= written + more + turns


def read_by_terms(cuda, case: Case, **terms) -> int:
    """What a bias or a mask adds to the bytes that the gradients of Q, K and V take."""
    wanted = ("query", "key", "value")
    with_terms = counted(cuda, replace(case, **terms), wanted=wanted)
    return with_terms["read"] - counted(cuda, case, wanted=wanted)["read"]


def rows_of_warps(case: Case) -> list[torch.Tensor]:
    """For each 16 keys, which a warp has: the queries that see any of them, before any mask."""
    return [keys[keys.any(1)] for keys in case.allowed().split(16, 1)]


@pytest.mark.parametrize("name", ["64", "64, causal", "128, window", "256"])
def test_terms_of_scores_are_read_once(cuda, name):
    """For each tile of keys, which has each score once: in rows of 16 keys, or one by one where two
    bytes divide no pair of them; to the byte. Where queries share a row, less."""
    case = replace(ONE_PASS[name], dtype=BF16)
    heads = case.batch * case.heads
    for seq_k in (112, 111):
        case = replace(case, seq_k=seq_k)
        scores, rows = heads * int(case.allowed().sum()), rows_of_warps(case)
        in_rows = heads * sum(row.numel() for row in rows)
        in_pairs = in_rows if seq_k % 2 == 0 else scores
        assert read_by_terms(cuda, case, bias="bhq") == 2 * in_pairs
        assert read_by_terms(cuda, case, bias="bhq", bias_dtype=F32) == 4 * scores
        assert read_by_terms(cuda, case, mask="bhq") == in_rows
        assert 0 < read_by_terms(cuda, case, bias="bh") < 2 * in_pairs
        mask = read_by_terms(cuda, case, mask="bh")  # by 32 lanes from one place, where 4 bytes fit
        assert 0 < mask <= in_rows - seq_k % 2


def test_terms_of_scores_are_read_once_for_dbias(cuda):
    """By two kernels, which read all else alike whatever the dtype of the bias."""
    case = Case(BF16, 64, batch=1, heads=2, seq_q=150, seq_k=112, bias="bhq", **CAUSAL)
    scores, rows = int(case.allowed().sum()), rows_of_warps(case)
    read = [counted(cuda, replace(case, bias_dtype=dtype))["read"] for dtype in (F32, BF16)]
    in_rows = sum(row.numel() for row in rows)
    assert read[0] - read[1] == 2 * case.heads * (4 * scores - 2 * in_rows)


@pytest.mark.parametrize("name", [name for name in ONE_PASS if "float" in name])
def test_plain_kernels_write_results_alone(cuda, name):
    case = ONE_PASS[name]
    call = counted(cuda, case)
    heads, key_heads = case.batch * case.heads, case.batch * (case.kv_heads or case.heads)
    elements = 2 * key_heads * case.seq_k * case.head_dim
    elements += heads * case.seq_q * (case.head_dim + 1)
    assert call["written"] == elements * case.dtype.itemsize


@half_and_float
@pytest.mark.parametrize("bias", [None, "", "bh", "q", "bhq"])
def test_memory_is_linear_in_the_length(cuda, bias, dtype):
    """Beside what is wanted: a dbias may have the size of the scores, its workspace not. Where rows
    are summed, a longer sequence has more parts, up to 16 copies of a dbias of one row."""
    copies = 0 if bias is None or "q" in bias else 16 * 4 * 600 * 2 ** len(bias)
    case = Case(dtype, 8, batch=2, heads=2, bias=bias, alibi="b", sinks=F32)
    for deterministic in (False, True):
        workspaces = [
            counted(
                cuda, replace(case, seq_q=seq, seq_k=seq), deterministic=deterministic
            )["workspace_bytes"]
            for seq in (150, 300, 600)
        ]  # fmt: skip
        assert (
            workspaces[2] - workspaces[1] <= 2.2 * (workspaces[1] - workspaces[0]) + 4096 + copies
        )


@kinds
@pytest.mark.parametrize("limit", [99, 163])
def test_shared_memory_fits_every_device(monkeypatch, limit, kind):
    """Of compute capability 8.6, 8.9 and 12.0, and of 8.0."""
    cuda = on_cuda(monkeypatch, ops=("backward",), shared=limit * 1024)
    case = Case(batch=1, heads=1, seq_q=40, seq_k=70, **of_kind(kind))
    for head_dim in (64, 128, 256, 512):
        for terms in ({}, dict(bias="")):
            call = counted(cuda, replace(case, head_dim=head_dim, **terms))
            assert 0 < call["shared"] <= limit * 1024


# ---- every instance, in every build --------------------------------------------------------------


@pytest.mark.parametrize("build", emulated.SLOW_UNDER_SANITIZERS)
def test_each_instance(monkeypatch, build):
    """Without races or bad accesses; none is left out."""
    calls = on_cuda(monkeypatch, ops=("backward",), build=build, seed=1, resident=2)
    for case in INSTANCES:
        check(case)
    assert calls.instances == backward_instances(build)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["address", "thread"])
@branches
def test_sanitizers_are_silent(monkeypatch, name, kind, build):
    """On the branches within an instance that the test above does not take."""
    case = replace(Case(head_dim=40, heads=2, kv_heads=1, **of_kind(kind)), **BRANCHES[name])
    if case.storage == "paged":  # which has no gradients
        case = replace(case, storage="packed")
    t = case.tensors()
    outputs = forward(case, t)
    for deterministic, limit in ((False, 227), (True, 99)):
        on_cuda(monkeypatch, ops=("backward",), build=build, seed=2, resident=3,
                shared=limit * 1024)  # fmt: skip
        backward(case, t, outputs, deterministic=deterministic)
