"""Calls that are made whole or not at all, wherever an exception or Ctrl-C comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def settled(work: Callable[[], Result], settle: Callable[[], None]) -> Result:
    """`work()`, and after it, or after what left it, `settle()` to its end.

    Python delivers Ctrl-C between any two bytecodes, so also between those of a `finally`: `settle`
    runs twice, and one interrupt leaves one of them whole. It finds out by itself what was done,
    and may run twice without harm.
    """
    try:
        try:
            return work()
        finally:
            settle()
    finally:
        settle()


def as_before(thing: object, attributes: dict) -> None:
    """Gives `thing` these attributes, and no others."""
    thing.__dict__.clear()
    thing.__dict__.update(attributes)
