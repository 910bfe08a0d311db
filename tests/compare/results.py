"""A result of `onepass compare` that nothing was run for: to look at tables and pictures."""

import dataclasses

import torch

from onepass.tools.compare.attribution import PARTS
from onepass.tools.compare.measure import FirstStep, Speed, Variant
from onepass.tools.compare.optimizers import Choice, Comparison, Outcome
from onepass.tools.compare.products import Products
from onepass.tools.compare.report import Result
from onepass.tools.compare.train import Sameness
from onepass.tools.harness import Timing
from tests.compare.cases import settings_of

STEP = {"stock": 0.230, "swapped": 0.085}  # seconds
ALIKE = ("{}", "compiled {}", "{}, kept memory")
OPTIMIZERS = (
    Choice("default"), Choice("fused"), Choice("onepass"), Choice("fused", torch.bfloat16),
    Choice("onepass", torch.bfloat16, "remainder16", "bfloat16"),
    Choice("onepass", torch.bfloat16, "stochastic", "int8"),
)  # fmt: skip


def result_of(model: str, dropouts=(0.1, 0.0), alike=ALIKE[:1]) -> Result:
    """One whose model, command and data have this name."""
    command = f"onepass compare --model {model} --pairs 8"
    settings = dataclasses.replace(settings_of(), model=model, command=command)
    training = _training(0.0)
    outcomes = {
        choice.name: Outcome(choice, 8 << 20, 8 << 20, training if choice.is_trained else None)
        for choice in OPTIMIZERS
    }
    times = {name: [1e-3 * (1 + 0.1 * place)] * 3 for place, name in enumerate(outcomes)}
    optimizers = Comparison(
        dropouts[0], 1 << 20, 0.230, Timing(times, {}, dict.fromkeys(times, 0.0)), outcomes, {}
    )
    return Result(
        settings=settings,
        machine={"cpu": "Processor (family 6, model 207)", "threads": 2, "commit": "1b9de5f7a0aa"},
        data=f"batches of {model}", parameters=1 << 20,
        speeds=[_speed(dropout, alike) for dropout in dropouts],
        sameness=[_training(dropout) for dropout in dropouts], optimizers=optimizers, seconds=512.0,
    )  # fmt: skip


def _speed(dropout: float | None, alike: tuple[str, ...]) -> Speed:
    times, variants = {}, {}
    for place, form in enumerate(alike):
        for name, seconds in STEP.items():
            times[form.format(name)] = [seconds * (1 + 0.02 * (place + k)) for k in range(5)]
            step = dict.fromkeys(PARTS, 1e3 * seconds / len(PARTS) / 2)
            parts = {"forward": step, "backward": step, "update": dict.fromkeys(PARTS, 0.0)}
            first = FirstStep(5.4, 1e-6, 1e-5, "blocks.0.attention.out.bias", "off")
            variant = Variant(None if place else parts, 99 << 20, 199 << 20, first)
            variants[form.format(name)] = variant
    timing = Timing(times, {}, dict.fromkeys(times, 0.0))
    report = {"swapped": [{"kind": "norm"}, {"kind": "attention"}], "skipped": [], "unknown": []}
    return Speed(dropout, 2048, timing, variants, Products(10**10, 200.0), report)


def _training(dropout: float | None) -> Sameness:
    steps = list(range(0, 201, 20))
    runs = [[5.5 - step / 80 + 1e-4 * run for step in steps] for run in range(4)]
    return Sameness(dropout, "dropout seed", "held-out loss", steps, runs, runs[1])
