"""Forked processes behave as `python -c`, and hold nothing of ours."""

import signal

import pytest
import torch

from tests.support import costs, fresh

LOADED = """
import sys
print([name for name in sys.modules if name.partition(".")[0] in ("onepass", "tests", "pytest")])
import onepass
print(sys.argv, __name__, onepass.__name__)
"""


def test_a_process_has_torch_and_nothing_of_ours():
    for word in ("one", "two"):  # it has nothing of the first
        done = fresh.run(LOADED, word, check=True)
        assert done.stdout == f"[]\n['-c', '{word}'] __main__ onepass\n" and done.stderr == ""


def test_its_variables_are_those_that_it_is_given(monkeypatch):
    monkeypatch.setenv("OF_THIS_PROCESS", "1")
    code = "import os; print(sorted(os.environ))"
    assert fresh.run(code, env={"A": "1"}).stdout == "['A']\n"
    assert "OF_THIS_PROCESS" in fresh.run(code).stdout


def test_how_it_ended_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fresh.run("print(1); open('file', 'w'); raise KeyError('as planted')")
    assert (done.returncode, done.stdout, (tmp_path / "file").exists()) == (1, "1\n", True)
    assert done.stderr.splitlines()[-1] == "KeyError: 'as planted'"
    assert fresh.run("import os; os.abort()").returncode == -signal.SIGABRT
    with pytest.raises(AssertionError, match=f"^ended with -{int(signal.SIGKILL)}: "):
        fresh.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", check=True)


def test_it_may_end_itself():
    for code, ended in (("", (0, "")), ("0", (0, "")), ("3", (3, "")), ("'so'", (1, "so\n"))):
        done = fresh.run(f"import sys; sys.exit({code})")
        assert (done.returncode, done.stderr) == ended and done.stdout == ""


def test_it_has_nothing_to_read_and_the_torch_of_this_process():
    """The next call goes to the server, and not to its forked child."""
    code = "import sys, torch; print([*sys.stdin], torch.__file__)"
    assert fresh.run(code, check=True).stdout == f"[] {torch.__file__}\n"


def test_what_it_costs_is_told():
    fresh.run("")
    before = costs.spent()
    fresh.run("import time\nwhile time.process_time() < 0.3: pass")
    assert 0.2 < costs.spent() - before < 3
