"""The memory that a call takes from torch's allocator."""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated(function: Callable, *arguments, **options) -> int:
    """All bytes that it allocates, freed again or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function(*arguments, **options)
    events = found.profiler.kineto_results.events()
    return sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")


def peak(function: Callable, *arguments, **options) -> int:
    """The peak of a call's bytes in torch's allocator, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function(*arguments, **options)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(sizes, initial=0))


def retained(function: Callable, *arguments, **options) -> int:
    """The bytes that it has allocated and not freed when it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = function(*arguments, **options)
    events = found.profiler.kineto_results.events()
    del kept
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
