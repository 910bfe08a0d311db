"""Decoding's CUDA kernels under the emulator: ways to divide the work, traffic, races.

Values, appends and pages are those of the family's other tests. Chunks of a sequence have 128 keys
at least (csrc/cuda/attention/decode.h), runs 16 chunks, and a sequence 128 chunks at most: 200,
2,500 and 20,000 keys are several chunks, several runs, and chunks of more keys than the least.
"""

from dataclasses import replace

import pytest

from tests.attention.cases import reserved
from tests.attention.cuda_cases import DECODE_KERNELS
from tests.attention_decode import test_values
from tests.attention_decode.cases import (
    BATCHES,
    DTYPES,
    Case,
    assert_same,
    call,
    check,
    int32,
    ours,
    quick_batches,
)
from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.support.dtypes import BF16, F16, F32
from tests.support.pairs import drawn, every_third, pairwise

pytestmark = pytest.mark.usefixtures("one_draw_first")

# ---- values --------------------------------------------------------------------------------------

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LONG = {
    "runs": Case(head_dim=64, heads=4, kv_heads=1, lengths=(2500, 2, 2049)),
    "pages": Case(head_dim=64, heads=4, kv_heads=1, lengths=(2500, 300), page_size=64, new_rows=1),
    "longer chunks": Case(head_dim=8, heads=1, kv_heads=1, lengths=(20_000, 130), new_rows=1),
    "queries": Case(head_dim=40, heads=8, kv_heads=2, lengths=(700,), seq_q=9, window_right=0),
    "window": Case(head_dim=32, heads=2, kv_heads=1, lengths=(5000, 40), window_left=700, seq_q=3),
    "runs of many": Case(head_dim=40, heads=32, kv_heads=8, lengths=(2500, *range(20)),
                         page_size=16),
    "whole sequences": Case(head_dim=8, heads=16, kv_heads=16, lengths=(2500, *range(63)),
                            page_size=16),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("name", LONG)
@pytest.mark.grid
def test_long_and_many_sequences(cuda, name, dtype):
    """Each way to divide the work: by chunks, by runs of chunks, by sequences."""
    check(replace(LONG[name], dtype=dtype))
    blocks = cuda.done[-1]["splits"]
    assert blocks == 1024 if name == "whole sequences" else blocks > 1


AXES = test_values.AXES | dict(
    lengths=[(0, 1, 129), (15, 16, 17), (63, 64, 65), (300,), (700, 2)],
    head_dim=(8, 40, 59, 64, 128, 256, 264),
    seq_q=(1, 3, 16, 17),
    window=[(-1, -1), (-1, 0), (60, 0), (33, 17), (0, 0), (-1, 5)],
    page_size=[0, 0, 1, 7, 64],
    group=[(1, 1), (4, 1), (6, 2), (5, 5), (24, 1)],
)


@pytest.mark.parametrize("row", every_third(pairwise(AXES) + drawn(AXES, 18)))
def test_pairs_of_options(row):
    check(test_values.combination(row))


# ---- contract ------------------------------------------------------------------------------------


batches = pytest.mark.parametrize("name", quick_batches)


@batches
def test_any_order_of_blocks_and_threads(cuda, name):
    case = BATCHES[name]
    expected = ours(case)
    for seed in (1, 2):
        cuda.set(seed=seed)
        assert_same(ours(case), expected)


@dtypes
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("far", [1, 2, 3])
@pytest.mark.grid(2)
def test_offsets_beyond_32_bits(cuda, far, page_size, dtype):
    """Offsets of sequences, heads and rows, or of pages, rows and heads; the memory between them is
    never touched."""
    reserved(2**31 + 2**20, dtype)
    case = Case(dtype, 64, lengths=(20, 30), new_rows=2, seq_q=2, page_size=page_size)
    expected = ours(case)
    cuda.set(far=far, far_new=far)
    assert_same(ours(case), expected)


@dtypes
@pytest.mark.parametrize("head_dim", [1, 3, 40, 59, 97])
@pytest.mark.grid(2)
def test_tensors_that_are_not_aligned(cuda, head_dim, dtype):
    """All (-1), and each; bit for bit, whether rows are copied by 16 bytes or by elements."""
    case = Case(dtype, head_dim, seq_q=2, lengths=(150, 9), new_rows=2, window_right=0)
    t = case.tensors()
    expected = ours(case, t)
    for tensor in range(-1, cuda.done[-1]["tensors"]):
        cuda.set(shift=dtype.itemsize, misaligned=tensor)
        assert_same(ours(case, t), expected, str(tensor))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("used, pad", [(400, 0), (-3, 0), (20, -7), (400, -7)])
def test_lengths_that_do_not_fit_the_cache_lead_nowhere_else(used, pad, page_size):
    """On a device nothing checks them before the kernel reads them."""
    for new_rows in (-1, 1):
        case = Case(BF16, 64, lengths=(20,), page_size=page_size, pads=(0,), new_rows=new_rows)
        t = case.tensors()
        if page_size:
            t["block_table"].fill_(1)
        call(case, t | dict(cache_seqlens=int32([used]), cache_leftpad=int32([pad])))


# ---- traffic and resources -----------------------------------------------------------------------

ONCE = {
    "one tile": Case(BF16, 64, heads=8, kv_heads=2, lengths=(700, 300, 0)),
    "pages": Case(F16, 128, heads=4, kv_heads=2, lengths=(700, 300), page_size=16),
    "several tiles": Case(BF16, 64, heads=24, kv_heads=2, lengths=(300,), seq_q=3, window_right=0),
    "window": Case(BF16, 64, lengths=(1500,), window_left=300, window_right=0),
    "append": Case(BF16, 64, lengths=(500, 60), new_rows=1, window_right=0),
    "float32": Case(F32, 64, heads=4, kv_heads=1, lengths=(700, 300)),
    "runs": Case(BF16, 8, heads=8, kv_heads=8, lengths=(2500, *range(16)), page_size=16),
    "whole sequences": Case(BF16, 8, heads=16, kv_heads=16, lengths=(2500, *range(63)),
                            page_size=16),
}  # fmt: skip


def keys_and_values(case: Case, tile_rows: int) -> int:
    """Bytes, if each tile of (query, head) rows of a kv head reads each key that it sees once."""
    group, count = case.heads // case.kv_heads, 0
    for length in case.lengths:
        seen = case.seen(length + case.appends).repeat_interleave(group, 0)
        count += sum(int(tile.any(0).sum()) for tile in seen.split(tile_rows))
    dims = case.head_dim + (case.value_dim or case.head_dim)
    return count * case.kv_heads * dims * case.dtype.itemsize


@pytest.mark.parametrize("name", ONCE)
def test_keys_and_values_are_read_once_per_tile(cuda, name):
    """In addition each block reads the query, and states of chunks are written and read once."""
    case = ONCE[name]
    call(case, case.tensors())
    (done,) = cuda.done
    least = keys_and_values(case, done["rows_per_tile"])
    new = case.batch * case.kv_heads * case.appends * 2 * case.head_dim * case.dtype.itemsize
    blocks = sum(launch.blocks * launch.threads for launch in done["launched"])
    query = done["splits"] * done["rows_per_tile"] * case.head_dim * case.dtype.itemsize
    most = least + new + query + done["workspace_bytes"] + 64 * blocks
    assert least - new <= done["read"] <= most
    output = case.batch * case.heads * case.seq_q * (case.head_dim * case.dtype.itemsize + 4)
    assert output <= done["written"] <= output + new + done["workspace_bytes"]


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.grid
def test_shared_memory_fits_every_device(cuda, head_dim, dtype):
    """A block's limit is 99 KiB on sm_86, sm_89 and sm_120, and more elsewhere."""
    case = Case(dtype, head_dim, lengths=(20,), new_rows=1, seq_q=17)
    call(case, case.tensors())
    assert 0 < cuda.done[-1]["shared"] <= 99 * 1024


# ---- every instance, in every build --------------------------------------------------------------

BRANCHES = {
    "append": dict(new_rows=3, seq_q=3, window_right=0, rotary="halves", pads=(0, 3)),
    "tiles": dict(new_rows=2, seq_q=9, heads=8, kv_heads=2, rotary="interleaved", alibi="b"),
    "pages": dict(page_size=7, new_rows=1, sinks=F32, softcap=2.0, lengths=(300, 0, 20)),
    "runs": dict(head_dim=8, heads=8, kv_heads=8, lengths=(2200, *range(15)), page_size=16),
    "unaligned": dict(head_dim=37, value_dim=50, seq_q=2, window_left=20),
}


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, *DECODE_KERNELS, seed=1):
        for dtype in DTYPES:
            for head_dim in (40, 72, 160, 264):
                case = Case(dtype, head_dim, lengths=(150, 20), seq_q=2, new_rows=1)
                check(case)
                check(replace(case, heads=24, kv_heads=1, lengths=(40,), rotary="halves"))


@pytest.mark.parametrize("build", emulated.SLOW_UNDER_SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    assert cuda.instances == {name for name in all_instances() if "::attention_decode_" in name}


# On the diagonal of the grid the first alone is quick.
BRANCHES_OF_DTYPES = [
    pytest.param(name, dtype, marks=[] if (name, dtype) == ("append", BF16) else pytest.mark.slow)
    for name in BRANCHES
    for dtype in (BF16, F32)
]


@pytest.mark.parametrize("build", ["thread", "address"])
@pytest.mark.parametrize("name, dtype", BRANCHES_OF_DTYPES, ids=str)
def test_sanitizers_are_silent(cuda, name, dtype, build):
    """On the branches within an instance that the test above does not take."""
    with cuda.sanitized(build, *DECODE_KERNELS, seed=2):
        ours(replace(Case(dtype, 40), **BRANCHES[name]))
