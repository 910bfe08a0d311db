"""Decoding's promises beside its values: results keep their bits when unrelated things change.

Errors, and that a refused call writes nothing, are in test_messages.py.
"""

from dataclasses import replace

import pytest
import torch

from tests.attention_decode.cases import (
    BATCHES,
    DTYPES,
    LOCATED,
    Case,
    assert_bits,
    assert_caches,
    assert_same,
    call,
    int32,
    ours,
    quick_batches,
    same_bits,
    with_copied_caches,
)
from tests.emulator.executors import each, everywhere
from tests.support.allocations import allocated
from tests.support.dtypes import BF16, F16, F32

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]

EVERYTHING = dict(seq_q=3, new_rows=3, window_left=400, window_right=0, alibi="b", sinks=F32,
                  pads=(0, 5), softcap=9.0)  # fmt: skip
CASES = {
    "one sequence, one head": Case(F32, 64, heads=1, kv_heads=1, lengths=(3000,)),
    "one key head": Case(BF16, 64, heads=8, kv_heads=1, lengths=(3000,), seq_q=2, window_right=0),
    "bfloat16": Case(BF16, 128, lengths=(2000, 130, 0, 700), new_rows=1),
    "float16": Case(F16, 64, lengths=(2000, 130, 0, 700), seq_q=7, new_rows=7, window_right=0),
    "blocks of queries": Case(BF16, 64, lengths=(700, 300), seq_q=90, new_rows=90, window_right=0),
    "everything": Case(F32, 40, 24, lengths=(700, 130, 0, 64), **EVERYTHING),
    "paged": Case(BF16, 64, lengths=(2500, 130, 0), page_size=16, seq_q=2, new_rows=2),
    "odd head dim": Case(F16, 59, 111, lengths=(600, 20), heads=6, kv_heads=6, seq_q=2),
    "many short ones": Case(F32, 64, heads=6, kv_heads=6, lengths=(3, 1, 40, 7, 0, 9, 17)),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
def test_bitwise_equal_for_any_number_of_threads(name):
    case = CASES[name]
    t = case.tensors()
    expected = ours(case, t)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert_same(ours(case, t), expected, f"{threads} threads")


def alone(case: Case, t: dict, which: slice, heads: slice | None = None) -> dict:
    """The same call for some of its sequences, and some heads of the caches."""
    part = dict(t)
    own = [name for name in ("query", "key", "value", *LOCATED) if name in t]
    if "block_table" not in t and "cache_batch_idx" not in t:
        own += ["k_cache", "v_cache"]
    for name in own:
        part[name] = t[name][which]
    if "alibi_slopes" in t and t["alibi_slopes"].dim() == 2:
        part["alibi_slopes"] = t["alibi_slopes"][which]
    if heads is None:
        return part
    group = case.heads // case.kv_heads
    queries = slice(heads.start * group, heads.stop * group)
    part["query"] = part["query"][:, queries]
    for name in ("key", "value"):
        if name in t:
            part[name] = part[name][:, heads]
    of_pages = (slice(None), slice(None), heads)
    for name in ("k_cache", "v_cache"):
        part[name] = part[name][of_pages if "block_table" in t else of_pages[1:]]
    for name in ("alibi_slopes", "sinks"):
        if name in t:
            part[name] = part[name][..., queries]
    return part


@each("name", cpu=CASES, cuda=quick_batches)
def test_a_sequence_does_not_depend_on_its_batch(executor, name):
    """Nor on other heads of the caches, nor on the threads or blocks that share the work."""
    case = CASES[name] if executor.name == "cpu" else BATCHES[name]
    for of in (case, replace(case, scattered=not case.page_size)):
        t = of.tensors()
        whole = call(of, with_copied_caches(t))
        parts = [slice(b, b + 1) for b in range(min(case.batch, 7))]
        parts += [slice(0, 2), slice(1, None)]
        for threads, sequences in enumerate(parts, 1):
            torch.set_num_threads(1 + threads % 3)
            found = call(of, with_copied_caches(alone(of, t, sequences)))
            for one, result in zip(found, whole, strict=True):
                assert same_bits(one, result[sequences]), f"{sequences}"
        if case.kv_heads > 1:
            group = case.heads // case.kv_heads
            found = call(of, with_copied_caches(alone(of, t, slice(None), slice(1, 2))))
            for one, result in zip(found, whole, strict=True):
                assert same_bits(one, result[:, group : 2 * group])


@each("name", cpu=CASES, cuda=("chunks", "rows", "tiles", "paged"))
def test_bitwise_equal_in_any_storage(executor, name):
    """Pages of any size, dense caches, other room, padding: the same keys give the same bits."""
    case = CASES[name] if executor.name == "cpu" else BATCHES[name]
    expected = ours(case)
    for page_size in (0, 1, 7, 64, 3500):
        of = replace(case, page_size=page_size, out_bshd=page_size % 2 > 0)
        assert_same(ours(of), expected, f"{page_size=}")
        if not case.pads and not case.rotary:
            of = replace(of, pads=(0, 1, 64, 100), scattered=page_size == 0)
            assert_same(ours(of), expected, f"{page_size=}")
    for room in (0, 1, 3500):
        of = replace(case, page_size=0, room=room, scattered=room > 0)
        assert_same(ours(of), expected, f"{room=}")
    t = case.tensors()
    if case.page_size:
        wide = torch.full((case.batch, 400), -1, dtype=torch.int32)
        wide[:, : t["block_table"].shape[1]] = t["block_table"]
        assert_same(ours(case, t | dict(block_table=wide)), expected)


# ---- appending -----------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("page_size", [0, 1, 7, 64])
@pytest.mark.parametrize("options", [{}, dict(window_right=0), dict(window_left=300, sinks=F32)])
def test_append_and_then_read_is_one_call(options, page_size):
    """The same query against the same rows gives the same bits, whichever call wrote them."""
    for dtype in DTYPES:
        case = Case(dtype, 40, seq_q=3, new_rows=4, page_size=page_size, pads=(0, 2),
                    lengths=(700, 0, 257, 12), **options)  # fmt: skip
        t = with_copied_caches(case.tensors())
        output, lse = call(case, t)
        again = {name: x for name, x in t.items() if name not in ("key", "value")}
        again["cache_seqlens"] = t["cache_seqlens"] + 4
        found = call(replace(case, new_rows=-1), again)
        assert same_bits(found[0], output) and same_bits(found[1], lse)
        # An append of no rows only reads.
        none = {name: t[name][:, :, :0] for name in ("key", "value")}
        found = call(replace(case, new_rows=0), again | none)
        assert same_bits(found[0], output) and same_bits(found[1], lse)


@everywhere
@pytest.mark.parametrize("page_size", [0, 1, 7, 64])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
def test_one_append_is_as_good_as_key_by_key(rotary, page_size):
    """The caches hold the same bits."""
    for dtype in DTYPES:
        case = Case(dtype, 40, seq_q=5, new_rows=5, page_size=page_size, window_right=0,
                    pads=(0, 2), rotary=rotary, rotary_dim=26,
                    lengths=(70, 0, 257, 12))  # fmt: skip
        t = case.tensors()
        at_once, by_one = with_copied_caches(t), with_copied_caches(t)
        call(case, at_once)
        for i in range(5):
            step = {name: t[name][:, :, i : i + 1] for name in ("query", "key", "value")}
            step["cache_seqlens"] = t["cache_seqlens"] + i
            call(case, by_one | step)
        assert_caches(at_once, by_one)


@everywhere
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_inputs_may_lie_in_a_cache_that_is_written(name):
    """For example when rows move by one: inputs have their values from before the call."""
    case = Case(F32, 16, lengths=(20, 20), new_rows=5, seq_q=5, kv_heads=4, window_right=0)
    t = case.tensors()
    for cache in ("k_cache", "v_cache"):
        t[cache].nan_to_num_()
    inside, outside = with_copied_caches(t), with_copied_caches(t)
    cache = "v_cache" if name == "value" else "k_cache"
    inside[name] = inside[cache][:, :, 17:22]
    outside[name] = outside[cache][:, :, 17:22].clone()
    assert_bits(call(case, inside), call(case, outside))
    assert_caches(inside, outside)


def test_a_lazily_cloned_cache_is_written_alone():
    case = Case(F32, 16, lengths=(20, 20), new_rows=1)
    t = case.tensors()
    before = {name: t[name].clone() for name in ("k_cache", "v_cache")}
    call(case, t | {name: torch._lazy_clone(t[name]) for name in before})
    call(case, t | {name: torch._lazy_clone(t["k_cache"]) for name in before})
    for name, tensor in before.items():
        assert same_bits(t[name], tensor)


def test_many_queries_take_little_memory():
    """Not a copy of the output for every chunk of keys."""
    query, cache = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 8192, 64)
    taken = allocated(torch.ops.onepass.attention_decode, query, cache, cache, scale=0.1)
    assert query.nbytes < taken < 8 * query.nbytes


@everywhere
def test_new_rows_may_fall_into_the_padding():
    """They are written, but are not keys until the padding ends before them."""
    for page_size in (0, 4):
        case = Case(F32, 16, lengths=(2, 2), new_rows=6, seq_q=2, page_size=page_size)
        t = case.tensors()
        expected = ours(case, t | dict(cache_leftpad=int32([5, 8])))
        assert (expected["lse"][1] == -torch.inf).all() and not expected["output"][1].any()
        # The first sequence is as one of the three keys after the padding.
        only = replace(case, lengths=(3,), new_rows=-1, page_size=0, room=0, draw=9)
        alone_t = only.tensors()
        alone_t["query"] = t["query"][:1]
        for name, new in (("k_cache", "key"), ("v_cache", "value")):
            alone_t[name][0] = t[new][0, :, 3:6]
        found = ours(only, alone_t)
        for name in ("output", "lse"):
            assert same_bits(found[name], expected[name][:1])
