"""All cells of the notebooks, at sizes that take a second; `make test-slow` runs them unchanged."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compare.cases import run_here

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
WIDEST = 110  # characters of a printed line; longer texts are shown as HTML, which folds
# By notebook: text of a cell, and its replacement in this test.
SMALLER = {
    "01_your_model": {
        "(1, 1025)": "(1, 17)",
        "length=1024, width=256": "length=16, width=16",
        "--pairs 6 --steps 8": "--pairs 1 --steps 2",
    },
    "02_mixed_precision_optimizer": {
        "LENGTH, WIDTH, BATCH, ROWS = 64, 128, 8, 48": "LENGTH, WIDTH, BATCH, ROWS = 16, 32, 2, 2",
        "WARM_UP, STEPS, EVERY = 150, 150, 15": "WARM_UP, STEPS, EVERY = 4, 4, 2",
    },
    "03_attention_dropout_windows_and_packing": {
        "width=256": "width=64",
        "make(512, dropout=0.1)": "make(16, dropout=0.1)",
        "LENGTHS = (256, 512, 1024)": "LENGTHS = (16, 32, 48)",
        "WINDOW = 256": "WINDOW = 16",
        "WINDOWED = (512, 1024, 2048)": "WINDOWED = (32, 48, 64)",
        "rounds=6": "rounds=1",
        "pieces = [512, 64, 384, 128, 320, 192, 256, 192]": "pieces = [16, 2, 12, 4, 10, 6, 8, 6]",
    },
    "04_inference": {
        "hidden_size=512, intermediate_size=1024": "hidden_size=64, intermediate_size=64",
        "(4, 256)": "(2, 16)",
        "--compile --quick --pairs 6": "--quick --pairs 3",
        "rounds=15": "rounds=3",
        "LENGTHS = (256, 1024, 4096, 8192)": "LENGTHS = (8, 16, 32, 64)",
    },
    "05_choosing_a_format": {
        "STEPS, LENGTH = 400, 128": "STEPS, LENGTH = 3, 80",
        "hidden_size=192, intermediate_size=512": "hidden_size=96, intermediate_size=64",
        "WIDTH, LAYERS, ROUNDS = 2048, 8, 5": "WIDTH, LAYERS, ROUNDS = 64, 2, 3",
    },
}


def test_each_notebook_has_its_smaller_sizes():
    assert SMALLER.keys() == {path.stem for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("name", SMALLER)
def test_stored_outputs_fit_a_page_and_name_no_paths(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any("execution" in cell["metadata"] for cell in code)  # times of day
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # no warnings
    printed = [line.rstrip() for output in outputs for line in output.get("text", ())]
    assert max(map(len, printed)) <= WIDEST
    shown = "".join(
        printed + [json.dumps(o["data"].get("text/html")) for o in outputs if "data" in o]
    )
    assert not re.search(r"(?<![\w.])/\w+/|site-packages", shown.replace("</pre>", ""))


def here(command: list, **options) -> subprocess.CompletedProcess:
    """`python -m onepass` in this process, without those that measure peaks."""
    if command[:3] != [sys.executable, "-m", "onepass"]:
        return STARTED(command, **options)
    return subprocess.CompletedProcess(command, 0, *run_here(*command[3:]))


STARTED = subprocess.run


@pytest.mark.parametrize("name", SMALLER)
def test_every_cell_runs(name, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    if name == "01_your_model":
        pytest.importorskip("IPython", reason="01 shows its picture by it")
    if name in ("04_inference", "05_choosing_a_format"):
        pytest.importorskip("transformers", reason="they generate text with a Llama of it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(subprocess, "run", here)
    pyplot.switch_backend("agg")
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    for cell in code:
        assert not re.search(r"^(from|import) onepass\.", cell, re.M), "its public names alone"
    for said in SMALLER[name]:
        assert any(said in cell for cell in code), f"no cell says {said}"
    namespace = {"__name__": name}
    for number, cell in enumerate(code):
        for said, small in SMALLER[name].items():
            cell = cell.replace(said, small)
        written = re.match(r"%%writefile (\w+)\.py\n", cell)
        if written:
            monkeypatch.delitem(sys.modules, written[1], raising=False)
            (tmp_path / f"{written[1]}.py").write_text(cell[written.end() :])
            continue
        exec(compile(cell, f"{name}, code cell {number}", "exec"), namespace)
    pyplot.close("all")
