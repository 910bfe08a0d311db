"""Trains a small GPT on the source of Python's standard library, byte by byte: AdamW against Muon
with AdamW, each at several learning rates.

    python benchmarks/muon.py [--steps 300] [--seeds 1] [--rates 1e-3 2e-3] [--optimizers muon]

Prints the loss on text that was held out, the mean of the last batches of the training loss, and
the share of a step that the optimizer took. Losses hardly depend on the machine; times do.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import onepass

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 4, 4, 128, 16
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
OPTIMIZERS = ("adamw", "muon")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for module in (self.tokens, self.positions):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight)))


def text() -> torch.Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[s : s + LENGTH + 1] for s in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def train(name: str, lr: float, seed: int, steps: int) -> tuple[float, float, float]:
    """(held-out loss, mean of the last tenth of the training losses, the optimizer's share)."""
    torch.manual_seed(seed)
    data = text()
    cut = len(data) * 9 // 10
    model, generator = GPT(), torch.Generator().manual_seed(seed)
    if name == "muon":
        groups = onepass.optim.muon_groups(model, matrices={"*.qkv.weight": 3})
        optimizer = onepass.optim.MuonWithAdamW(groups, lr=lr, weight_decay=0.1)
    else:
        optimizer = onepass.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1
        )
    warmup = steps // 20
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, (steps - n) / (steps - warmup))
    )
    losses, stepping, begin = [], 0.0, time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(data[:cut], generator))
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        stepping += time.perf_counter() - before
        scheduler.step()
        losses.append(loss.item())
    share = stepping / (time.perf_counter() - begin)
    with torch.no_grad():
        generator.manual_seed(1234)
        held_out = [loss_of(model, *batch(data[cut:], generator)).item() for _ in range(20)]
    last = losses[-max(1, steps // 10) :]
    return sum(held_out) / len(held_out), sum(last) / len(last), share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    arguments = parser.parse_args()
    for name in arguments.optimizers:
        for lr in arguments.rates:
            for seed in range(arguments.seeds):
                held_out, last, share = train(name, lr, seed, arguments.steps)
                print(
                    f"{name} lr={lr:g} seed={seed}: held out {held_out:.3f}, training {last:.3f}, "
                    f"optimizer {share:.1%} of the time",
                    flush=True,
                )


if __name__ == "__main__":
    main()
