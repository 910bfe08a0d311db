"""Workers of a parallel run share the tests by files and groups, the longest first."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import costs

pytest.importorskip("xdist", reason="without pytest-xdist there are no workers to share tests")

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os, pathlib, pytest
from tests.support import costs, shares

costs.BUDGETS = {"test_long.py": 20, "test_of_group.py": 15, "test_more_of_group.py": 15}
pytest_xdist_make_scheduler = shares.scheduler

@pytest.fixture(autouse=True)
def told(request):
    file = request.node.nodeid.partition("::")[0]
    with open(os.environ["PYTEST_XDIST_WORKER"], "a") as told:
        print(file, file=told)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("i", range(6))
def test_one(i):
    pass
"""
GROUPED = TESTS.replace("@", '@pytest.mark.xdist_group("a group")\n@')
FILES = {
    "test_a.py": TESTS, "test_b.py": TESTS, "test_long.py": TESTS,
    "test_more_of_group.py": GROUPED, "test_of_group.py": GROUPED,
}  # fmt: skip


def run(folder: Path) -> dict[str, list[str]]:
    """The files of the tests that each of two workers has run, in its order."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    words = ["-p", "xdist", "--numprocesses=2", "--dist=loadgroup", "-q", "-m", costs.QUICK]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: file.read_text().split() for file in folder.glob("gw*")}


def test_a_file_and_a_group_stay_in_one_worker_and_the_dearest_come_first(tmp_path):
    """Otherwise each worker would make the shared things, and two sets of processes would run."""
    ran = run(tmp_path)
    found = defaultdict(set)
    for worker, files in ran.items():
        for file in files:
            found[file].add(worker)
    assert found.keys() == FILES.keys() and all(len(workers) == 1 for workers in found.values())
    assert found["test_of_group.py"] == found["test_more_of_group.py"]
    assert sorted(files[0] for files in ran.values()) == ["test_long.py", "test_more_of_group.py"]


@pytest.mark.parametrize("markers, dist", [("slow", "loadgroup"), ("not slow", "load")])
def test_slow_tests_of_a_file_are_shared(markers, dist):
    from tests.support import shares  # which imports xdist

    options = {"markexpr": markers, "dist": dist}
    assert shares.scheduler(SimpleNamespace(getoption=options.get), None) is None
