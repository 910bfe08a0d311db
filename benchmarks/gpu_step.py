"""The steps of `make gpu-report`: commands that run several at once, within seconds in all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from gpu_machine import ROOT, slug

# How a step that still runs is ended, and the seconds that it then has. First as by Ctrl-C: pytest
# and `onepass bench` then print what they have found so far.
ENDINGS = {signal.SIGINT: 10.0, signal.SIGTERM: 3.0, signal.SIGKILL: 3.0}
TAIL = 30  # lines of a failed step that are shown
FIGURE = "figure "  # a line of a step's output that begins so is printed as soon as it is written
POLL = 0.5  # seconds between two looks for such lines
LAUNCH = [sys.executable, "-S", str(Path(__file__).with_name("gpu_launch.py"))]


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        result: "ok", "failed", "skipped" (its tool is missing) or "left out" (no time for it).
        detail: the findings, or the reason.
    """

    result: str
    detail: str = ""


def by_exit_code(code: int | None, log: str = "") -> Outcome:
    """A step that did not end has shown no fault."""
    return Outcome("failed", f"exit code {code}") if code else Outcome("ok")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        least: with fewer seconds left it is not begun.
        limit: seconds that it may take at most.
        command: gives its arguments, for the seconds that it has.
        judge: gives its outcome, from the exit code and the output. Of a step that did not end in
            time the code is None, and it has failed only if it found a fault.
        environment: variables added to the environment of all steps.
        folder: where it runs. Steps that write figures run in the folder of the results: the
            command in a result then contains no path of this machine.
        skip: why it cannot run here; empty if it can.
    """

    name: str
    least: float
    limit: float
    command: Callable[[float], Sequence[str]]
    judge: Callable[[int | None, str], Outcome] = by_exit_code
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT
    skip: str = ""


class Runner:
    """Runs steps; Ctrl-C or SIGTERM of the report ends those that run, and their children.

    Args:
        logs: the folder of the steps' output, a file for each.
        environment: that of all steps.
        say: prints a line.
        keep: gets the records so far after each step, so that they survive if this process ends.
    """

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str] = os.environ,
        say: Callable[[str], object] = print,
        keep: Callable[[list[dict]], object] = lambda records: None,
    ):
        self.logs, self.environment, self.say, self.keep = logs, environment, say, keep
        self.records: list[dict] = []
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._ended = False
        logs.mkdir(parents=True, exist_ok=True)

    def execute(self, steps: Sequence[Step], budget: float, at_once: int = 1) -> list[dict]:
        """Runs the steps in their order, `at_once` of them together, within `budget` seconds.

        A step gets the time that is left, at most its limit. If the first, the build, fails, no
        other runs. Returns the records of all steps that this runner has run.
        """
        end = time.monotonic() + budget
        first, *others = steps
        built = self._step(first, end, "").result == "ok"
        because = "" if built else "nothing was built"
        with ThreadPoolExecutor(at_once) as pool:
            found = [pool.submit(self._step, step, end, because) for step in others]
            try:
                for future in found:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # none begins when one is ended
                self._end_all()
                raise
        return self.records

    def _step(self, step: Step, end: float, because: str) -> Outcome:
        seconds = min(step.limit, end - time.monotonic())
        start = time.monotonic()
        text = ""
        if because:
            outcome = Outcome("left out", because)
        elif step.skip:
            outcome = Outcome("skipped", step.skip)
        elif seconds < step.least:
            outcome = Outcome("left out", f"{max(seconds, 0):.0f} s of the budget were left")
        else:
            code, text = self.run(step, seconds)
            if code is None:
                outcome = _unfinished(step, seconds, text)
            else:
                outcome = judged(step, code, text)
        with self._lock:
            taken = time.monotonic() - start
            record = {"name": step.name, **asdict(outcome), "seconds": round(taken, 1)}
            self.records.append(record)
            self.keep(self.records)
            self.say(f"{step.name:<18} {outcome.result:<9} {taken:5.0f} s  {outcome.detail}")
            if outcome.result == "failed":
                for line in text.splitlines()[-TAIL:]:
                    self.say(f"    {line}")
        return outcome

    def run(self, step: Step, seconds: float) -> tuple[int | None, str]:
        """(exit code, or None if it did not end in time; its output, which goes to its log too).

        `say` gets its figures while it runs: if this process is ended, they are known.
        """
        words = [str(word) for word in step.command(seconds)]
        with open(
            self.logs / f"{slug(step.name)}.log", "w+", encoding="utf-8", errors="replace"
        ) as log:
            log.write(f"$ {' '.join(words)}\n")
            log.flush()
            begin = log.tell()
            try:
                process = self._start(step, words, log)
            except OSError as error:
                return 127, str(error)
            try:
                with open(log.name, encoding="utf-8", errors="replace") as output:
                    output.seek(begin)
                    code = self._wait(process, seconds, output)
            finally:
                end(process)
                self._running.discard(process)
            log.seek(begin)
            return code, log.read()

    def _start(self, step: Step, words: Sequence[str], log: TextIO) -> subprocess.Popen:
        with self._lock:
            if self._ended:
                raise OSError("the report is ending")
            process = subprocess.Popen(
                [*LAUNCH, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=step.folder,
                env={**self.environment, **step.environment},
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def _wait(self, process: subprocess.Popen, seconds: float, output: TextIO) -> int | None:
        """Its exit code, or None if it does not end in time."""
        until, begun = time.monotonic() + seconds, ""
        while True:
            left = until - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(min(POLL, left), 0))
            *lines, begun = (begun + output.read()).split("\n")
            for line in lines:
                if line.startswith(FIGURE):
                    self.say(f"    {line.removeprefix(FIGURE)}")
            if process.returncode is not None or left <= 0:
                return process.returncode

    def _end_all(self) -> None:
        with self._lock:
            self._ended = True
            running = list(self._running)
        end(*running)


def judged(step: Step, code: int | None, text: str) -> Outcome:
    try:
        return step.judge(code, text)
    except Exception as error:  # of results in an unknown form; the other steps still run
        return Outcome("failed", f"exit code {code}; its results could not be read: {error!r}")


def _unfinished(step: Step, seconds: float, text: str) -> Outcome:
    """Of a step that did not end: its own fault only if it had its full limit, or found one."""
    found = judged(step, None, text)
    bad = seconds >= step.limit or found.result == "failed"
    detail = "; ".join(filter(None, [f"did not end within {seconds:.0f} s", found.detail]))
    return Outcome("failed" if bad else "left out", detail)


def end(*processes: subprocess.Popen) -> None:
    """Ends steps that still run, and the processes that they left behind."""
    for ending, seconds in ENDINGS.items():
        until = time.monotonic() + seconds
        left = [p for p in processes if ending == signal.SIGKILL or p.poll() is None]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))


def read_json(file: Path) -> dict | None:
    """None if there is no such file, or another one."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
