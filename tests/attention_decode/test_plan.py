"""How decoding on CUDA is divided into pieces (csrc/cuda/attention/decode.h), by brute force.

A plan may not read lengths, so its workspace must suffice for every sequence that fits the cache;
and where chunks begin may depend on a sequence's own length and window alone.
"""

import random
import subprocess
from dataclasses import dataclass, replace

import pytest

from tests.emulator import emulated

LEAST, UNIT, CHUNKS, RUN = 128, 64, 128, 16
FEW, MANY = 128, 1024


@dataclass(frozen=True)
class Call:
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    seq_q: int = 1
    seq_k: int = 32768  # room of a cache
    window_left: int = -1
    window_right: int = -1
    most_rows: int = 16
    leftpad: int = 0
    old: int = 32768
    new_rows: int = 0

    @property
    def last(self) -> int:
        return self.old + self.new_rows

    def seen(self, query: int) -> range:
        """The rows of the cache that a query sees."""
        position = self.last - self.seq_q + query
        left = self.leftpad if self.window_left < 0 else position - self.window_left
        right = self.last if self.window_right < 0 else position + self.window_right + 1
        return range(max(left, self.leftpad), min(right, self.last))


@dataclass(frozen=True)
class Tile:
    keys: int  # of a chunk
    chunks: range
    pieces: list[range]  # of chunks


@dataclass(frozen=True)
class Shape:
    group: int
    rows: int
    tile_rows: int
    kv_tiles: int
    tiles: int
    per_piece: int
    splits: int
    slots: int
    states: int
    of_tiles: list[Tile]


def planned(calls: list[Call]) -> list[Shape]:
    lines = [" ".join(str(value) for value in vars(call).values()) for call in calls]
    program = emulated.program("decode_plan", "plain")
    result = subprocess.run(
        [program], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True
    )
    shapes = []
    for line in result.stdout.splitlines():
        head, *tiles = line.split(" | ")
        of_tiles = []
        for text in tiles:
            keys, first, last, *ends = map(int, text.split())
            pieces = [range(*ends[i : i + 2]) for i in range(0, len(ends), 2)]
            of_tiles.append(Tile(keys, range(first, last), pieces))
        shapes.append(Shape(*map(int, head.split()), of_tiles))
    assert len(shapes) == len(calls)
    return shapes


def random_calls(count: int, seed: int) -> list[Call]:
    rng = random.Random(seed)
    sizes = [0, 1, 63, 127, 128, 129, 1000, 2048, 2049, 16383, 16384, 16385, 40_000, 131_072]

    def size(most):
        return min(rng.choice([rng.choice(sizes), rng.randrange(most + 1)]), most)

    calls = []
    for _ in range(count):
        seq_k = size(200_000)
        old = size(seq_k)
        new_rows = rng.choice([0, 0, 1, min(20, seq_k - old)])
        new_rows = min(new_rows, seq_k - old)
        kv_heads = rng.randrange(1, 9)
        windows = (rng.choice([-1, -1, 0, 5, size(200_000)]) for _ in range(2))
        calls.append(
            Call(
                rng.choice([1, 2, 7, 40, 300, 2000]), kv_heads * rng.choice([1, 2, 4, 5, 8, 16]),
                kv_heads, rng.choice([1, 1, 2, 5, 16, 17, 90]), seq_k, *windows,
                rng.choice([4, 8, 16]), rng.choice([0, 0, size(old + new_rows)]), old, new_rows,
            )
        )  # fmt: skip
    return calls


CALLS = random_calls(3000, seed=0)


@pytest.fixture(scope="module")
def shapes():
    return planned(CALLS)


def test_chunks_cover_what_a_tile_sees(shapes):
    """And no keys before or after them."""
    for call, shape in zip(CALLS, shapes, strict=True):
        for number, tile in enumerate(shape.of_tiles):
            first = number * shape.tile_rows
            rows = range(first, min(first + shape.tile_rows, shape.rows))
            seen = [call.seen(query) for query in {row // shape.group for row in rows}]
            low = min(keys.start for keys in seen) - call.leftpad
            high = max(keys.stop for keys in seen) - call.leftpad
            if low >= high:
                assert tile.chunks == range(1), call
                continue
            expected = range(low // tile.keys, (high - 1) // tile.keys + 1)
            assert tile.chunks == expected, call


def test_pieces_are_the_chunks_in_order_cut_where_runs_end(shapes):
    for call, shape in zip(CALLS, shapes, strict=True):
        for tile in shape.of_tiles:
            assert [chunk for piece in tile.pieces for chunk in piece] == list(tile.chunks), call
            for piece, behind in zip(tile.pieces, tile.pieces[1:], strict=False):
                assert piece.stop == behind.start and piece.stop % shape.per_piece == 0, call
            if shape.per_piece > 1:  # a run is never shared by two pieces
                assert shape.per_piece % RUN == 0


def test_what_a_plan_makes_room_for_is_enough(shapes):
    """Blocks for several pieces each, states for all, and no more than decode.h promises."""
    for call, shape in zip(CALLS, shapes, strict=True):
        group = call.heads // call.kv_heads
        assert (shape.group, shape.rows) == (group, group * call.seq_q)
        assert shape.kv_tiles * shape.tile_rows >= shape.rows
        assert shape.tiles == call.batch * call.kv_heads * shape.kv_tiles
        assert len(shape.of_tiles) == shape.kv_tiles and shape.splits >= 1
        for tile in shape.of_tiles:
            assert len(tile.chunks) <= CHUNKS + 2
            assert len(tile.pieces) <= max(shape.slots, 1), call
            runs = {chunk // RUN for chunk in tile.chunks}
            if shape.per_piece > CHUNKS + 2 and len(runs) > 1:  # joined in the workspace
                assert shape.slots == 1, call
        assert shape.states == shape.tiles * shape.slots * shape.tile_rows
        if shape.tiles < FEW:
            assert shape.slots <= CHUNKS + 2
        elif shape.tiles < MANY:
            assert shape.slots <= CHUNKS // RUN + 2
        else:
            assert shape.slots <= 1
        assert shape.tiles * shape.splits <= max(8 * MANY, shape.tiles), call
        assert shape.slots != 1 or shape.splits == 1


def test_chunks_are_as_few_keys_as_their_number_allows():
    def keys(length, **options):
        return planned([Call(old=length, seq_k=max(length, 1), **options)])[0].of_tiles[0].keys

    for length in (0, 1, 128, 129, CHUNKS * LEAST, CHUNKS * LEAST + 1, 32768, 32769, 1_000_000):
        found = keys(length)
        assert found % UNIT == 0 and found >= LEAST and found * CHUNKS >= length
        assert found == LEAST or (found - UNIT) * CHUNKS < length
        for window in (1, 500, 20_000, 40_000):  # as if the cache held only seen keys
            assert keys(length, window_left=window - 1, window_right=0) == keys(min(length, window))


def test_chunks_depend_on_the_sequence_alone():
    """Not on the batch, the room of its cache, padding, heads, or how many rows are new."""
    one = Call(old=20_000, seq_k=20_000)
    others = [
        replace(one, batch=50), replace(one, seq_k=300_000), replace(one, batch=3000),
        replace(one, leftpad=777, old=20_777, seq_k=20_777), replace(one, heads=2),
        replace(one, old=19_990, new_rows=10), replace(one, most_rows=4),
    ]  # fmt: skip
    expected, *found = planned([one, *others])
    for call, shape in zip(others, found, strict=True):
        assert shape.of_tiles[0].chunks == expected.of_tiles[0].chunks, call
        assert shape.of_tiles[0].keys == expected.of_tiles[0].keys, call


def test_a_long_context_of_one_sequence_fills_a_device():
    """32,768 keys on two kv heads: blocks for all of an H100's 132 multiprocessors."""
    for length in (32_768, 32_769, 40_000, 131_072, 1_000_000):
        (shape,) = planned([Call(old=length, seq_k=length)])
        assert shape.tiles * len(shape.of_tiles[0].pieces) >= 132, length
