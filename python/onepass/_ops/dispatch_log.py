"""Which kernel ran and why: the plans that the ops followed, recorded where they were made.

`record()` collects them for `onepass.explain`. With ONEPASS_LOG=dispatch in the environment each
distinct line is written once to the logger "onepass.dispatch" (stderr unless configured).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator

from onepass import _C

logger = logging.getLogger("onepass.dispatch")
_enabled = "dispatch" in os.environ.get("ONEPASS_LOG", "").split(",")
_seen: set[str] = set()


@contextlib.contextmanager
def record() -> Iterator[list[dict]]:
    """Yields a list that holds, after the block, one dict per op call made in it.

    Keys: op, arguments, kernel, level, threads, rows_per_tile, splits, workspace_bytes, reason.
    Calls from other threads of the process are recorded too.
    """
    records: list[dict] = []
    _C.take()
    _C.record(True)
    try:
        yield records
    finally:
        _C.record(_enabled)
        records.extend(_C.take())


def line(call: dict) -> str:
    """One recorded call as a line of text."""
    threads = "1 thread" if call["threads"] == 1 else f"{call['threads']} threads"
    return (
        f"{call['op']} ({call['arguments']}): {call['kernel']}, {call['level']}, {threads}, "
        f"{call['splits']} splits, {call['rows_per_tile']} rows per tile; {call['reason']}"
    )


def logged(function: Callable) -> Callable:
    """Writes the plans of a call to the log where that is on; elsewhere the function itself."""
    if not _enabled:
        return function

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        _flush()
        return result

    return wrapper


def _flush() -> None:
    for call in _C.take():
        say(line(call))


def say(text: str) -> None:
    """Writes a line to the log where that is on, once."""
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
