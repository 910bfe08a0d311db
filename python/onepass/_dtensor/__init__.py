"""Operators on DTensors: each process computes its part (:mod:`onepass._dtensor.tensors`)."""

from __future__ import annotations

from collections.abc import Callable

from onepass._ops import entry


def register() -> None:
    """Makes calls of every operator whose first argument is a DTensor run by its rule."""
    entry.run_on_dtensors = _run


def _run(function: Callable, *args, **kwargs):
    # Imported at the first such call: torch's DTensors take longer to import than onepass.
    from onepass._dtensor.tensors import run

    return run(function, *args, **kwargs)
