"""examples/generate.py: stock and onepass write the same text, and a difference is noticed."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from tests.support import fresh

SCRIPT = Path(__file__).parents[2] / "examples" / "generate.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(output: str) -> list[list[str]]:
    """The texts that stock and onepass wrote after each prompt."""
    return [
        [ast.literal_eval(text) for text in re.findall(rf"^{name} +(['\"].*)$", output, re.M)]
        for name in ("stock", "onepass")
    ]


def test_as_a_command():
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    run = fresh.run(code, "--quick", "--threads", "1", check=True)
    stock, ours = texts(run.stdout)
    assert stock == ours and [len(text) for text in stock] == [16] * 4
    assert "Same: 4 x 16 bytes" in run.stdout
    for row in ("small *prefill 4 x 16", "large *prefill 4 x 48"):
        assert len(re.findall(row, run.stdout)) == 5  # stock, onepass, and three quantised ways
    assert len(re.findall("small *decode 4 x 15", run.stdout)) == 6  # and a read
    for way in ("stock", "onepass"):
        parts = re.findall(rf"GPT by {way}: .* (\d+)%, .* (\d+)%, .* (\d+)%", run.stdout)
        assert abs(sum(map(int, *parts)) - 100) <= 1
    # Of the large GPT, float32, with positions and the tied head once.
    block, biases_and_norms = 12 * 32 * 32, (4 + 9) * 32
    weights = 4 * (2 * (block + biases_and_norms) + 2 * 32 + (256 + 64) * 32)
    assert len(re.findall(f"large .* {weights:,} *$", run.stdout, re.M)) == 4


def test_a_prompt_of_ones_own(generate, capsys, tmp_path):
    flags = ["--quick", "--seconds", "0", "--prompt", "def f():\n", "--tokens", "2", "--batch", "2"]
    assert generate.main([*flags, "--json", str(tmp_path / "found.json")]) == 0
    output = capsys.readouterr().out
    assert "after   'def f():\\n'\n" in output
    assert "Same: 2 x 2 bytes" in output and len(texts(output)[0]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    decode = found["models"]["large"]["decode"]
    assert decode["rows"] == 1 and decode["stock_ms"] > 0 and decode["onepass_ms"] > 0
    assert decode["times_as_fast"]["low"] <= decode["times_as_fast"]["median"]
    assert decode["read_ms"] > 0
    assert all(min(shares.values()) > 0 for shares in decode["shares"].values())
    large = generate.QUICK_SPEED
    weights = sum(p.numel() for p in generate.GPT(large).parameters())
    weights -= large.block * large.width  # the positions
    rows = large.block - 2 + 1  # before the second byte
    caches = 2 * large.layers * 2 * rows * large.width  # keys and values of two sequences
    assert decode["bytes"] == 4 * (weights + caches)
    ways = {*generate.WAYS, *generate.QUANTIZED}
    assert set(decode["shares"]) == set(found["models"]["perplexity"]) == ways
    assert "int4, head too" in output and "linear layers" in output and "Perplexity of" in output
    assert found["options"]["dtype"] == "float32" and found["machine"]["threads"] == 1
    assert generate.main([*flags, "--json", str(tmp_path)]) == 2
    assert "generate: --json cannot be written" in capsys.readouterr().err


def test_different_texts_fail(generate, capsys, monkeypatch):
    def noise(query, *_):
        return 100 * torch.randn_like(query)

    monkeypatch.setitem(generate.WAYS, "onepass", lambda model: (model, noise))
    assert generate.main(["--quick", "--seconds", "0"]) == 1
    output = capsys.readouterr().out
    stock, ours = texts(output)
    assert stock != ours
    assert re.search(r"DIFFERENT: the small GPT's, first at byte \d+ of sequence \d", output)
    assert "tokens/s" not in output


def test_bfloat16(generate, capsys, monkeypatch):
    """Logits are compared, not bytes: rounding may change a byte."""
    flags = ["--quick", "--dtype", "bfloat16", "--seconds", "0"]
    assert generate.main(flags) == 0
    output = capsys.readouterr().out
    assert "Same: the logits of 4 x 16 bytes of either GPT, as far as bfloat16 goes" in output
    for name in sum(generate.PARTS.values(), ()):  # where the time goes, by operators that exist
        namespace, _, operator = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), operator)
    assert len(re.findall(r"large .* 71,424 *$", output, re.M)) == 4  # two bytes a weight

    def a_bit_off(*args):
        return 1.2 * generate.stock_attention(*args)

    monkeypatch.setitem(generate.WAYS, "onepass", lambda model: (model, a_bit_off))
    assert generate.main(flags) == 1
    output = capsys.readouterr().out
    assert re.search(r"DIFFERENT: the small GPT's, logits of stock's text: error \S+ of at", output)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tokens", "32"], "--tokens must be less than 32, got 32"),
        (["--prompt", ""], "--prompt must have 1 to 16 bytes"),
        (["--prompt", "x" * 17], "32 positions and --tokens takes 16, got 17"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--seconds", "nan"], "--seconds must be at least 0, got nan"),
    ],
)
def test_bad_input(generate, capsys, flags, message):
    try:
        code = generate.main(["--quick", *flags])
    except SystemExit as error:  # by argparse
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
