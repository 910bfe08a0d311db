"""Times of interleaved rounds, and the paired ratio between two of the variants in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    def to_dict(self) -> dict:
        return dict(self.__dict__)


@dataclass
class Timing:
    """Milliseconds per variant and round."""

    times: dict[str, list[float]]

    def median(self, name: str) -> float:
        return float(numpy.median(self.times[name]))

    def percentile(self, name: str, percent: float) -> float:
        return float(numpy.percentile(self.times[name], percent))

    def ratios(self, name: str, against: str) -> list[float]:
        """Per round, how many times faster name is than against."""
        pairs = zip(self.times[against], self.times[name], strict=True)
        return [slow / fast for slow, fast in pairs]

    def ratio(self, name: str, against: str) -> Interval:
        """Median of the ratios and its percentile bootstrap interval, from a fixed seed."""
        ratios = numpy.array(self.ratios(name, against))
        draws = numpy.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
        low, high = numpy.percentile(numpy.median(ratios[draws], axis=1), [2.5, 97.5])
        return Interval(float(numpy.median(ratios)), float(low), float(high))


def time_rounds(
    steps: dict[str, Callable[[int], None]],
    rounds: int,
    seconds: float,
    max_rounds: int,
    advance: Callable[[], None],
) -> Timing:
    """Runs every step once per round, in turn forwards and backwards.

    At least `rounds` rounds; more, up to max_rounds, while they have taken less than `seconds`.
    A step gets the round's number and returns when its work is done.
    """
    times = {name: [] for name in steps}
    begin = time.perf_counter()
    for number in range(max(rounds, max_rounds)):
        if number >= rounds and time.perf_counter() - begin > seconds:
            break
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            steps[name](number)
            times[name].append((time.perf_counter() - start) * 1e3)
            advance()
    return Timing(times)
