"""Progress of a long run on stderr, so that stdout holds the outcome alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

EVERY = 10.0  # seconds between two lines, off a terminal
clock = time.monotonic


class Phase(NamedTuple):
    """A part of a run that takes at least so many steps and seconds; 0: unknown."""

    name: str  # "kind, detail"
    steps: int = 0
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        return self.name.partition(",")[0]

    def left(self, done: int, elapsed: float) -> float | None:
        """Seconds, by the time that the steps so far took; None: unknown."""
        if not self.seconds and not (done and self.steps):
            return None
        of_steps = elapsed / done * (self.steps - done) if done else 0.0
        return max(of_steps, self.seconds - elapsed, 0.0)


class Progress:
    """Context manager. On a terminal a bar with the time that is left; elsewhere a line every ten
    seconds.

    A phase that has not begun is expected to take as long as an earlier one of its kind, or else
    its least time, or else the mean of all so far.
    """

    def __init__(self, command: str, phases: Sequence[Phase]):
        self._command, self._ahead = command, list(phases)
        self._took: dict[str, float] = {}  # seconds of phases that have ended, by kind
        self._phase: Phase | None = None
        self._done, self._start = 0, clock()
        self._start_of_phase = self._start
        self._ended = threading.Event()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            _Times(self),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bars.add_task(command, total=1.0)

    def __enter__(self) -> Progress:
        self._bars.start()
        if self._bars.disable:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._bars.stop()

    def next(self) -> Callable[[], None]:
        """Begins the next phase; returns a function to call after each of its steps."""
        now = clock()
        if self._phase is not None:
            self._took[self._phase.kind] = now - self._start_of_phase
        self._phase, self._done, self._start_of_phase = self._ahead.pop(0), 0, now
        self._show()
        return self._advance

    def _advance(self) -> None:
        self._done += 1
        self._show()

    def times(self) -> tuple[float, float | None]:
        """Seconds since the start, and about how many are left; None: unknown."""
        now = clock()
        here = now - self._start_of_phase
        left = self._phase and self._phase.left(self._done, here)
        if left is None:
            return now - self._start, None
        expected = self._took | {self._phase.kind: here + left}
        mean = sum(expected.values()) / len(expected)
        ahead = (expected.get(phase.kind, phase.seconds or mean) for phase in self._ahead)
        return now - self._start, left + sum(ahead)

    def line(self) -> str:
        """The phase, its step, and the time."""
        phase, done = self._phase, self._done
        step = f": step {done}" if done or phase.steps else ""
        of = f" of {phase.steps}" if done <= phase.steps and step else ""
        return f"{phase.name}{step}{of}; {spent(*self.times())}"

    def _show(self) -> None:
        elapsed, left = self.times()
        share = elapsed / (elapsed + left) if left is not None and elapsed else 0.0
        steps = self.line().partition(";")[0]
        self._bars.update(self._task, description=steps, completed=share)

    def _tell(self) -> None:
        while not self._ended.wait(EVERY):
            if self._phase is not None:
                print(f"{self._command}: {self.line()}", file=sys.stderr, flush=True)


class _Times(ProgressColumn):
    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def render(self, _task) -> Text:
        return Text(spent(*self._progress.times()))


def spent(elapsed: float, left: float | None) -> str:
    if left is None:
        return f"{_minutes(elapsed)} so far"
    if not left:
        return f"{_minutes(elapsed)} so far, longer than expected"
    return f"{_minutes(elapsed)} of about {_minutes(elapsed + left)}, {_minutes(left)} left"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
