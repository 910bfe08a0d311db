"""AdamW against Muon with AdamW: the loss of `compare`'s small GPT at several learning rates; and
the time of a step of Muon against torch's.

    python benchmarks/muon.py [--steps 300] [--seeds 1] [--rates 1e-3 2e-3] [--optimizers muon]
    python benchmarks/muon.py --equal-time --rates 2e-3 16e-3
    python benchmarks/muon.py --speed [--dtypes bfloat16 float32] [--matrices "one of 768x768"]

Prints the loss on held-out text and the optimizer's share of the time. With --equal-time, AdamW
then trains again, at its best rate, for as long as Muon took at its best. Losses hardly depend on
the machine; times do, and need a quiet one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

import onepass
from onepass.optim import muon
from onepass.tools.data import Batches, held_out_batch, load_text
from onepass.tools.harness import machine_facts, measure_pairs
from onepass.tools.model import GPT, Sizes

SIZES = Sizes(layers=4, heads=4, width=128, block=128, batch=16)
HELD_OUT = 320  # sequences
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
OPTIMIZERS = ("adamw", "muon")
GPT2_LAYERS = 2 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
MATRICES = {
    "200 of 64x64": 200 * [(64, 64)],
    "48 of 128x128": 48 * [(128, 128)],
    "one of 768x768": [(768, 768)],
    "two layers of GPT-2 small": GPT2_LAYERS,
}


def optimizer_of(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "adamw":
        betas = (0.9, 0.95)
        return onepass.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.1)
    groups = onepass.optim.muon_groups(model, matrices={"*.qkv.weight": 3})
    return onepass.optim.MuonWithAdamW(groups, lr=lr, weight_decay=0.1)


class Run(NamedTuple):
    """A run of training: what it took, and what it reached."""

    held_out: float  # loss
    seconds: float
    share: float  # of the optimizer in the time


def train(name: str, lr: float, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    text, model = load_text(), GPT(SIZES)
    batches = Batches(text, SIZES.block, SIZES.batch, seed)
    optimizer, warmup = optimizer_of(name, model, lr), max(1, steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, (steps - n) / max(1, steps - warmup))
    )
    stepping, begin = 0.0, time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        model(*batches(step)).backward()
        before = time.perf_counter()
        optimizer.step()
        stepping += time.perf_counter() - before
        scheduler.step()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        held_out = [part.split(SIZES.batch) for part in held_out_batch(text, SIZES.block, HELD_OUT)]
        losses = [model(*chunk) for chunk in zip(*held_out, strict=True)]
    return Run(float(torch.stack(losses).mean()), seconds, stepping / seconds)


def show_training(name: str, lr: float, seed: int, steps: int) -> Run:
    run = train(name, lr, seed, steps)
    print(
        f"{name} lr={lr:g} seed={seed}: held out {run.held_out:.3f} after {steps} steps in "
        f"{run.seconds:.1f} s, optimizer {run.share:.1%} of the time",
        flush=True,
    )
    return run


def steps_of(shapes: list[tuple[int, int]], dtype: str) -> dict[str, Callable[[], object]]:
    """A step of torch's Muon, whose products are bfloat16, and of ours with products in `dtype`;
    and the products of ours alone."""
    made = {"torch": torch.optim.Muon, "onepass": onepass.optim.Muon}
    steps = {}
    for name, cls in made.items():
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        steps[name] = cls(params, **({"ns_dtype": dtype} if name == "onepass" else {})).step
    with mock.patch.object(muon, "orthogonalized", wraps=muon.orthogonalized) as products:
        steps["onepass"]()
    calls = [call.args for call in products.call_args_list]
    return steps | {"products": lambda: [muon.orthogonalized(*args) for args in calls]}


def show_speed(dtypes: list[str], matrices: list[str]) -> None:
    for dtype in dtypes:
        for what in matrices:
            timing = measure_pairs(steps_of(MATRICES[what], dtype), rounds=7, seconds=2.0)
            share = timing.ratio("onepass", "products").median
            print(
                f"{what}, {dtype}: {timing.ratio('onepass', 'torch')} times as fast; products "
                f"{share:.0%} of the step",
                flush=True,
            )
    print(" | ".join(f"{name} {value}" for name, value in machine_facts().items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--seeds", type=int, default=1)
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    add("--rates", nargs="+", type=float, default=RATES)
    add("--equal-time", action="store_true", help="AdamW once more, for as long as Muon took")
    add("--speed", action="store_true", help="times steps, and trains nothing")
    add("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    add("--matrices", nargs="+", choices=MATRICES, default=list(MATRICES))
    args = parser.parse_args()
    if args.speed:
        show_speed(args.dtypes, args.matrices)
        return
    if args.equal_time and set(args.optimizers) != set(OPTIMIZERS):
        parser.error("--equal-time needs both optimizers.")
    best: dict[str, tuple[Run, float]] = {}
    for name in args.optimizers:
        for lr in args.rates:
            runs = [show_training(name, lr, seed, args.steps) for seed in range(args.seeds)]
            mean = Run(*(sum(values) / len(runs) for values in zip(*runs, strict=True)))
            if math.isnan(mean.held_out):
                mean = mean._replace(held_out=math.inf)  # which can be compared
            best[name] = min(best.get(name, (mean, lr)), (mean, lr))
    if args.equal_time:
        (adamw, lr), (best_muon, _) = best["adamw"], best["muon"]
        # A step apart from its optimizer is the same for both: the shares say how their times
        # compare, also where the machine changed its speed between the runs.
        steps = round(args.steps * (1 - adamw.share) / (1 - best_muon.share))
        print("As long as muon took:", flush=True)
        for seed in range(args.seeds):
            show_training("adamw", lr, seed, steps)


if __name__ == "__main__":
    main()
