"""Runs of cases that a crash, a hang or a lost device do not end."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import resumed

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
from tests.support import resumed

def test_first(): pass
def test_dies(): os.abort()
def test_second(): assert 1 == 2, "so it goes"
def test_hangs(): time.sleep(60)
def test_third(): __import__("pytest").skip("not here")
def test_loses(monkeypatch):
    resumed.is_lost = lambda: True
    assert False, "an illegal access"
def test_last(): pass
"""
BREAKS = """
from tests.support import resumed

cases = resumed.Cases.of_environment()
cases.begin("first")
cases.end("passed")
raise RuntimeError("there is no next one")
"""


def run(
    folder: Path, *words: str, each: float = 30.0, path: str = ""
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.support.resumed", "--results", folder / "cases"]
    return subprocess.run(
        [*command, f"--each={each}", *words],
        cwd=ROOT, env=os.environ | ({"PYTHONPATH": path} if path else {}),
        capture_output=True, text=True,
    )  # fmt: skip


def test_each_fault_costs_one_case(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    words = ("pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path)
    done = run(tmp_path, *map(str, words), each=2.0)
    found, running = resumed.results(tmp_path / "cases")
    outcomes = {name.rpartition("_")[2]: (of.outcome, of.why) for name, of in found.items()}
    assert done.returncode == 1 and not running
    assert list(outcomes) == ["first", "dies", "second", "hangs", "third", "loses", "last"]
    assert outcomes["first"] == outcomes["last"] == ("passed", "")
    assert outcomes["dies"] == ("failed", "ended its process: SIGABRT")
    assert outcomes["second"] == ("failed", "AssertionError: so it goes")
    assert outcomes["hangs"] == ("failed", "did not end within 2 s")
    assert outcomes["third"][0] == "skipped" and "not here" in outcomes["third"][1]
    assert outcomes["loses"] == ("failed", "AssertionError: an illegal access")
    assert "so it goes" in done.stdout and "the device is lost" in done.stdout
    assert "in test_hangs" in done.stderr
    again = run(tmp_path, *map(str, words))  # nothing is left to run
    assert again.returncode == 1 and resumed.results(tmp_path / "cases")[0] == found


def test_tests_that_cannot_be_collected_are_not_run_for_ever(tmp_path):
    (tmp_path / "test_it.py").write_text("import no_such_module")
    assert run(tmp_path, "pytest", "--rootdir", str(tmp_path), str(tmp_path)).returncode == 2


def test_a_program_that_breaks_off_between_two_cases_has_failed(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    done = run(tmp_path, "breaks", path=str(tmp_path))
    assert list(resumed.results(tmp_path / "cases")[0]) == ["first"]
    assert done.returncode == 1 and "no next one" in done.stderr


def test_a_line_that_was_cut_is_no_result(tmp_path):
    file = tmp_path / "cases"
    file.write_text(
        '{"case": "a"}\n{"case": "a", "outcome": "passed"}\n{"case": "b"}\n{"case": "b", "ou'
    )
    found, running = resumed.results(file)
    assert list(found) == ["a"] and running == "b"
