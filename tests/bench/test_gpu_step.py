"""Running the steps of `make gpu-report`: limits, budgets, several at once, and how they end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.bench.machines import BENCHMARKS

import gpu_step  # isort: skip


def python_step(name: str, code: str, **fields) -> gpu_step.Step:
    fields = {"least": 0.1, "limit": 20.0} | fields
    return gpu_step.Step(name, command=lambda seconds: [sys.executable, "-c", code], **fields)


def results_of(records) -> list[str]:
    return [record["result"] for record in records]


def ends(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def execute(
    steps, folder: Path, say=lambda line: None, budget: float = 60.0, at_once: int = 1, **options
) -> list[dict]:
    return gpu_step.Runner(folder / "log", say=say, **options).execute(steps, budget, at_once)


def test_a_step_that_fails_takes_no_other_with_it(tmp_path):
    said = []
    steps = [
        python_step("first", "import os; print('hello', os.environ['FLAG'])"),
        python_step("second", "import sys; print('so it goes'); sys.exit(3)"),
        python_step("third", "print('there')"),
        gpu_step.Step("fourth", 0.1, 5.0, lambda seconds: ["no-such-program"]),
    ]
    steps[0].environment["FLAG"] = "on"
    records = execute(steps, tmp_path, said.append)
    assert results_of(records) == ["ok", "failed", "ok", "failed"]
    assert records[1]["detail"] == "exit code 3" and "    so it goes" in said
    assert records[3]["detail"] == "exit code 127"
    assert json.loads(json.dumps(records)) == records
    logs = {file.stem: file.read_text() for file in (tmp_path / "log").iterdir()}
    said = {"first": "hello on", "second": "so it goes", "third": "there"}
    assert all(text in logs[name] for name, text in said.items())


def test_a_step_starts_without_code_of_this_process(tmp_path):
    """A fork in a thread deletes the states of all other threads, whatever they hold."""
    kept, process = threading.local(), os.getpid()

    class Held:
        def __del__(self):
            if os.getpid() != process:
                os._exit(77)

    kept.held = Held()
    records = execute([python_step(name, "") for name in ("build", "next")], tmp_path)
    assert results_of(records) == ["ok", "ok"], records


def test_results_in_an_unknown_form_cost_one_step(tmp_path):
    judge = Mock(side_effect=KeyError("verdict"))
    steps = [python_step("build", ""), python_step("odd", "", judge=judge), python_step("next", "")]
    records = execute(steps, tmp_path)
    assert results_of(records) == ["ok", "failed", "ok"]
    assert records[1]["detail"].endswith("its results could not be read: KeyError('verdict')")


def test_figures_are_printed_while_their_step_runs(tmp_path):
    """Each line once, also one that is written in two parts."""
    code = (
        "import time\n"
        "print('figure one: 1 us', flush=True)\n"
        "print('figure tw', end='', flush=True)\n"
        f"time.sleep(3 * {gpu_step.POLL})\n"
        "print('o: 2 us\\nno figure', flush=True)\n"
        "time.sleep(60)\n"
    )
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "two" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([python_step("bench", code)], tmp_path, say)
    assert said == ["    one: 1 us", "    two: 2 us"]
    assert "no figure" in (tmp_path / "log" / "bench.log").read_text()


def test_nothing_runs_after_a_build_that_failed(tmp_path):
    steps = [python_step("build", "raise SystemExit(1)"), python_step("next", "")]
    records = execute(steps, tmp_path)
    assert results_of(records) == ["failed", "left out"]
    assert records[1]["detail"] == "nothing was built"


def test_a_step_gets_no_more_than_its_limit_and_ends_with_its_children(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', child])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    step = python_step("sleeps", code, limit=4.0)
    records = execute([step], tmp_path)
    assert time.monotonic() - start < 30
    assert results_of(records) == ["failed"]
    assert records[0]["detail"] == "did not end within 4 s"
    log = (tmp_path / "log" / "sleeps.log").read_text()
    assert ends(next(int(line) for line in log.split() if line.isdigit()))


@pytest.mark.parametrize(
    "handler", [signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"]
)
def test_tests_that_do_not_end_tell_what_they_found(tmp_path, monkeypatch, handler):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the time until they begin
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_one(): assert False, 'so it goes'\ndef test_two(): time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    step = gpu_step.Step("tests", 0.1, 8.0, lambda seconds: words)
    before = signal.signal(signal.SIGINT, handler)  # in the background of a shell it is ignored
    try:
        execute([step], tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    log = (tmp_path / "log" / "tests.log").read_text()
    assert "so it goes" in log and "1 failed" in log


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_no_step_outlives_the_report(tmp_path, way):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import signal, pathlib, gpu_step as g\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "words = [sys.executable, '-c', 'import os, time; print(os.getpid()); time.sleep(60)']\n"
        "first = g.Step('build', 0.1, 50.0, lambda seconds: ['true'])\n"
        "steps = [g.Step(f'sleeps {i}', 0.1, 50.0, lambda seconds: words) for i in range(3)]\n"
        "g.Runner(pathlib.Path(sys.argv[2])).execute([first, *steps], 50.0, at_once=2)\n"
    )
    words = [sys.executable, "-u", "-c", code, str(BENCHMARKS), str(tmp_path)]
    report = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    pids: list[int] = []
    for _ in range(400):
        found = [file.read_text().split("\n")[-2:] for file in tmp_path.glob("sleeps*")]
        pids = [int(lines[0]) for lines in found if lines[0].isdigit() and not lines[-1]]
        if len(pids) == 2:
            break
        time.sleep(0.05)
    report.send_signal(way)
    assert report.wait(30) == (1 if way == signal.SIGTERM else -way)
    assert len(pids) == 2 and all(map(ends, pids))
    assert not (tmp_path / "sleeps-2.log").exists()


def test_what_does_not_fit_the_budget_is_named(tmp_path):
    steps = [python_step("first", ""), python_step("sleeps", "import time; time.sleep(60)")]
    steps.append(python_step("long", "", least=50.0, limit=60.0))
    records = execute(steps, tmp_path, budget=3.0)
    assert results_of(records) == ["ok", "left out", "left out"]
    assert records[1]["detail"].startswith("did not end within ")
    assert records[2]["detail"].endswith(" s of the budget were left")


def test_steps_run_together_after_the_build(tmp_path):
    """Each of two waits for the other; records are in the order in which the steps end."""
    code = (
        "import pathlib, time\n"
        "pathlib.Path({own!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)\n"
        "time.sleep({more})"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    steps = [python_step("build", "")]
    steps.append(python_step("one", code.format(own=one, other=two, more=2)))
    steps.append(python_step("two", code.format(own=two, other=one, more=0)))
    counts: list[int] = []
    records = execute(steps, tmp_path, at_once=2, keep=lambda found: counts.append(len(found)))
    assert [record["name"] for record in records] == ["build", "two", "one"]
    assert results_of(records) == ["ok"] * 3 and counts == [1, 2, 3]


def test_a_step_that_did_not_end_tells_what_it_found(tmp_path):
    """Its own fault if it found one, also where the budget ended before its limit."""

    def judge(code: int | None, log: str) -> gpu_step.Outcome:
        assert code is None
        return gpu_step.Outcome("failed" if "bad" in log else "ok", "3 passed, 1 failed")

    steps = [python_step("build", "")]
    sleeps = "print({!r}, flush=True); __import__('time').sleep(60)"
    steps += [python_step(word, sleeps.format(word), judge=judge) for word in ("good", "bad")]
    records = execute(steps, tmp_path, budget=3.0, at_once=2)
    records = {record["name"]: record for record in records}
    assert (records["good"]["result"], records["bad"]["result"]) == ("left out", "failed")
    assert records["bad"]["detail"].endswith("s; 3 passed, 1 failed")
