"""examples/llama_lora.py: its models run, and the swapped ones are the same."""

import importlib.util
from pathlib import Path

import pytest

import onepass

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_lora.py"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
TINY |= {"num_key_value_heads": 2, "tokens": 16, "words": 64}


@pytest.mark.parametrize("name", ["whole", "adapters", "quantised"])
def test_models(name):
    spec = importlib.util.spec_from_file_location("llama_lora", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, batch = getattr(example, name)(**TINY)
    trained = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in trained) == (name != "whole")
    report = onepass.swap(model.train())
    assert report.verify(batch).ok
