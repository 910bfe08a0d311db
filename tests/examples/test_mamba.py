"""examples/mamba.py: its model runs, and the swapped one is the same."""

import importlib.util
from pathlib import Path

import onepass

EXAMPLE = Path(__file__).parents[2] / "examples" / "mamba.py"


def test_the_model():
    spec = importlib.util.spec_from_file_location("mamba", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, batch = example.make(tokens=16, words=64, hidden_size=32, num_hidden_layers=2)
    report = onepass.swap(model.train())
    assert sum(entry["kind"] == "scan" for entry in report.swapped) == 2
    assert report.verify(batch).ok
