"""All cells of the notebooks, at sizes that take a second; `make test-slow` runs them unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
WIDEST = 110  # characters of a printed line; longer texts are shown as HTML, which folds
# By notebook: text of a cell, and its replacement in this test.
SMALLER = {
    "01_norms_swap_and_compare": {
        "hidden_size=512, intermediate_size=1024, num_hidden_layers=4": (
            "hidden_size=64, intermediate_size=64, num_hidden_layers=1"
        ),
        "(2, 256))": "(2, 32))",
        "rounds=9, seconds=6": "rounds=2, seconds=0, batch_seconds=0",
        "rows, cols = 1024, 1024": "rows, cols = 32, 64",
        "ceilings(64 << 20)": "ceilings(1 << 20)",
        "seconds=2": "rounds=2, seconds=0, batch_seconds=0",
    },
    "02_mixed_precision_optimizer": {
        "width=128, block=64, batch=8": "width=32, block=16, batch=2",
        "rows=48": "rows=2",
        "WARM_UP, STEPS, EVERY = 150, 150, 15": "WARM_UP, STEPS, EVERY = 4, 4, 2",
    },
    "03_attention_dropout_windows_and_packing": {
        "width=256": "width=64",
        "LENGTHS = (256, 512, 1024, 2048)": "LENGTHS = (16, 32, 48, 64)",
        "WINDOW = 256": "WINDOW = 16",
        "WINDOWED = (512, 1024, 2048, 3072)": "WINDOWED = (32, 48, 64, 80)",
        "rounds=2": "rounds=1",
        "rounds=15": "rounds=1",
        "for length in (2048, 4096, 8192)]": "for length in (64, 128, 8192)]",
        "pieces = [512, 64, 384, 128, 320, 192, 256, 192]": "pieces = [16, 2, 12, 4, 10, 6, 8, 6]",
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


@pytest.mark.parametrize("name", SMALLER)
def test_every_cell_runs(name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    if name.startswith("01"):
        pytest.importorskip("transformers")
    pyplot.switch_backend("agg")
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    for said in SMALLER[name]:
        assert any(said in cell for cell in code), f"no cell says {said}"
    namespace = {"__name__": name}
    for number, cell in enumerate(code):
        for said, small in SMALLER[name].items():
            cell = cell.replace(said, small)
        exec(compile(cell, f"{name}, code cell {number}", "exec"), namespace)
    pyplot.close("all")
