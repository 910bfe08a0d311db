"""Attention's backward kernels under the emulator: each gradient alone, order, traffic."""

from dataclasses import replace

import pytest
import torch

from tests.attention import cases as attention_cases
from tests.attention.cases import Case, assert_same, backward, check, forward
from tests.attention.cuda_cases import CAUSAL, ONE_PASS, TILED, half_and_float, kinds, of_kind
from tests.support.dtypes import BF16, F16, F32, F64

pytestmark = pytest.mark.usefixtures("one_draw_first")


EVERYTHING = Case(
    BF16, 24, 40, heads=2, kv_heads=1, seq_q=70, seq_k=150, window_left=100, window_right=0,
    bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0, dropout_p=0.25,
    dlse=True,
)  # fmt: skip


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


def shared(*quick: str):
    """Each of SHARED; those that are not `quick` are slow."""
    names = [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in SHARED]
    return pytest.mark.parametrize("name", names)


# One block after another, a few at the same time, and all.
ORDERS = [dict(seed=seed, resident=resident) for seed, resident in enumerate((1, 3, 100))]


def in_orders(cuda, case: Case, orders: list[dict], **options) -> list[dict]:
    """The gradients with blocks and threads in other orders."""
    t = case.tensors()
    outputs = forward(case, t)
    found = []
    for order in orders:
        cuda.set(**order)
        found.append(backward(case, t, outputs, **options))
    return found


@shared("long", "everything", "tf32")
def test_deterministic_is_bitwise_repeatable(cuda, name):
    """In any order, also on a device with the least shared memory and without reductions of four
    numbers at once."""
    orders = [ORDERS[0], ORDERS[2], dict(ORDERS[1], shared=99 * 1024, capability=86)]
    first, *others = in_orders(cuda, SHARED[name], orders, deterministic=True)
    for other in others:
        assert_same(other, first)


@shared("long", "tf32")
def test_any_order_is_right(cuda, name):
    """By the numerics rule, also for atomic sums; all other results are repeatable."""
    cuda.set(seed=7, resident=3)
    check(SHARED[name])
    differs = name not in ("long", "causal", "wide")  # else the test above would say nothing
    first, *others = in_orders(cuda, SHARED[name], ORDERS)
    for seed in range(2, 8):  # rounded to 16 bits a few elements of dQ differ, in some orders none
        for other in others:
            for gradient in first.keys() - {"dquery"}:
                assert torch.equal(first[gradient], other[gradient]), gradient
            differs |= not torch.equal(first["dquery"], other["dquery"])
        if differs:
            return
        others = in_orders(cuda, SHARED[name], [dict(seed=seed, resident=3)])
    raise AssertionError("no order of blocks shows in dquery")


OF_128_COLUMNS = {
    "causal": Case(BF16, 128, batch=1, heads=2, kv_heads=1, seq_q=150, seq_k=300, **CAUSAL),
    "window": Case(F16, 72, 128, batch=1, heads=1, seq_q=130, seq_k=70, window_left=50),
    "packed": Case(BF16, 128, 96, storage="packed", lengths=((9, 40), (70, 130), (1, 1))),
    "pieces": Case(F16, 101, 70, batch=1, heads=1, seq_q=70, seq_k=129),
}


@pytest.mark.parametrize("name", OF_128_COLUMNS)
def test_both_layouts_give_the_same_bits(cuda, name):
    """In 99 KiB of shared memory a warp has the scores of 16 keys, in 163 KiB those of 32."""
    orders = [dict(shared=kib * 1024, seed=kib) for kib in (99, 163, 227)]
    short, *wide = in_orders(cuda, OF_128_COLUMNS[name], orders, deterministic=True)
    for found in wide:
        assert_same(found, short)
    launches = [call["launched"] for call in cuda.of("attention_backward")]
    main = [one for of in launches for one in of if "attention_backward_kernel" in one.kernel]
    assert main[0].kernel != main[1].kernel == main[2].kernel
    assert [launch.shared for launch in main] == [99 * 1024, 163 * 1024, 163 * 1024]


@pytest.mark.parametrize("dtype, head_dim, pair_bytes", [(BF16, 40, 64_000), (F32, 150, 600_000)])
@pytest.mark.parametrize("share", [0, 2])
@pytest.mark.grid
def test_any_number_of_heads_in_turns(cuda, dtype, head_dim, pair_bytes, share):
    """Each by itself, and two at a time, which leaves one of three over. A pair shares Q, dO and
    dQ, in float32 K, V, Q and dO."""
    cuda.set(multiprocessors=1, l2=2 * share * pair_bytes)
    check(Case(dtype, head_dim, batch=3, heads=2, kv_heads=1, seq_q=100, seq_k=300, **CAUSAL))


@half_and_float
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_do_not_depend_on_other_sequences(cuda, deterministic, dtype):
    """Bit for bit where sums are in order, of each (batch, kv head) of its own."""
    cuda.keywords["deterministic"] = deterministic
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


def counted(cuda, case: Case, **changes) -> dict:
    t = case.tensors()
    backward(case, t, forward(case, t), **changes)
    return cuda.done[-1]


def keys_of_tile(case: Case, call: dict) -> int:
    """Computed from the blocks of the plan: one for each tile of each key head."""
    tiles = call["splits"] // (case.batch * (case.kv_heads or case.heads))
    return next(keys for keys in (32, 64, 128) if -(-case.seq_k // keys) == tiles)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [name for name in ONE_PASS if "float" not in name])
@pytest.mark.grid
def test_one_pass(cuda, name, deterministic):
    """K, V, dK and dV once; Q and dO, and dQ in float32, once for each tile of keys that sees them,
    by whole tiles of queries; O once more, with dO. To the byte, except rows that fill up eight.
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


def rows_of_warps(case: Case) -> list[torch.Tensor]:
    """For each 16 keys, which a warp has: the queries that see any of them, before any mask."""
    return [keys[keys.any(1)] for keys in case.allowed().split(16, 1)]


@pytest.mark.parametrize("name", ["64", "64, causal", "128, window", "256"])
def test_terms_of_scores_are_read_once(cuda, name):
    """For each tile of keys, which has each score once: in rows of 16 keys, or one by one where two
    bytes divide no pair of them; to the byte. Where queries share a row, less."""
    case = replace(ONE_PASS[name], dtype=BF16, batch=1, heads=1, kv_heads=1)
    for seq_k in (112, 111):
        case = replace(case, seq_k=seq_k)

        def read(case=case, **terms):
            wanted = ("query", "key", "value")
            return counted(cuda, replace(case, **terms), wanted=wanted)["read"]

        scores, rows, without = int(case.allowed().sum()), rows_of_warps(case), read()
        in_rows = sum(row.numel() for row in rows)
        in_pairs = in_rows if seq_k % 2 == 0 else scores
        assert read(bias="bhq") - without == 2 * in_pairs
        assert read(bias="bhq", bias_dtype=F32) - without == 4 * scores
        assert read(mask="bhq") - without == in_rows
        assert 0 < read(bias="bh") - without < 2 * in_pairs
        mask = read(mask="bh") - without  # by 32 lanes from one place, where 4 bytes fit
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
    """The workspace's: a dbias may have the size of the scores, its workspace may not. If rows are
    summed, a longer sequence has more parts, up to 16 copies of a dbias of one row."""
    cuda.set(run=0)
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
@pytest.mark.parametrize("limit", [99, 163, 227])
@pytest.mark.grid
def test_shared_memory_fits_every_device(cuda, limit, kind):
    """Of compute capability 8.6, 8.9 and 12.0, of 8.0, and of 9.0 and 10.0; both directions."""
    cuda.set(shared=limit * 1024)
    case = Case(batch=1, heads=1, seq_q=3, seq_k=5, **of_kind(kind))
    for head_dim in (64, 128, 256, 512):
        for terms in ({}, dict(bias="")):
            counted(cuda, replace(case, head_dim=head_dim, **terms))
            ahead, back = (call["shared"] for call in cuda.done[-2:])
            assert 0 < ahead <= limit * 1024 and 0 < back <= limit * 1024
            # A multiprocessor has 1 KiB more than a block may have, and keeps 1 KiB of each.
            two_fit = 2 * (ahead + 1024) <= (limit + 1) * 1024
            if kind in TILED and head_dim <= 256:
                assert two_fit == (head_dim <= 128 or limit == 227)
