"""A run reports its CPU seconds by file, child processes included, and keeps budgets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import costs

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support import costs
costs.USUAL, costs.BUDGETS = {usual}, {budgets}
def pytest_configure(config):
    config.pluginmanager.register(costs.Costs(config))
"""
TESTS = """
import subprocess, sys, time

BUSY = "import time\\nwhile time.process_time() < 0.4: pass"

def test_itself():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass

def test_child():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


def run(folder: Path, usual: float, budgets: dict, *words: str) -> subprocess.CompletedProcess:
    (folder / "conftest.py").write_text(CONFTEST.format(usual=usual, budgets=budgets))
    (folder / "test_busy.py").write_text(TESTS)
    (folder / "test_idle.py").write_text("def test_nothing(): pass")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")])
def test_costs_of_a_run(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    done = run(tmp_path, 100, {}, "-m", costs.QUICK, *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(reversed(line.split()) for line in done.stdout.splitlines() if "test_" in line)
    assert float(rows["test_busy.py"]) >= 0.6 and float(rows["test_idle.py"]) < 0.5
    assert costs.STARTING in done.stdout and "budget" not in done.stdout


def test_more_than_a_budget_is_told(tmp_path):
    done = run(tmp_path, 0.3, {"test_busy.py": 0.5}, "-m", costs.QUICK)
    assert "more than its budget: test_busy.py" in done.stdout and done.returncode == 0


def test_three_budgets_fail_a_run(tmp_path):
    for usual, budgets in ((0.5, {"test_busy.py": 0.1}), (0.1, {})):
        done = run(tmp_path, usual, budgets, "-m", costs.QUICK)
        assert "FAILED: test_busy.py" in done.stdout and done.returncode == 1
    done = run(tmp_path, 0.5, {"test_busy.py": 0.1})
    assert done.returncode == 0 and "budget" not in done.stdout  # slow: no budgets


def test_budgets_are_those_of_files_that_exist():
    assert not [file for file in costs.BUDGETS if not (ROOT / file).exists()]
