"""examples/finetune_lora.py: adapters learn, are loaded bit for bit, and the picture is drawn."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from onepass.nn import QuantizedLinear
from tests.support import fresh, pictures

pytest.importorskip("peft", reason="the example needs peft")
pytest.importorskip("matplotlib", reason="the example draws")

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_lora.py"
# Code, which the untrained model does not know either.
QUICK = ("--quick", "--seconds", "0.5", "--threads", "1", "--text", argparse.__file__)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_lora_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_as_a_command(tmp_path):
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    picture, folder = tmp_path / "memory.svg", tmp_path / "adapters"
    flags = (*QUICK[:-2], "--plot", str(picture), "--folder", str(folder))
    output = fresh.run(code, *flags, check=True).stdout
    before, after = re.search(
        r"by nf4 (\S+), after \d+ steps of the adapters (\S+)\.\n", output
    ).groups()
    assert float(after) < float(before)
    assert "Same: the logits of the adapters that were saved and loaded." in output
    assert "manual of Python" in output and str(Path.home()) not in output
    assert (folder / "adapter_model.safetensors").exists() and "AdamW" in picture.read_text()
    whole, adapted = (
        float(re.search(rf"^{way}: (\S+) MiB", output, re.M)[1])
        for way in ("trained whole", "LoRA on nf4")
    )
    assert adapted < 0.5 * whole


def test_bytes_are_those_of_the_tensors(example):
    """Of one layer: codes of seven linear layers, the rest in float32."""
    base = example.build(example.QUICK).requires_grad_(False)
    model = example.with_adapters(base)
    _, text = example.texts([argparse.__file__])
    steps, held = example.train(model, text, 0.0, 1e-3)
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert steps == 2 and len(layers) == 7
    assert held["codes and scales"] == 7 * (64 * 64 // 2 + 64 * 2)  # a group is a row
    assert held["weights"] == 4 * (2 * 256 * 64 + 3 * 64)  # embeddings, the head, and norms
    assert held["adapters"] == held["gradients"] == 4 * 7 * 2 * 16 * 64
    assert held["AdamW's states"] >= 2 * held["adapters"]


def test_the_picture(example):
    parts = dict.fromkeys(example.COLORS, 2**20)
    memory = {example.WHOLE: parts, example.ADAPTERS: parts}
    figure = pictures.drawn(lambda: example.picture(memory, dict.fromkeys(memory, 3)))
    words = [text for text, _ in pictures.words_of(figure)]
    assert words.count("  5.0 MiB") == 2 and set(example.COLORS) <= set(words)


def test_adapters_that_taught_nothing_fail(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "perplexity", lambda model, text: 3.0)
    assert example.main(list(QUICK)) == 1
    assert "The adapters taught nothing: 3.0000 became 3.0000." in capsys.readouterr().out


def test_adapters_that_are_other_ones_fail(example, capsys, monkeypatch):
    load = example.peft.PeftModel.from_pretrained

    def wrong(*args):
        loaded = load(*args)
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                if "lora_B" in name:
                    parameter.add_(1.0)
        return loaded

    monkeypatch.setattr(example.peft.PeftModel, "from_pretrained", wrong)
    assert example.main(list(QUICK)) == 1
    assert "DIFFERENT." in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt", ""], "--prompt must have a byte at least, got none"),
        (["--seconds", "-1"], "--seconds must be at least 0, got -1.0"),
        (["--plot", "x.what"], "--plot must end in one of "),
        (["--text", "nowhere.txt"], "--text must name readable files: nowhere.txt"),
    ],
)
def test_bad_input(flags, message, example, capsys):
    assert example.main(["--quick", *flags]) == 2
    assert f"finetune_lora: {message}" in capsys.readouterr().err
