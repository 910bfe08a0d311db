"""Decoding against pages: shuffled, shared, partly used; and caches and tensors of any strides."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.attention.cases import reserved
from tests.attention_decode.cases import (
    DTYPES,
    NAN,
    Case,
    assert_bits,
    assert_same,
    call,
    check,
    int32,
    ours,
    same_bits,
    with_copied_caches,
)
from tests.emulator.executors import everywhere
from tests.support.dtypes import BF16, F32

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# ---- pages ---------------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
@pytest.mark.grid  # the pairs of options hold the others
def test_lengths_around_a_page(page_size, dtype):
    """No key, one key, one less than a page, a page, one more, several pages."""
    lengths = sorted({0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 300})
    case = Case(dtype, 40, 24, lengths=tuple(lengths), page_size=page_size)
    for new_rows in (-1, 1, 20):
        check(replace(case, new_rows=new_rows, seq_q=2, window_right=0))


@everywhere
@pytest.mark.parametrize("options", [{}, dict(window_left=4), dict(pads=(17,))], ids=str)
def test_entries_of_the_block_table_that_nothing_needs_are_not_looked_at(options):
    """Beyond the keys, before a window, in the padding."""
    for new_rows in (-1, 0, 3):
        case = Case(F32, 16, lengths=(40, 24, 30), page_size=8, new_rows=new_rows, **options)
        t = case.tensors()
        other = t | dict(block_table=t["block_table"].clone())
        for b, used in enumerate(case.used):
            last = -(-(used + case.appends) // 8)
            assert last < other["block_table"].shape[1]
            other["block_table"][b, last:] = 2**30 if b else -1
        if options:
            other["block_table"][:, 0] = int32([-1, 2**30, -7])
        assert_same(ours(case, other), ours(case, t))


@everywhere
@dtypes
def test_a_prefix_that_sequences_share(dtype):
    """Read by all of them; each appends to pages of its own."""
    case = Case(dtype, 40, lengths=(40, 33, 60, 32), page_size=8, new_rows=3, seq_q=3,
                window_right=0)  # fmt: skip
    t = case.tensors()
    for name in ("k_cache", "v_cache"):  # the same keys in pages of their own, to compare with
        first = t[name][t["block_table"][0, :4].long()]
        for b in range(1, 4):
            t[name][t["block_table"][b, :4].long()] = first
    expected = ours(case, t)
    shared = t | dict(block_table=t["block_table"].clone())
    shared["block_table"][1:, :4] = t["block_table"][0, :4]
    shared = with_copied_caches(shared)
    for name in ("k_cache", "v_cache"):
        for b in range(1, 4):
            shared[name][t["block_table"][b, :4].long()] = NAN
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same(ours(case, shared), expected)


@everywhere
def test_a_page_that_sequences_share_behind_their_last_row():
    """Two write into one page, each its own rows of it; neither reads the other's."""
    case = Case(F32, 16, lengths=(2, 2), page_size=8, new_rows=2, pads=(0, 4))
    t = case.tensors()
    expected = ours(case, t)
    shared = t | dict(block_table=t["block_table"].clone())
    page = int(t["block_table"][0, 0])
    shared = with_copied_caches(shared)
    for name in ("k_cache", "v_cache"):
        shared[name][page, 4:6] = t[name][int(t["block_table"][1, 0]), 4:6]
    shared["block_table"][1, 0] = page
    assert_same(ours(case, shared), expected)


@everywhere
def test_a_page_that_a_window_has_left_behind_may_be_another_sequences():
    """Pages are reused; if its rows were read, results would depend on the order of writes."""
    case = Case(F32, 16, lengths=(24, 3), page_size=8, new_rows=1, window_left=4)
    t = case.tensors()
    expected = ours(case, t)
    reused = t | dict(block_table=t["block_table"].clone())
    reused["block_table"][0, 0] = t["block_table"][1, 0]
    assert_same(ours(case, with_copied_caches(reused)), expected)


@everywhere
def test_no_pages():
    empty = torch.zeros(0, 16, 2, 8)
    query = torch.randn(2, 4, 3, 8)
    for table in (torch.zeros(2, 0).int(), int32([[5], [-5]])):
        output, lse = torch.ops.onepass.attention_decode(
            query, empty, empty, cache_seqlens=int32([0, 0]), block_table=table, scale=1.0
        )
        assert not output.any() and (lse == -torch.inf).all()


# ---- garbage -------------------------------------------------------------------------------------


@everywhere
@dtypes
def test_a_key_counts_for_the_queries_that_see_it_alone(dtype):
    """Values that are not finite do not affect queries that do not see them."""
    case = Case(dtype, 40, lengths=(200,), seq_q=5, window_left=50, window_right=0)
    t = case.tensors()
    clean = ours(case, t)
    t["k_cache"][0, :, 198] = NAN  # seen by the last two
    t["k_cache"][0, :, 145] = NAN  # by the first
    found = ours(case, t)
    assert found["output"][:, :, [0, 3, 4]].isnan().all()
    for name in ("output", "lse"):
        assert torch.equal(found[name][:, :, 1:3], clean[name][:, :, 1:3])


# ---- strides -------------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("page_size", [0, 16])
def test_caches_whose_strides_no_16_bytes_divide(page_size, dtype):
    """Strides of rows, or of sequences or pages alone; the first row is aligned to 16 bytes."""
    case = Case(dtype, 64, lengths=(40, 150), page_size=page_size, new_rows=1, kv_heads=1, heads=2)
    t = case.tensors()
    expected = ours(case, t)
    more = 4 if dtype is not F32 else 2  # elements

    def of_rows(x):
        return torch.cat([x, x[..., :more]], -1)[..., : x.shape[-1]]

    def of_sequences(x):
        flat = x.flatten(1)
        return torch.cat([flat, flat[:, :more]], 1)[:, : flat.shape[1]].unflatten(1, x.shape[1:])

    for widened in (of_rows, of_sequences):
        caches = {name: widened(t[name]) for name in ("k_cache", "v_cache")}
        for cache in caches.values():
            assert any(stride * dtype.itemsize % 16 for stride in cache.stride()[:-1])
        assert_same(ours(case, t | caches), expected)


@everywhere
def test_a_dimension_of_one_element_has_any_stride():
    """Also in a cache that is written: such a dimension neither overlaps nor has gaps."""
    case = Case(F32, 1, lengths=(9,), heads=2, kv_heads=1, new_rows=2)
    t = case.tensors()
    expected = ours(case, t)
    for strides in ((0, 0, 1, 0), (5, 7, 1, 9), (0, 1, 1, 1)):
        views = {n: t[n].as_strided(t[n].shape, strides) for n in ("k_cache", "v_cache")}
        assert_same(ours(case, t | views), expected, str(strides))


@everywhere
def test_caches_in_one_tensor():
    """k_cache and v_cache as kv[0] and kv[1], and beside each other in rows."""
    case = Case(BF16, 32, lengths=(9, 70), new_rows=3, seq_q=2)
    t = case.tensors()
    expected = call(case, with_copied_caches(t))
    for dim in range(4):
        kv = torch.stack([t["k_cache"], t["v_cache"]], dim)
        views = dict(zip(("k_cache", "v_cache"), kv.unbind(dim), strict=True))
        found = call(case, t | views)
        assert_bits(found, expected)
    rows = torch.cat([t["k_cache"], t["v_cache"]], -1)
    views = dict(k_cache=rows[..., :32], v_cache=rows[..., 32:])
    assert_bits(call(case, t | views), expected)


# ---- offsets beyond 32 bits ----------------------------------------------------------------------


def far(shape, strides, dtype=BF16) -> Tensor:
    """A tensor whose elements are far apart; the memory between them is never touched."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return reserved(last + 1, dtype).as_strided(shape, strides)


def test_pages_and_caches_of_numbers_beyond_32_bits():
    """The last of so many pages, or caches, that there are more than 2^31 elements before it."""
    case = Case(BF16, 64, heads=2, kv_heads=1, lengths=(20,), new_rows=1, page_size=64)
    t = case.tensors()
    expected = call(case, with_copied_caches(t))
    count = 2**31 // (64 * 64) + 2
    pools = {name: far((count, 64, 1, 64), (64 * 64, 64, 64, 1)) for name in ("k_cache", "v_cache")}
    for name, pool in pools.items():
        pool[-1] = t[name][int(t["block_table"][0, 0])]
    found = call(case, t | pools | dict(block_table=int32([[count - 1]])))
    again = dict(t, cache_batch_idx=int32([count - 1]))
    del again["block_table"]
    dense = {name: pool.transpose(1, 2) for name, pool in pools.items()}
    also = call(replace(case, page_size=0), again | dense)
    for one, other, third in zip(found, expected, also, strict=True):
        assert same_bits(one, other) and same_bits(third, other)
