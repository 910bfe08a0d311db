"""Attention's forward kernels under the emulator: dependence of rows, traffic, resources."""

import re
from dataclasses import replace

import pytest

from tests.attention.cases import Case, assert_same, check, forward
from tests.attention.cuda_cases import CAUSAL, ONE_PASS, TILED, kinds, of_kind, once_per_tile
from tests.support.dtypes import BF16, F32, F64

pytestmark = pytest.mark.usefixtures("one_draw_first")


LAID_OUT = Case(
    BF16, 64, heads=2, kv_heads=2, seq_q=70, seq_k=130, window_left=90, bias="bhq", mask="bhq",
    **CAUSAL,
)  # fmt: skip

# ---- contract ------------------------------------------------------------------------------------


@kinds
def test_any_order_of_blocks_and_threads(cuda, kind):
    case = replace(LAID_OUT, dropout_p=0.3, **of_kind(kind))
    t = case.tensors()
    expected = forward(case, t)
    for seed in (1, 2):
        cuda.set(seed=seed)
        assert_same(forward(case, t), expected)


def instance_of(cuda, case: Case, t: dict) -> tuple[str, dict]:
    """The kind of the instance that ran, and the results."""
    outputs = forward(case, t)
    (launch,) = cuda.done[-1]["launched"]
    return re.search(r"ForwardKind::k(\w+)", launch.kernel)[1], outputs


@pytest.mark.parametrize("shared", [99, 227])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.grid
def test_where_rows_lie_changes_no_bit(cuda, dtype, head_dim, shared):
    """Neither pages nor the alignment of rows, though other instances run."""
    case = Case(dtype, head_dim, heads=2, kv_heads=1, storage="packed",
                lengths=((150, 230), (33, 40)), window_left=100, **CAUSAL)  # fmt: skip
    paged = replace(case, storage="paged", page_size=7)  # the same, drawn alike
    cuda.set(shared=shared * 1024)
    is_whole, is_narrow = head_dim in (64, 128), head_dim in (96, 128) and shared == 99
    aligned = {case: "Whole" if is_whole else "Part"}
    aligned[paged] = "Paged" if is_whole and not is_narrow else "Part"
    expected = forward(case, case.tensors())
    for shift in (0, 8, 4, 2):
        cuda.set(shift=shift)
        for stored, kind in aligned.items():
            found_kind, found = instance_of(cuda, stored, stored.tensors())
            assert found_kind == ("Part" if shift else kind)
            assert_same(found, expected)


# ---- traffic and resources -----------------------------------------------------------------------

NARROW = Case(BF16, 8, batch=1, seq_q=150, seq_k=230)


def counted(cuda, case: Case) -> dict:
    forward(case, case.tensors())
    return cuda.done[-1]


@pytest.mark.parametrize("case", [*ONE_PASS.values(), NARROW], ids=[*ONE_PASS, "8"])
def test_one_pass(cuda, case):
    """Q, O and the LSE once, K and V once for each tile of queries that sees them; to the byte."""
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
    """Terms of scores that count, in groups of 8 keys if aligned to 16 bytes; every thread reads
    the numbers of a head and the seed itself."""
    case = replace(ONE_PASS[name], dtype=BF16, **terms)
    call = counted(cuda, case)
    least = sum(once_per_tile(case, call["rows_per_tile"]))
    least += size * int(case.allowed().sum()) * case.batch * case.heads
    (launch,) = call["launched"]
    groups = size * 2 * 7 * case.seq_q * case.batch * case.heads
    assert least <= call["read"] <= least + groups + 24 * launch.threads * launch.blocks
    assert call["workspace_bytes"] == 0


def test_pages_are_read_once(cuda):
    """In addition their numbers, which are looked up for every row."""
    paged = Case(BF16, 64, storage="paged", lengths=((70, 130), (150, 40)), page_size=16)
    packed = replace(paged, storage="packed", bias="bhq")
    read = [counted(cuda, case)["read"] for case in (paged, packed)]
    bias = 2 * 2 * (70 * 130 + 150 * 40)
    assert read[0] <= read[1] - bias + 2 * 2 * (130 + 2 * 40) * 16 * 4


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("shared", [99, 163])
@pytest.mark.grid
def test_tiles_of_fewer_keys_where_shared_memory_is_short(cuda, shared, dtype):
    """So that two blocks fit; the bytes that are read and written stay the same."""
    cuda.set(shared=shared * 1024)
    window = dict(window_left=40, window_right=20)
    sizes = ((72, 128, {}), (128, 72, CAUSAL), (96, 96, window), (128, 128, CAUSAL))
    lengths_of = ((150, 230), (1, 65)), ((129, 33), (130, 31))
    for number, (head_dim, value_dim, options) in enumerate(sizes):
        for lengths in lengths_of[number % 2]:
            case = Case(dtype, head_dim, value_dim, batch=1, heads=2, kv_heads=1, seq_q=lengths[0],
                        seq_k=lengths[1], **options)  # fmt: skip
            check(case)
            call = cuda.of("attention_forward")[-1]
            (launch,) = call["launched"]
            keys = 32 if shared == 99 else 64
            facts = 160  # what all threads of a block know
            is_listed = head_dim != 128 or value_dim != 128  # addresses, but for whole rows
            listed = 3 * 8 * keys if is_listed else 0
            assert launch.shared == 128 * (128 + 2 * keys) * 2 + facts + listed
            assert call["read"] == sum(once_per_tile(case, 128))
