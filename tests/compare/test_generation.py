"""`onepass compare --generate`: inference of a user's model."""

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from onepass import _malloc
from onepass.tools.compare import generation, inference, memory
from onepass.tools.harness import HostClock, Timing
from tests.compare.cases import refusal, run_here, run_json, settings_of


class Writer(nn.Module):
    """Greedy, by the interface of transformers."""

    def __init__(self, broken: bool = False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.broken = broken

    def forward(self, input_ids):
        return self.norm(self.embed(input_ids)) @ self.embed.weight.T

    def generate(self, input_ids, *, max_new_tokens, min_new_tokens, do_sample):
        assert not (do_sample or self.training or torch.is_grad_enabled())
        assert max_new_tokens == min_new_tokens
        if self.broken:
            raise ValueError("no cache")
        for _ in range(max_new_tokens):
            following = self(input_ids)[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, following), 1)
        return input_ids


def prompts():
    return torch.arange(12).reshape(2, 6)


class Hungry(Writer):
    """Its third token takes 64 MiB."""

    def forward(self, input_ids):
        if input_ids.shape[1] == 8:
            torch.ones(1 << 24).sum()
        return super().forward(input_ids)


class Own(Writer):
    """nanoGPT's interface: samples from the `top_k` most probable tokens."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        return logits, nn.functional.cross_entropy(logits.mT, targets) if targets is not None else 0

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        assert top_k == 1
        for _ in range(max_new_tokens):
            most = self(idx)[0][:, -1].topk(top_k).indices
            idx = torch.cat((idx, most), 1)
        return idx


class Sampling(Own):
    """Draws from all tokens."""

    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            idx = torch.cat((idx, self(idx)[0][:, -1].softmax(-1).multinomial(1)), 1)
        return idx


class Foreign(Own):
    def generate(self, idx, steps):
        raise AssertionError


class Telling(Own):
    def generate(self, idx, max_new_tokens):
        return ["text"] * len(idx)


class ByTokens(HostClock):
    """A clock on which a call takes a second a token, or always the same."""

    def __init__(self, counts: bool = True):
        self.counts = counts

    def seconds(self, function, calls: int) -> float:
        for _ in range(calls):
            function()
        return calls * float(function.args[0] if self.counts else 1)


# What the functions of these names return.
MODELS = {
    "writer": lambda: (Writer(), {"input_ids": prompts(), "labels": prompts()}),
    "writer_of_a_tensor": lambda: (Writer(), prompts()),
    "own": lambda: (Own(), (prompts(), prompts())),
    "own_of_keywords": lambda: (Own(), {"targets": prompts(), "idx": prompts()}),
    "sampling": lambda: (Sampling(), prompts()),
    "hungry": lambda: (Hungry(), prompts()),
    "foreign": lambda: (Foreign(), (prompts(), prompts())),
    "telling": lambda: (Telling(), prompts()),
    "broken": lambda: (Writer(broken=True), prompts()),
    "layers": lambda: (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)),
}


def __getattr__(name: str):
    if name in MODELS:
        return MODELS[name]
    raise AttributeError(name)


def flags_of(model: str, tokens: int = 5) -> tuple[str, ...]:
    return "--quick", "--pairs", "2", "--generate", str(tokens), "--model", f"{__name__}:{model}"


@pytest.mark.parametrize(
    "function", ["writer", "writer_of_a_tensor", "own", "own_of_keywords", "sampling"]
)
def test_prefill_and_decoding(monkeypatch, function):
    monkeypatch.setattr(inference, "clock_of", lambda device: ByTokens())
    found = run_json("compare", *flags_of(function))
    assert found["settings"]["generate"] == 5
    phases = found["generation"]["phases"]
    tokens = {name: phase["tokens"] for name, phase in phases.items()}
    assert tokens == {"prefill": 12, "decode": 2 * 4}
    for phase, rate in (("prefill", 12), ("decode", 2)):
        variants = phases[phase]["variants"]
        assert list(variants) == ["stock", "swapped"]
        assert variants["swapped"]["ratio_to_stock"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert variants["stock"]["tokens_per_second"] == rate
    assert found["generation"]["same"] == {"swapped": 1.0} and not found["generation"]["note"]
    assert found["generation"]["peak_bytes"] == {"stock": 1, "swapped": 1}
    assert found["generation"]["swap_report"]["swapped"][0]["name"] == "norm"


def test_a_generate_that_cannot_be_called_leaves_the_forward(tmp_path):
    file = tmp_path / "out.json"
    out, _ = run_here("compare", *flags_of("foreign"), "--json", str(file))
    found = json.loads(file.read_text())["generation"]
    assert list(found["phases"]) == ["forward"] and f"\n{found['note']}.\n" in out
    assert found["note"].endswith("must take a prompt and max_new_tokens, got (idx, steps)")


def test_too_few_tokens(monkeypatch):
    """No rate is made of a difference that is not there."""
    monkeypatch.setattr(inference, "clock_of", lambda device: ByTokens(counts=False))
    assert "--generate must be more tokens than these 5" in refusal("compare", *flags_of("writer"))


def test_without_generate():
    out, _ = run_here("compare", *flags_of("layers"))
    assert "forward" in out and "decode" not in out and "difference" in out
    assert "peak MiB" in out and ("Swapped, forward" in out or "Do not swap" in out)


def test_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    found = run_json("compare", *flags_of("layers", 2), "--compile")["generation"]
    variants = list(found["phases"]["forward"]["variants"])
    assert variants == ["stock", "swapped", "compiled stock", "compiled swapped"]


@pytest.mark.parametrize("variant", ["stock", "swapped", "swapped: norm"])
def test_the_peak_is_that_of_all_tokens(monkeypatch, variant):
    sent = []
    monkeypatch.setattr(_malloc, "map_apart", lambda: None)
    settings = settings_of(*flags_of("hungry", 4))
    memory._measure(SimpleNamespace(send=sent.append), variant, None, settings, None)
    assert 60 <= sent[0] >> 20 < 96


def test_variants_share_their_tensors(monkeypatch):
    called, made = [], inference.Inference(settings_of(*flags_of("writer", 2)))
    monkeypatch.setattr(inference, "_generating", lambda model, batch: called.append(model))
    for name in ("stock", "swapped"):
        made.variant(name)
    stock, swapped = called
    assert stock.embed.weight is swapped.embed.weight is made.model.embed.weight
    assert type(made.model.norm) is type(stock.norm) is nn.LayerNorm is not type(swapped.norm)


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ([1.0, 1.01, 0.99], "Swapped, decode is 2.00 times as fast."),
        ([4.0, 4.04, 3.96], "Do not swap this model for decode: 0.50 times as fast."),
        ([1.0, 4.0, 2.0], "Swapped, decode takes the same time as far as this run can tell."),
    ],
)
def test_verdict_and_what_is_left_out(times, sentence, capsys):
    ones = dict(stock=1, swapped=1)
    timing = Timing({"stock": [2.0, 2.02, 1.98], "swapped": times}, ones, {})
    phases = {"prefill": (timing, 1), "decode": (timing, 1)}
    made = (settings_of("--model", "mine"), {}, 5, phases, {"swapped": 0.0}, ones)
    found = generation.Generation(*made, {"attached": "no"}, {}, 0.0)
    assert found.verdict() == sentence
    found.show(Console(width=120))
    assert "Without attached: no." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--generate", "5"], "--generate must come with --model, got none"),
        (flags_of("writer", 1), "must be at least 2 tokens, got 1"),
        ([*flags_of("writer"), "--plot"], "drop --plot"),
        ([*flags_of("writer"), "--steps", "3"], "drop --steps"),
        (flags_of("broken"), "ValueError: no cache"),
        (flags_of("telling"), "generate must return a tensor of tokens, got list"),
    ],
)
def test_errors_are_one_sentence(arguments, message):
    assert message in refusal("compare", *arguments)
