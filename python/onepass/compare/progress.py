"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Context manager; one bar per phase, on stderr, so that stdout holds the outcome alone."""

    def __init__(self):
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bars = Bars(
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def phase(self, description: str, total: int | None = None) -> Callable[[], None]:
        """Starts a bar of total units (None: unknown); returns a function that advances it by
        one."""
        for task in self._bars.tasks:
            self._bars.stop_task(task.id)
        task = self._bars.add_task(description, total=total)
        return lambda: self._bars.advance(task)
