"""What a call takes from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated(function: Callable, *arguments, **options) -> int:
    """The bytes that it asks for, whether it gives them back or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function(*arguments, **options)
    events = found.profiler.kineto_results.events()
    return sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")
