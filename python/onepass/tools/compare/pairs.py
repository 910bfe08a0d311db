"""Rounds of whole training steps, timed as `onepass.tools.harness` times operators.

A step is long and changes its model, so it is neither repeated within a round nor warmed up here,
and every variant gets the round's number, to use the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from onepass.tools.harness import Timing
from onepass.tools.machine import page_faults


def time_rounds(
    steps: dict[str, Callable[[int], tuple[float, int] | None]],
    rounds: int,
    seconds: float,
    max_rounds: int,
    advance: Callable[[], None],
    before: Callable[[str, int], object] = lambda name, number: None,
) -> Timing:
    """Runs every step once per round, in turn forwards and backwards.

    At least `rounds` rounds; more, up to max_rounds, while they have taken less than `seconds`.
    A step gets the round's number and returns when its work is done; one that another process makes
    returns the seconds and page faults that it took there. `before`, which gets the step's name and
    the number, is called before each step and not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    faults = dict.fromkeys(steps, 0)
    begin = time.perf_counter()
    taken = 0
    while taken < rounds or (taken < max_rounds and time.perf_counter() - begin < seconds):
        for name in list(steps)[:: 1 if taken % 2 == 0 else -1]:
            before(name, taken)
            faults_before, start = page_faults(), time.perf_counter()
            elsewhere = steps[name](taken)
            here = time.perf_counter() - start, page_faults() - faults_before
            took, count = elsewhere or here
            times[name].append(took)
            faults[name] += count
            advance()
        taken += 1
    return Timing(
        times, dict.fromkeys(steps, 1), {name: count / taken for name, count in faults.items()}
    )
