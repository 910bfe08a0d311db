"""The speed phase: interleaved steps of stock and swapped, the time of their parts, kept memory.

Every variant starts from the same weights and sees the same batches. A round runs one step of each
variant, in an order that turns around from round to round; the ratio is taken within rounds, so
that whatever slows the machine down for a while slows both sides.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onepass.swapping.masks import Masks, Unpaired
from onepass.swapping.sample import Decision
from onepass.swapping.undisturbed import Random
from onepass.tools.compare import attribution, kept, memory
from onepass.tools.compare.pairs import time_rounds
from onepass.tools.compare.products import Products, products_of
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.train import Trainer
from onepass.tools.compare.variants import COMPILED, STOCK, SWAPPED, names, trainer_of
from onepass.tools.errors import BadModel
from onepass.tools.harness import Timing
from onepass.tools.user_model import OWN_LOSS

SECONDS = 35.0  # rounds continue this long if the requested number takes less
MAX_ROUNDS = 40
WATCHED_SECONDS = 10.0
WATCHED_STEPS = (2, 6)  # at least and at most, of each variant
# A gradient below this share of the largest of all is rounding noise, as that of a key's bias,
# which softmax cancels: its error is divided by that largest, as `Report.verify` does.
NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class FirstStep:
    """A variant against stock, from the same weights on the same batch."""

    loss: float
    loss_difference: float
    # Worst max|difference| / max|stock gradient| over the parameters; None: stock's have no digits.
    gradient_error: float | None
    gradient_name: str
    dropout: str  # "on, with the same masks", "off", or "off: " and why

    def to_dict(self) -> dict:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Variant:
    """Measurements of one variant at one dropout probability, beside its times."""

    parts: dict[str, dict[str, float]] | None  # ms by phase and part; None for compiled graphs
    saved_bytes: int
    peak_bytes: int
    first_step: FirstStep | None


@dataclass(frozen=True)
class Speed:
    """The variants at one dropout probability; None with --model."""

    dropout: float | None
    items_per_batch: int
    timing: Timing
    variants: dict[str, Variant]
    products: Products
    swap_report: dict  # Report.to_dict()
    decisions: dict[str, Decision] = field(default_factory=dict)  # of --auto, by precision
    objective: str = OWN_LOSS

    def milliseconds(self, name: str) -> tuple[float, float, float]:
        """Median, 10th and 90th percentile of a variant's step."""
        percentiles = (self.timing.percentile(name, percent) for percent in (50, 10, 90))
        median, low, high = (1e3 * seconds for seconds in percentiles)
        return median, low, high

    def items_per_second(self, name: str) -> float:
        return self.items_per_batch / self.timing.median(name)


def compare_speed(workload, settings: Settings, advance: Callable[[], None]) -> Speed:
    """Measures all variants of a workload, and compares their first steps."""
    made = {name: trainer_of(name, workload.build(), settings) for name in names(settings)}
    trainers, report = {name: trainer for name, (trainer, _) in made.items()}, made[SWAPPED][1]
    first_steps = _first_steps(trainers, workload.batch(0), workload.dropout != 0.0)
    torch.manual_seed(settings.seed)
    saved = {}
    counter = FlopCounterMode(display=False)
    for name, trainer in trainers.items():  # the warm-up as well
        with counter if name == STOCK else contextlib.nullcontext():
            saved[name] = trainer.saved_bytes(workload.batch(0))
        advance()
    products = products_of(counter, trainers[STOCK].model, settings)

    def step(trainer: Trainer, number: int) -> None:
        trainer.step(batches[number])
        trainer.synchronize()

    batches = Lazy(workload.batch)
    steps = {name: functools.partial(step, trainer) for name, trainer in trainers.items()}
    seconds = 0.0 if settings.quick else SECONDS
    with contextlib.ExitStack() as ending:
        if settings.keep_memory:
            others = ending.enter_context(kept.steps(workload.dropout, settings))
            steps |= {name: functools.partial(others.step, name) for name in others.saved}
            saved |= others.saved
            advance()
        timing = time_rounds(
            steps, settings.pairs, seconds, MAX_ROUNDS, advance, lambda _, number: batches[number]
        )
    parts = _parts(trainers, workload, timing)
    objective = trainers[STOCK].objective
    del trainers, steps, made
    peaks = memory.peaks_of_steps(list(timing.times), workload.dropout, settings)
    advance()
    variants = {
        name: Variant(parts.get(name), saved[name], peak, first_steps.get(name))
        for name, peak in peaks.items()
    }
    return Speed(
        workload.dropout, workload.items_per_batch, timing, variants, products, report.to_dict(),
        settings.decisions, objective,
    )  # fmt: skip


def _parts(
    trainers: dict[str, Trainer], workload, timing: Timing
) -> dict[str, dict[str, dict[str, float]] | None]:
    """Watches more steps, in turn as well, and scales each variant's shares to its median step."""
    watched = {name: [] for name in trainers if not name.startswith(COMPILED)}
    fewest, most = WATCHED_STEPS
    affordable = int(WATCHED_SECONDS / sum(timing.median(name) for name in watched))
    for number in range(max(fewest, min(affordable, most))):
        batch = workload.batch(number)
        for name in list(watched)[:: 1 if number % 2 == 0 else -1]:
            watched[name].append(trainers[name].watched_step(batch))
    return dict.fromkeys(trainers) | {
        name: attribution.scaled(attribution.median(steps), 1e3 * timing.median(name))
        for name, steps in watched.items()
    }


class Lazy(dict):
    """Batches made once per round, by the variant that comes first, and shared by the others."""

    def __init__(self, make: Callable[[int], object]):
        super().__init__()
        self._make = make

    def __missing__(self, step: int):
        self.clear()
        self[step] = self._make(step)
        return self[step]


def _first_steps(trainers: dict[str, Trainer], batch, may_drop: bool) -> dict[str, FirstStep]:
    """Every variant's first loss and gradients against stock's.

    With dropout stock has the masks of the variant, if it can, else both run in eval mode; compiled
    graphs, which would have to be compiled once more for either, are left out.
    """
    (_, stock), *others = trainers.items()
    if not may_drop:
        reference, exact = _step(stock, batch), _in_float32(stock, batch)
        return {
            name: _compared(_step(other, batch), reference, "off", exact) for name, other in others
        }
    return {
        name: _first_step_with_dropout(stock, other, batch)
        for name, other in others
        if not name.startswith(COMPILED)
    }


def _first_step_with_dropout(stock: Trainer, other: Trainer, batch) -> FirstStep:
    masks, random = Masks(), Random(stock.model)
    try:
        step = _step(other, batch, masks.noted())
        after = Random(stock.model)
        random.restore()
        reference = _step(stock, batch, masks.repeated())
        masks.check(after, Random(stock.model))
        random.restore()
        exact = _in_float32(stock, batch, masks.repeated())
        dropout = "on, with the same masks" if masks.calls else "off"
        return _compared(step, reference, dropout, exact)
    except (Unpaired, BadModel) as error:  # its code may not run in modes of torch
        why = str(error)
        random.restore()
    for trainer in (stock, other):
        trainer.model.eval()
    try:
        steps = _step(other, batch), _step(stock, batch)
        return _compared(*steps, f"off: {why}", _in_float32(stock, batch))
    finally:
        for trainer in (stock, other):
            trainer.model.train()


def _step(
    trainer: Trainer, batch, inside: AbstractContextManager | None = None
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients)."""
    with trainer.around(), inside or contextlib.nullcontext():
        loss = trainer.loss(batch)
        trainer.backward(loss)
    gradients = {
        name: parameter.grad
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.optimizer.zero_grad()
    return loss.item(), gradients


def _in_float32(
    stock: Trainer, batch, inside: AbstractContextManager | None = None
) -> dict[str, Tensor] | None:
    """Stock's gradients without autocast; None where it has none, or the model does not run so."""
    if not stock.casts:
        return None
    try:
        with stock.uncast():
            return _step(stock, batch, inside)[1]
    except BadModel:
        return None


def _compared(
    step: tuple, reference: tuple, dropout: str, exact: dict[str, Tensor] | None
) -> FirstStep:
    (loss, gradients), (expected, of_stock) = step, reference
    worst, error = worst_gradient(gradients, of_stock, exact)
    return FirstStep(loss, loss - expected, error, worst, dropout)


def worst_gradient(
    gradients: dict[str, Tensor],
    reference: dict[str, Tensor],
    exact: dict[str, Tensor] | None = None,
) -> tuple[str, float | None]:
    """Name and relative error of the parameter whose gradient differs most.

    The error is max|difference| over max|reference gradient of that parameter|, or of all
    parameters where that is noise; None if all of the reference is zero, denormal or not finite,
    and the other gradients are the same.

    Args:
        exact: with fewer roundings, to tell noise; by default the reference.
    """
    largest, of_exact = _sizes(reference), _sizes(exact or reference)
    most = max(filter(math.isfinite, largest.values()), default=0.0)
    if most < torch.finfo(torch.float32).tiny:
        differ = (n for n, g in reference.items() if not _same_bits(gradients.get(n), g))
        name = next(differ, None)
        return (next(iter(reference), ""), None) if name is None else (name, math.inf)
    noise = NEGLIGIBLE * max(filter(math.isfinite, of_exact.values()), default=0.0)
    errors = {}
    for name, expected in reference.items():
        if name not in gradients:
            return name, float("inf")
        difference = (gradients[name].double() - expected.double()).abs().max().item()
        is_noise = not largest[name] or of_exact.get(name, math.inf) <= noise
        errors[name] = difference / (most if is_noise else largest[name])
    # A NaN compares as the largest: no number may hide it.
    return max(errors.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])


def _sizes(gradients: dict[str, Tensor]) -> dict[str, float]:
    return {n: g.abs().max().item() if g.numel() else 0.0 for n, g in gradients.items()}


def _same_bits(gradient: Tensor | None, reference: Tensor) -> bool:
    return gradient is not None and torch.equal(gradient.nan_to_num(), reference.nan_to_num())
