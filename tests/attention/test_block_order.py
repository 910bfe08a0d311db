"""The order of attention's tiles on CUDA (csrc/cuda/attention/order.h), checked by brute force and
by a model of a device, where every block goes to the slot that is free first.
"""

import heapq
import random
import subprocess
from typing import NamedTuple

import pytest

from tests.emulator import emulated

MIB = 1 << 20


class Call(NamedTuple):
    batch: int
    kv_heads: int
    heads: int  # of each kv head
    tiles: int
    pair_bytes: int
    l2_bytes: int
    multiprocessors: int

    @property
    def pairs(self) -> int:
        return self.batch * self.kv_heads


class Place(NamedTuple):
    batch: int
    kv_head: int
    head: int  # of all
    turn: int


def orders(calls: list[Call]) -> list[tuple[int, list[Place]]]:
    """For each call, how many pairs take turns, and its blocks in order."""
    text = "\n".join(" ".join(map(str, call)) for call in calls)
    result = subprocess.run(
        [emulated.program("block_order", "plain")],
        input=text + "\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = []
    for line in result.stdout.splitlines():
        group, *numbers = map(int, line.split())
        places = zip(*(numbers[i::4] for i in range(4)), strict=True)
        found.append((group, [Place(*place) for place in places]))
    assert len(found) == len(calls)
    return found


def random_calls(count: int, seed: int) -> list[Call]:
    rng = random.Random(seed)
    few = [1, 1, 2, 3, 5, 8, 13]
    return [
        Call(rng.choice([*few, 40]), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 5]),
             rng.choice(few), rng.choice([0, 1, 7, 30]),
             2 * rng.choice([0, 1, 29, 30, 60, 100, 10_000]), rng.choice([1, 1, 10, 40]))
        for _ in range(count)
    ]  # fmt: skip


CALLS = random_calls(500, seed=0)


@pytest.fixture(scope="module")
def found():
    return orders(CALLS)


def groups(call: Call, size: int) -> list[range]:
    """Groups of pairs that take turns; the first group may be smaller."""
    ends = range(call.pairs, 0, -size)
    return [range(max(end - size, 0), end) for end in reversed(ends)]


def test_every_tile_comes_once_and_the_longest_of_a_group_first(found):
    """Heads that share keys are neighbours."""
    for call, (size, places) in zip(CALLS, found, strict=True):
        expected = [
            Place(pair // call.kv_heads, kv_head, kv_head * call.heads + head, turn)
            for group in groups(call, size)
            for turn in range(call.tiles)
            for pair in group
            for kv_head in [pair % call.kv_heads]
            for head in range(call.heads)
        ]
        assert places == expected, call


def test_how_many_take_turns(found):
    """As many as fit into half the cache and fill the device, or up to twice as many."""
    for call, (size, _) in zip(CALLS, found, strict=True):
        fit = call.l2_bytes // 2 // max(call.pair_bytes, 1)
        at_once = -(-2 * call.multiprocessors // (call.heads * call.tiles))
        least = max(fit, at_once, 1)
        whole = size == call.pairs <= 2 * least
        assert whole or least <= size < 2 * least and size & (size - 1) == 0, call


# ---- a model of a device -------------------------------------------------------------------------

QUERIES, KEYS = 128, 64  # of the tile of head_dim 128
START = 3  # cost of starting a block, in units of a tile of keys
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def causal(length: int, l2_bytes: int) -> Call:
    """16,384 tokens, 16 heads of 128 columns in 16 bits."""
    return Call(16384 // length, 16, 1, length // QUERIES, 4 * 128 * length, l2_bytes, 132)


def busy(places: list[Place], length: int, slots: int) -> float:
    """The share of the time in which `slots` slots have a block."""
    tiles = length // QUERIES
    free = [0] * slots
    total = 0
    for place in places:
        keys = START + (tiles - place.turn) * QUERIES // KEYS
        total += keys
        heapq.heappush(free, heapq.heappop(free) + keys)
    return total / slots / max(free)


@pytest.mark.parametrize("slots", [132, 264])
@pytest.mark.parametrize("l2_bytes", [6 * MIB, 200 * MIB])
def test_a_model_of_a_device_is_busy(slots, l2_bytes):
    """With one or two blocks on each multiprocessor."""
    calls = [causal(length, l2_bytes) for length in LENGTHS]
    for length, (_, places) in zip(LENGTHS, orders(calls), strict=True):
        assert busy(places, length, slots) > 0.96, length
        one_by_one = sorted(places)
        assert busy(one_by_one, length, slots) < 0.95 or length == 16384, length
