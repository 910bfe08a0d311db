"""Timing of several variants side by side, and the statistics of it.

On a shared machine the same code runs at a different speed a second later. So variants take turns
in short batches, in an order that rotates from round to round; a ratio is taken within each round
and its median reported, with a bootstrap interval. Then a temporary slowdown of the
machine slows all variants.

Speed also differs between processes: the physical pages of a tensor determine how its lines share
the cache, which changes a kernel's time in the cache by half, as long as the tensor lives. So a
case is measured at several places in memory (`pool`), and the interval includes their differences.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from onepass.tools.machine import machine_facts, page_faults

__all__ = [
    "CudaClock",
    "HostClock",
    "Interval",
    "Timing",
    "bootstrap_median",
    "clock_of",
    "machine_facts",
    "measure_pairs",
    "pool",
]

BATCH_SECONDS = 1.5e-3  # long against the clock's call, short against disturbances
MIN_ROUNDS = 15
MAX_ROUNDS = 500
WARM_UP_CALLS = 3
RESAMPLES = 2000


class HostClock:
    """Times a batch of calls that are done when they return, and counts page faults.

    Args:
        now: gives seconds; `time.thread_time` leaves out what other programs take, and fits calls
            that run in one thread.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now

    def seconds(self, function: Callable[[], object], calls: int) -> float:
        repetitions = range(calls)
        start = self.now()
        for _ in repetitions:
            function()
        return self.now() - start

    def page_faults(self) -> int:
        return page_faults()


class CudaClock:
    """Times a batch of calls by events on torch's current stream: the device's own time line."""

    def seconds(self, function: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        function()  # keeps the device busy until the first timed calls arrive
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def page_faults(self) -> int:
        return 0


def clock_of(device: str) -> HostClock | CudaClock:
    return CudaClock() if device == "cuda" else HostClock()


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def bootstrap_median(values: Sequence[float], groups: Sequence[int] = ()) -> Interval:
    """The median of values and its percentile bootstrap interval; the resampling has a fixed seed.

    Args:
        values: the sample.
        groups: lengths of consecutive groups of related values: whole groups are drawn, then values
            in each. Without groups, all values are independent.

    Raises:
        ValueError: there are no values, or the groups do not add up to them.
    """
    sample = numpy.asarray(values, dtype=float)
    if sample.size == 0:
        raise ValueError("bootstrap_median: values must hold at least one value, got none")
    if groups and sum(groups) != sample.size:
        raise ValueError(
            f"bootstrap_median: groups must add up to {sample.size}, got {list(groups)}"
        )
    random = numpy.random.default_rng(0)
    if len(groups) < 2:
        medians = numpy.median(
            sample[random.integers(sample.size, size=(RESAMPLES, sample.size))], 1
        )
    else:
        parts = numpy.split(sample, numpy.cumsum(groups)[:-1])
        medians = [
            numpy.median(
                numpy.concatenate(
                    [
                        parts[group][random.integers(len(parts[group]), size=len(parts[group]))]
                        for group in random.integers(len(parts), size=len(parts))
                    ]
                )
            )
            for _ in range(RESAMPLES)
        ]
    low, high = numpy.percentile(medians, [2.5, 97.5])
    return Interval(float(numpy.median(sample)), float(low), float(high))


@dataclass(frozen=True)
class Timing:
    """Seconds per call, by variant and round."""

    times: dict[str, list[float]]
    calls: dict[str, int]  # per batch
    faults: dict[str, float]  # page faults per call
    groups: list[int] = field(default_factory=list)  # rounds at each place; empty: at one

    @property
    def rounds(self) -> int:
        return len(next(iter(self.times.values())))

    def median(self, name: str) -> float:
        return float(numpy.median(self.times[name]))

    def fastest(self, name: str) -> float:
        return min(self.times[name])

    def percentile(self, name: str, percent: float) -> float:
        return float(numpy.percentile(self.times[name], percent))

    def ratio(self, name: str, against: str) -> Interval:
        """How many times faster name is than against; above 1 is faster."""
        pairs = zip(self.times[against], self.times[name], strict=True)
        return bootstrap_median([slow / fast for slow, fast in pairs], self.groups)

    def difference(self, name: str, against: str) -> Interval:
        """Seconds that name takes more than against."""
        pairs = zip(self.times[name], self.times[against], strict=True)
        return bootstrap_median([mine - theirs for mine, theirs in pairs], self.groups)

    def to_dict(self) -> dict:
        return {
            name: {
                "median_us": self.median(name) * 1e6,
                "p10_us": self.percentile(name, 10) * 1e6,
                "p90_us": self.percentile(name, 90) * 1e6,
                "fastest_us": self.fastest(name) * 1e6,
                "calls_per_batch": self.calls[name],
                "page_faults_per_call": self.faults[name],
            }
            for name in self.times
        }


def measure_pairs(
    functions: dict[str, Callable[[], object]],
    *,
    rounds: int = MIN_ROUNDS,
    seconds: float = 0.5,
    max_rounds: int = MAX_ROUNDS,
    batch_seconds: float = BATCH_SECONDS,
    warm_up: int = WARM_UP_CALLS,
    clock: HostClock | CudaClock | None = None,
) -> Timing:
    """Times functions without arguments in turn, each in batches of about `batch_seconds`.

    Args:
        functions: variants by name; every one is warmed up alike.
        rounds: at least this many batches of each.
        seconds: more rounds follow, up to max_rounds, while all of them took less than this.
        warm_up: calls of each before it is timed.
        clock: times a batch; the host's by default.

    Raises:
        ValueError: there are no functions, or rounds is not positive.
    """
    if not functions or rounds < 1:
        raise ValueError("measure_pairs: functions and rounds must not be empty")
    clock = clock or HostClock()
    calls = {}
    for name, function in functions.items():
        for _ in range(warm_up):
            function()
        calls[name] = _calls_per_batch(clock, function, batch_seconds)
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    faults = dict.fromkeys(names, 0)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        for number in range(max(rounds, max_rounds)):
            if number >= rounds and time.perf_counter() - begin > seconds:
                break
            for name in _order(names, number):
                faults_before = clock.page_faults()
                times[name].append(clock.seconds(functions[name], calls[name]) / calls[name])
                faults[name] += clock.page_faults() - faults_before
    finally:
        if collecting:
            gc.enable()
    taken = len(times[names[0]])
    return Timing(times, calls, {name: faults[name] / taken / calls[name] for name in names})


def pool(timings: Sequence[Timing]) -> Timing:
    """One Timing of the same variants measured at several places."""
    names = timings[0].times
    return Timing(
        {name: [value for timing in timings for value in timing.times[name]] for name in names},
        timings[0].calls,
        {name: float(numpy.mean([timing.faults[name] for timing in timings])) for name in names},
        [timing.rounds for timing in timings],
    )


def _order(names: list[str], number: int) -> list[str]:
    """Rotated, and reversed every other time, so that each variant follows every other one."""
    shift = number // 2 % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated if number % 2 == 0 else rotated[::-1]


def _calls_per_batch(
    clock: HostClock | CudaClock, function: Callable[[], object], batch_seconds: float
) -> int:
    calls = 1
    while (elapsed := clock.seconds(function, calls)) < batch_seconds / 4:
        calls *= 4
    return max(1, math.ceil(calls * batch_seconds / elapsed))
