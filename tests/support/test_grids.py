"""The quick cases of an exhaustive grid have every value of every parameter."""

import itertools

import pytest

from tests.support import grids


@pytest.mark.parametrize("sizes", [(7,), (7, 3), (3, 7), (4, 4), (2, 9, 4)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_every_value_once(sizes, count):
    cases = [dict(zip("abc", case, strict=False)) for case in itertools.product(*map(range, sizes))]
    lie = grids.on_diagonals(cases, count)
    kept = [case for case, quick in zip(cases, lie, strict=True) if quick]
    for name, size in zip("abc", sizes, strict=False):
        assert {case[name] for case in kept} == set(range(size))
    assert len(kept) <= count * max(sizes)
    assert len(kept) == max(sizes) * (1 if len(sizes) == 1 else count)


PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.grid
@pytest.mark.parametrize("letter", "xyz")
@pytest.mark.parametrize("one, two", PAIRS)
def test_a_grid(request, one, two, letter):
    """The cases on the diagonal are not slow."""
    slow = request.node.get_closest_marker("slow") is not None
    assert slow != on_the_diagonal(one, two, letter)


def on_the_diagonal(one, two, letter) -> bool:
    return "xyz".index(letter) == PAIRS.index((one, two)) % 3


@pytest.mark.emulator_grid
@pytest.mark.parametrize("letter", "xyz")
@pytest.mark.parametrize("one, two", PAIRS)
def test_a_grid_of_the_emulator(request, executor, one, two, letter):
    """All of it is quick elsewhere."""
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == (executor.name == "emulated" and not on_the_diagonal(one, two, letter))
