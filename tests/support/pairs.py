"""Combinations of options, fewer than all."""

import itertools
import random
from collections.abc import Sequence

import pytest


def pairwise(axes: dict[str, Sequence], seed: int = 0) -> list[dict]:
    """Rows that hold every pair of values of any two axes at least once; greedy, hence a few more
    than the product of the two longest axes."""
    rng = random.Random(seed)
    sizes = {name: range(len(values)) for name, values in axes.items()}
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(sizes, 2)
        for i, j in itertools.product(sizes[a], sizes[b])
    }
    position = {name: number for number, name in enumerate(sizes)}

    def pair(one, other):
        return (one, other) if position[one[0]] < position[other[0]] else (other, one)

    rows = []
    while open_pairs:
        first = min(open_pairs, key=lambda p: (position[p[0][0]], position[p[1][0]], p))
        row = dict(first)
        rest = [name for name in sizes if name not in row]
        for name in rng.sample(rest, len(rest)):
            gains = [
                sum(pair((name, i), chosen) in open_pairs for chosen in row.items())
                for i in sizes[name]
            ]
            best = max(gains)
            row[name] = rng.choice([i for i in sizes[name] if gains[i] == best])
        open_pairs -= {pair(*two) for two in itertools.combinations(row.items(), 2)}
        rows.append({name: axes[name][row[name]] for name in axes})
    return rows


def drawn(axes: dict[str, Sequence], count: int, seed: int = 0) -> list[dict]:
    """Rows of values that are drawn one by one: here three options and more meet."""
    rng = random.Random(seed)
    return [{name: rng.choice(values) for name, values in axes.items()} for _ in range(count)]


def every_third(rows: list[dict]) -> list:
    """Parameters of a test, of which every third is quick."""
    slow = [[pytest.mark.slow] if number % 3 else [] for number in range(len(rows))]
    return [
        pytest.param(row, marks=marks, id="-".join(map(str, row.values())))
        for row, marks in zip(rows, slow, strict=True)
    ]


def halved(*axes: Sequence) -> list:
    """Parameters of a test: the product of three axes or more, half of it slow. In the other half
    the sum of indices is even, so that all pairs of values of two axes are there."""
    indices = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(*values, marks=[pytest.mark.slow] * (sum(index) % 2))
        for index, values in zip(indices, itertools.product(*axes), strict=True)
    ]
