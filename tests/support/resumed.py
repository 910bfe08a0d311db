"""Cases that go on after a crash, a hang or a lost device: each of these costs one case.

    python -m tests.support.resumed --results FILE [--each SECONDS] MODULE [arguments]

MODULE is pytest, or a program that names its cases to `Cases`. Every case is a line of FILE as soon
as it ends. If the process ends within a case, that case has failed, and a new process goes on with
the next one. Exit codes: 0, 1 if a case failed, else that of MODULE.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

FILE, EACH = "ONEPASS_TEST_RESULTS", "ONEPASS_TEST_EACH"
LOST = 86  # the exit code of a process whose device answers no more
SECONDS = 60.0


class Result(NamedTuple):
    """How a case ended: "passed", "failed" or "skipped", and why."""

    case: str
    outcome: str
    seconds: float = 0.0
    why: str = ""


def results(file: Path) -> tuple[dict[str, Result], str]:
    """(the results by case, the case that began and did not end). A line that was cut is none."""
    found, running = {}, ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "outcome" in row:
            result = Result(**row)
            found[result.case], running = result, ""
        else:
            running = row["case"]
    return found, running


class Cases:
    """The cases of this process, and those that ended in processes before it."""

    def __init__(self, file: Path, each: float = SECONDS):
        self.file, self.each = file, each
        self.done = results(file)[0]
        self._begun: tuple[str, float] | None = None
        self._stderr = os.dup(2)  # pytest puts a file of its own in the place of 2 during a test

    @classmethod
    def of_environment(cls) -> Cases:
        return cls(Path(os.environ[FILE]), float(os.environ[EACH]))

    def begin(self, case: str) -> None:
        self._write({"case": case})
        self._begun = case, time.perf_counter()
        # In a thread of its own, which a kernel that hangs does not hold up.
        faulthandler.dump_traceback_later(self.each, exit=True, file=self._stderr)

    def end(self, outcome: str, why: str = "") -> None:
        """Ends this process too if the case failed and the device answers no more."""
        faulthandler.cancel_dump_traceback_later()
        case, start = self._begun
        result = Result(case, outcome, round(time.perf_counter() - start, 3), why)
        self.done[case] = result
        self._write(result._asdict())
        if outcome == "failed" and is_lost():
            print(f"{case}: the device is lost to this process", flush=True)
            os._exit(LOST)

    def _write(self, row: dict) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def is_lost() -> bool:
    """Whether every further call to the device fails, as after an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


# ---- pytest --------------------------------------------------------------------------------------


class Plugin:
    """Leaves out tests that have ended, and writes down each one that ends."""

    def __init__(self, cases: Cases):
        self.cases = cases
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.cases.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.reports.clear()
        self.cases.begin(item.nodeid)
        done = yield
        bad = [report for report in self.reports if report.failed]
        skipped = [report for report in self.reports if report.skipped]
        if bad:
            lines = str(bad[0].longrepr).strip().splitlines()
            print(*lines, sep="\n", flush=True)  # now: this process may end before pytest's summary
            errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            self.cases.end("failed", (errors or lines[-1:] or [""])[0][:300])
        elif skipped:
            self.cases.end("skipped", str(skipped[0].longrepr)[:300])
        else:
            self.cases.end("passed")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


def pytest_configure(config: pytest.Config) -> None:
    if FILE in os.environ:
        config.pluginmanager.register(Plugin(Cases.of_environment()))


# ---- the command ---------------------------------------------------------------------------------


def run(
    file: Path, each: float, module: str, arguments: Sequence[str], say: Callable = print
) -> int:
    """Runs processes until one ends by itself; returns the exit code."""
    words = [sys.executable, "-m", module, *arguments]
    words += ["-p", __spec__.name] if module == "pytest" else []
    environment = os.environ | {FILE: str(file), EACH: str(each)}
    while True:
        before = len(results(file)[0])
        start = time.perf_counter()
        code = subprocess.run(words, env=environment).returncode
        found, running = results(file)
        if running:
            # A process that faulthandler ends has the code 1.
            hangs = code == 1 and time.perf_counter() - start > each
            why = f"did not end within {each:g} s" if hangs else f"ended its process: {_code(code)}"
            with open(file, "a", encoding="utf-8") as out:
                out.write("\n" + json.dumps(Result(running, "failed", 0.0, why)._asdict()) + "\n")
            say(f"{running}: {why}", flush=True)
        elif code != LOST or len(found) == before:
            break
    failed = any(result.outcome == "failed" for result in found.values())
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and found:
        code = 0  # all had ended in processes before
    return code or int(failed)  # a 1 without a failed case: it broke off between two of them


def _code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="resumed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--each", type=float, default=SECONDS, metavar="SECONDS")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    try:
        return run(args.results.resolve(), args.each, args.module, args.arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
