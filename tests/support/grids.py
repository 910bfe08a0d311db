"""Exhaustive grids: `make test` takes every value of every parameter, `make test-all` all
combinations.

A test marked `grid` runs in `make test` with the cases on a diagonal of its parameters, one marked
`grid(2)` with those on two; the others are slow. Where two values together decide something, add
another diagonal, or a test of its own. A marked module marks its tests that have parameters.

Each executor has a grid of its own; the emulator, which is slow, has that of `emulator_grid` if a
test is marked so.
"""

from collections import defaultdict
from collections.abc import Sequence

import pytest


def on_diagonals(indices: Sequence[dict[str, int]], count: int = 1) -> list[bool]:
    """The cases, as indices of their parameters, on the first diagonals of the grid.

    Along a diagonal the longest parameter goes through its values, and the others cycle.
    """
    sizes = {name: 1 + max(case[name] for case in indices) for name in indices[0]}
    longest = max(sizes, key=sizes.__getitem__)
    others = [name for name in sizes if name != longest]

    def lies(case: dict[str, int], shift: int) -> bool:
        return all(case[name] == (case[longest] + shift) % sizes[name] for name in others)

    return [any(lies(case, shift) for shift in range(count)) for case in indices]


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks cases outside the diagonals slow."""
    grids: dict[tuple, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (grid := _grid(item)) is not None:
            grids[item.nodeid.partition("[")[0], _executor(item), grid].append(item)
    for (*_, count), cases in grids.items():
        lie = on_diagonals(_indices(cases), *count)
        for case, quick in zip(cases, lie, strict=True):
            if not quick:
                case.add_marker(pytest.mark.slow)


def _executor(item: pytest.Item) -> str | None:
    return item.callspec.params.get("executor")


def _grid(item: pytest.Item) -> tuple | None:
    """The number of diagonals in the mark of a case, if it has one."""
    if next(item.iter_markers("parametrize"), None) is None:
        return None
    mark = item.get_closest_marker("grid")
    if _executor(item) == "emulated":
        mark = item.get_closest_marker("emulator_grid") or mark
    return mark and mark.args


def _indices(cases: Sequence[pytest.Item]) -> list[dict[str, int]]:
    """The numbers of each case's values, by the names of a `parametrize`."""
    seen: dict[str, dict[tuple, int]] = defaultdict(dict)
    found: list[dict[str, int]] = [{} for _ in cases]
    for case, indices in zip(cases, found, strict=True):
        for parametrize in case.iter_markers("parametrize"):
            names = parametrize.args[0]
            words = names.replace(",", " ").split() if isinstance(names, str) else names
            values = tuple(id(case.callspec.params[name]) for name in words)
            of_name = seen[",".join(words)]
            indices[",".join(words)] = of_name.setdefault(values, len(of_name))
    return found
