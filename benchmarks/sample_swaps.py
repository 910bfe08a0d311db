"""Shows that `onepass.swap(model, sample=batch)` does not lose, on thirty models in both modes.

    python benchmarks/sample_swaps.py [--threads 2] [--only WORDS] [--json FILE]

Each model is swapped with its batch as the sample; then whole steps, stock and swapped, take turns:
forward, loss and backward in train mode, forward alone in eval mode. Where the swap left everything
as it was there is nothing to time, and the ratio is 1. The exit code is 1 if the lower end of a
95 % interval is below 0.97.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping.changes import Edit, in_force
from onepass.swapping.sample import Call, repeated
from onepass.tools.harness import Interval, machine_facts, measure_pairs

SECONDS, ROUNDS = 2.0, 15
LEAST = 0.97  # of stock's speed: the lower end of the interval of a swapped model


class Causal(nn.Module):
    """Causal attention by F.scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, norm: type[nn.Module]):
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.attention, self.drop = Causal(width, heads, dropout), nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.mlp(self.second(x)))


class GPT(nn.Module):
    def __init__(self, width, layers, heads, dropout=0.0, words=256, norm=nn.LayerNorm):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, norm) for _ in range(layers)))
        self.norm, self.head = norm(width), nn.Linear(width, words)

    def forward(self, tokens, targets):
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int):
        super().__init__()
        self.cells, self.norm = kind(width, width, batch_first=True), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.cells(x)[0])


def gpt(rows: int, tokens: int, *sizes, **options):
    def make():
        words = options.get("words", 256)
        batch = torch.randint(words, (2, rows, tokens))
        return GPT(*sizes, **options), (batch[0], batch[1])

    return make


def of(build: Callable[[], nn.Module], *shape: int):
    return lambda: (build(), (torch.randn(shape),))


def mlp(width: int, layers: int, norm: type[nn.Module] | None = None, dropout: float = 0.0):
    def build():
        parts = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.GELU()]
            parts += [] if norm is None else [norm(width)]
            parts += [nn.Dropout(dropout)] * (dropout > 0)
        return nn.Sequential(*parts)

    return build


def encoder(width: int, layers: int, dropout: float):
    def build():
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    return build


def convolutions(width: int, groups: bool):
    def build():
        norm = (lambda: nn.GroupNorm(8, width)) if groups else (lambda: nn.BatchNorm2d(width))
        parts = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(3):
            parts += [norm(), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)]
        return nn.Sequential(*parts)

    return build


def transformers_model(name: str, rows: int, tokens: int, **sizes):
    def make():
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=512, **sizes)
        made = transformers.AutoModelForCausalLM.from_config(config)
        tokens_ = torch.randint(512, (rows, tokens))
        return made, {"input_ids": tokens_, "labels": tokens_}

    return make


LLAMA = {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Callable] = {
    "GPT 32, 2 layers, 4 x 32": gpt(4, 32, 32, 2, 2),
    "GPT 32, 2 layers, dropout": gpt(4, 32, 32, 2, 2, dropout=0.1),
    "GPT 64, 4 layers, 2 x 64": gpt(2, 64, 64, 4, 4),
    "GPT 128, 4 layers, 4 x 128": gpt(4, 128, 128, 4, 4),
    "GPT 128, dropout": gpt(4, 128, 128, 4, 4, dropout=0.1),
    "GPT 256, 2 layers, 2 x 512": gpt(2, 512, 256, 2, 4),
    "GPT 256, dropout": gpt(2, 512, 256, 2, 4, dropout=0.1),
    "GPT 256, RMS norms": gpt(4, 128, 256, 2, 4, norm=nn.RMSNorm),
    "GPT 128, 8192 words": gpt(2, 128, 128, 2, 4, words=8192),
    "GPT 64, one token": gpt(1, 1, 64, 2, 4),
    "MLP 64, 4 rows": of(mlp(64, 4), 4, 64),
    "MLP 64, norms": of(mlp(64, 4, nn.LayerNorm), 64, 64),
    "MLP 512, 1024 rows": of(mlp(512, 3), 1024, 512),
    "MLP 512, norms": of(mlp(512, 3, nn.LayerNorm), 1024, 512),
    "MLP 512, RMS norms, dropout": of(mlp(512, 3, nn.RMSNorm, 0.1), 512, 512),
    "MLP 32, dropout": of(mlp(32, 3, None, 0.5), 16, 32),
    "MLP 1024, one row": of(mlp(1024, 4), 1, 1024),
    "encoder 64": of(encoder(64, 2, 0.0), 2, 32, 64),
    "encoder 64, dropout": of(encoder(64, 2, 0.1), 2, 32, 64),
    "encoder 256": of(encoder(256, 2, 0.0), 2, 256, 256),
    "encoder 256, dropout": of(encoder(256, 2, 0.1), 2, 256, 256),
    "convolutions 32, batch norms": of(convolutions(32, False), 4, 3, 32, 32),
    "convolutions 32, group norms": of(convolutions(32, True), 4, 3, 32, 32),
    "convolutions 8, group norms": of(convolutions(8, True), 1, 3, 8, 8),
    "LSTM 64": of(lambda: Recurrent(nn.LSTM, 64), 4, 32, 64),
    "GRU 256": of(lambda: Recurrent(nn.GRU, 256), 4, 32, 256),
    "norms alone": of(lambda: nn.Sequential(*(nn.LayerNorm(768) for _ in range(4))), 1024, 768),
    "Llama 64": transformers_model(
        "Llama", 2, 32, hidden_size=64, num_hidden_layers=2, **LLAMA | {"intermediate_size": 128}
    ),
    "Llama 256": transformers_model("Llama", 2, 256, hidden_size=256, num_hidden_layers=2, **LLAMA),
    "GPT-2 128": transformers_model("GPT2", 2, 128, n_embd=128, n_layer=2, n_head=4),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="models with one of these words")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [name for name in MODELS if any(word in name for word in options.only)]
    cases = [(name, training) for name in names for training in (True, False)]
    found = [
        measured(name, training)
        for name, training in track(cases, "Models", console=Console(stderr=True))
    ]
    Console().print(table(found))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine_facts(), "models": found}, file, indent=2)
    lost = [case for case in found if case["times_stock"]["low"] < LEAST]
    print(f"{len(lost)} of {len(found)} are below {LEAST}; {' '.join(sys.argv)}")
    return 1 if lost else 0


def measured(name: str, training: bool) -> dict:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train(training)
    start = time.perf_counter()
    report = onepass.swap(model, sample=batch)
    seconds = time.perf_counter() - start
    edits = [Edit(c.module, "__class__", c.swapped) for c in report._changes] + report._named
    onepass.unswap(model)
    times, call = Interval(1.0, 1.0, 1.0), Call.of(model, batch)
    if edits:
        step = repeated(model, [call])

        def swapped() -> None:
            with in_force(edits):
                step()

        functions = {"stock": step, "swapped": swapped}
        timing = measure_pairs(functions, rounds=ROUNDS, seconds=SECONDS)
        times = timing.ratio("swapped", "stock")
    return {
        "model": name,
        "training": training,
        "modules": len(report.swapped),
        "kinds": sorted({entry["kind"] for entry in report.swapped}),
        "times_stock": times.to_dict(),
        "swap_seconds": seconds,
    }


def table(found: list[dict]) -> Table:
    shown = Table("model", "mode", "swapped", "times stock [95 %]", "seconds of the swap")
    for case in found:
        times = Interval(**case["times_stock"])
        shown.add_row(
            case["model"],
            "train" if case["training"] else "eval",
            f"{case['modules']} ({', '.join(case['kinds'])})" if case["modules"] else "nothing",
            str(times),
            f"{case['swap_seconds']:.1f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
