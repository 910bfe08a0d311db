"""A swap for the duration of a trainer's run, and its lines in the log."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable

from torch import nn

from onepass.optim.optimizer import FlatOptimizer
from onepass.swapping import Report, swap
from onepass.swapping.engine import begin

logger = logging.getLogger("onepass.swap")
_PREFIX = f"{logger.name}: "


class Session:
    """Swaps a model with options of `onepass.swap`, and restores it.

    Attributes:
        report: of the last swap; None before the first.
    """

    def __init__(self, options: dict):
        inspect.signature(swap).bind(None, **options)  # raises for unknown options
        self.report: Report | None = None
        self._options = options
        self._end: Callable[[], None] | None = None

    def begin(self, model: nn.Module, *, tell: bool) -> None:
        """Swaps; modules that an interrupted run left swapped are restored first.

        Args:
            tell: whether to write to the log: one process of a job does.
        """
        self.end(tell=tell)
        self.report, self._end = begin(model, **self._options)
        if tell:
            level = logging.INFO if self.report.swapped else logging.WARNING
            say(self.report.summary().removeprefix(_PREFIX), level)
            for note in self.report.notes:
                say(note)

    def end(self, *, tell: bool) -> None:
        """Undoes the changes of `begin`; does nothing if there are none."""
        end, self._end = self._end, None
        if end is None:
            return
        try:
            end()
        except RuntimeError as error:
            say(f"the model stays swapped: {error}", logging.WARNING)
            return
        if tell:
            say("the model is as it was before the run")


def say(text: str, level: int = logging.INFO) -> None:
    """Writes a line to the logger "onepass.swap", whose name formats of logging show; to stderr,
    with that name, if logging is not configured and would drop it."""
    if logger.hasHandlers():
        logger.log(level, text)
    elif level >= logger.level:
        print(f"{_PREFIX}{text}", file=sys.stderr)


def own_limit(optimizer: object) -> float | None:
    """The norm to which the steps of an optimizer of onepass clip; None if they do not clip, or for
    other optimizers. Wrappers are unwrapped."""
    while not isinstance(optimizer, FlatOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    return optimizer.max_grad_norm
