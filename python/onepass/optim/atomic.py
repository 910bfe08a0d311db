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


def all_or_nothing(
    thing: object, work: Callable[[], None], finish: Callable[[], None] = lambda: None
) -> None:
    """Runs `work()`, which changes attributes of `thing`, then `finish()`, which is idempotent. If
    `work` is not done, the attributes are as before."""
    before, done = dict(thing.__dict__), []

    def whole() -> None:
        work()
        done.append(True)

    def settle() -> None:
        if not done:
            as_before(thing, before)
        finish()

    settled(whole, settle)


def as_before(thing: object, attributes: dict) -> None:
    """Gives `thing` exactly these attributes."""
    thing.__dict__.clear()
    thing.__dict__.update(attributes)
