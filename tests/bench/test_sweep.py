"""benchmarks/sweep.py: architectures of other libraries, each swapped and judged."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the sweep is over its models")
pytestmark = pytest.mark.slow  # processes that import torch and transformers
SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "sweep.py"


def _sweep(*arguments, code: int = 0) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_model_is_judged_and_its_row_is_kept(tmp_path):
    kept = tmp_path / "sweep.json"
    arguments = ("--families", "transformers", "--only", "distilbert", "--json", kept)
    assert "transformers: 1: 1 same" in _sweep(*arguments)
    (row,) = json.loads(kept.read_text()).values()
    assert row["errors"] == {} and row["ms"]["swapped"] > 0
    assert set(row["verified"]) == {"plain, eval", "plain, train", "right, eval", "left, eval"}
    assert all(found["ok"] for found in row["verified"].values())
    row["type"] = "of the first run"
    kept.write_text(json.dumps({"transformers/distilbert/float32": row}))
    _sweep(*arguments)  # nothing is left to do
    assert json.loads(kept.read_text())["transformers/distilbert/float32"]["type"] == row["type"]


def test_a_process_that_hangs_is_a_row(tmp_path):
    kept = tmp_path / "sweep.json"
    arguments = ("--families", "transformers", "--only", "distilbert", "--json", kept)
    assert "1 crash" in _sweep(*arguments, "--seconds", "0.001", code=1)
    (row,) = json.loads(kept.read_text()).values()
    assert row["errors"]["process"] == "took more than 0.001 s"
