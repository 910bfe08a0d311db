"""Calls that are done completely or not at all, at any exception or Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def settled(work: Callable[[], Result], settle: Callable[[], None]) -> Result:
    """Runs `work()` and then, also after an exception, `settle()` to its end.

    Python delivers Ctrl-C between any two bytecodes, so also inside a `finally`: `settle` runs
    twice, so that one interrupt leaves one complete run. It detects itself how far `work` came, and
    is idempotent.
    """
    try:
        try:
            return work()
        finally:
            settle()
    finally:
        settle()


def as_before(thing: object, attributes: dict) -> None:
    """Gives `thing` exactly these attributes."""
    thing.__dict__.clear()
    thing.__dict__.update(attributes)
