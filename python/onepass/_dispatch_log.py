"""The kernels that ran, with reasons: the plans of the ops, recorded where they were made.

`record()` collects them for `onepass.explain`. With ONEPASS_LOG=dispatch in the environment each
distinct line is written once to the logger "onepass.dispatch" (stderr unless configured).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

from onepass import _C
from onepass._arguments import switches

logger = logging.getLogger("onepass.dispatch")
_enabled = bool(switches("ONEPASS_LOG", ("dispatch",)))
_seen: set[str] = set()
# Calls that were left to torch and reach no operator of ours; None while recording is off.
_left: list[dict] | None = [] if _enabled else None
_collected: list[list[dict]] = []  # of the blocks of `record` that are open, the innermost last
TORCH, TOO_SMALL = "torch's own", "too small to gain"  # a level, the beginning of a reason
_MOST = 4096  # the oldest are dropped first


@contextlib.contextmanager
def record() -> Iterator[list[dict]]:
    """Yields a list that holds, after the block, one dict per op call made in it.

    Keys: op, arguments, kernel, level, threads, rows_per_tile, splits, workspace_bytes, reason.
    Calls from other threads of the process are recorded too.
    """
    global _left
    records: list[dict] = []
    _flush()
    _C.record(True)
    _left = _left or []
    _collected.append(records)
    try:
        yield records
    finally:
        _flush()
        _collected[:] = [other for other in _collected if other is not records]
        if not _collected:
            _C.record(_enabled)
            _left = [] if _enabled else None


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Drops the records of calls in the block: a proof's, which are none of the model's."""
    _flush()
    try:
        yield
    finally:
        _take()


def is_recording() -> bool:
    return _left is not None


def record_fallback(op: str, arguments: str, kernel: str, threads: int, reason: str) -> None:
    """Records a call that torch's own kernel computes; no effect while recording is off."""
    if _left is not None:
        _left.append(
            dict(
                op=op,
                arguments=arguments,
                kernel=kernel,
                level=TORCH,
                threads=threads,
                rows_per_tile=0,
                splits=0,
                workspace_bytes=0,
                reason=reason,
            )
        )
        del _left[:-_MOST]
        if _enabled:
            _flush()


def _take() -> list[dict]:
    """The calls recorded since the last time."""
    calls = _C.take()
    if _left:
        calls += _left
        _left.clear()
    return calls


def line(call: dict) -> str:
    """One recorded call as a line of text."""
    tiles = f", {_count(call['splits'], 'split')}, {_count(call['rows_per_tile'], 'row')} per tile"
    return (
        f"{call['op']} ({call['arguments']}): {call['kernel']}, {call['level']}, "
        f"{_count(call['threads'], 'thread')}"
        f"{tiles if call['splits'] else ''}; {call['reason']}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def logged(function: Callable) -> Callable:
    """Wraps a function to log the plans of its calls; the function itself if logging is off."""
    if not _enabled:
        return function

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        _flush()
        return result

    return wrapper


def _flush() -> None:
    """Gives the calls since the last time to the log and to every open block of `record`."""
    calls = _take()
    for records in _collected:
        records.extend(calls)
    for call in calls if _enabled else ():
        say(line(call))


def say(text: str) -> None:
    """Writes a line to the log once, if logging is on."""
    if _enabled and text not in _seen:
        _seen.add(text)
        logger.info(text)


if _enabled:
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("onepass: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO)
    _C.record(True)
    atexit.register(_flush)  # backwards and compiled graphs call the ops without the wrappers
