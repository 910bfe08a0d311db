"""The optimizer axis: one AdamW step by torch's default, torch's fused and onepass's.

Speed: each optimizer has its own copy of the stock model's parameters, all share the gradients, and
their steps are timed in turn, without the rest of a training step and without zero_grad: in whole
steps noise would hide the difference. A forward and backward runs untimed before each, so that
caches are as in a training step. Bytes are added up from the tensors
themselves.

Sameness: the stock model is trained once more by each of onepass's optimizers, on the batches of
the sameness phase. With unchanged parameters its curve must lie within the band that stock runs
span; bfloat16 parameters (``--master``) and smaller moments (``--state-dtype``) are other numerics,
for which only the distance is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import onepass
from onepass.tools.compare.pairs import time_rounds
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.train import ADAMW, Sameness, Trainer, train_curve, trained_parameters
from onepass.tools.errors import BadInput, BadModel
from onepass.tools.harness import Timing
from onepass.tools.model import cast

SECONDS = 6.0  # rounds go on this long when the asked-for number takes less
MAX_ROUNDS = 40
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Choice:
    """An AdamW, and the dtype of the parameters that it is given."""

    library: str  # of settings.OPTIMIZERS
    dtype: torch.dtype | None = None  # dtype of the parameters; None: unchanged
    master: str | None = None
    state_dtype: str | None = None

    @property
    def name(self) -> str:
        words = self.library if self.library == "onepass" else f"torch {self.library}"
        if self.dtype:
            words += " bf16" if self.dtype is torch.bfloat16 else f" {_text(self.dtype)}"
        if self.master:
            words += f", master {self.master}"
        if self.state_dtype:
            words += f", {self.state_dtype} moments"
        return words

    @property
    def is_plain(self) -> bool:
        """Whether it should train as torch's does, up to rounding."""
        return not (self.dtype or self.master or self.state_dtype)

    @property
    def is_trained(self) -> bool:
        """Whether a loss curve is taken: for torch's own only if parameters are cast."""
        return self.library == "onepass" or self.dtype is not None

    def __call__(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.library != "onepass":
            # None, not False: torch's own default.
            fused = True if self.library == "fused" else None
            return torch.optim.AdamW(parameters, **ADAMW, fused=fused)
        options = {}
        if self.master not in (None, "none"):
            options["master"] = self.master
        if self.state_dtype:
            options["state_dtype"] = self.state_dtype
        return onepass.optim.AdamW(parameters, **ADAMW, **options)


BASELINE = Choice("fused")


def choose(settings: Settings, workload) -> tuple[list[Choice], dict[str, str]]:
    """The optimizers of a run, and by name why a usual one is left out.

    Raises:
        BadInput: one requested by --master or --state-dtype cannot train the model.
    """
    model = workload.build()
    trained = trained_parameters(model)
    choices = [Choice(library) for library in settings.optimizers]
    left_out = {}
    ours = Choice("onepass")
    if ours in choices and (obstacle := _obstacle(ours, trained)):
        choices.remove(ours)
        left_out[ours.name] = obstacle
    # Masters belong to 16-bit parameters: a model that has none is cast.
    has_16_bit = any(parameter.dtype.itemsize == 2 for parameter in trained)
    dtype = torch.bfloat16 if settings.masters and not has_16_bit else None
    asked = [
        Choice("onepass", dtype, master, state_dtype)
        for master in settings.masters or (None,)
        for state_dtype in settings.state_dtypes or (None,)
        if master or state_dtype
    ]
    for choice in asked:
        if obstacle := _obstacle(choice, trained):
            raise BadInput(f"{choice.name} cannot train this model: {obstacle}")
    if dtype:
        _check_forward(model.to(dtype), cast(workload.batch(0), dtype), settings)
        asked.insert(0, Choice("fused", dtype))
    return choices + asked, left_out


def _obstacle(choice: Choice, trained: Sequence[Tensor]) -> str | None:
    """The constructor's objection to parameters of these dtypes and devices."""
    kinds = {(choice.dtype or parameter.dtype, parameter.device) for parameter in trained}
    try:
        choice([nn.Parameter(torch.empty(0, dtype=d, device=device)) for d, device in kinds])
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


@torch.no_grad()
def _check_forward(model: nn.Module, batch, settings: Settings) -> None:
    try:
        Trainer(model, settings).loss(batch)
    except BadModel as error:
        raise BadInput(
            f"--master trains the model with bfloat16 parameters, and its forward fails: {error}"
        ) from error


@dataclass(frozen=True)
class Outcome:
    """Measurements of one optimizer, beside its times."""

    choice: Choice
    state_bytes: int
    other_bytes: int  # of the parameters and their gradients
    training: Sameness | None  # `swapped` in it is stock, trained by this optimizer

    @property
    def same(self) -> bool | None:
        """Whether training is the same; None if it need not be, or was not measured."""
        return self.training.same if self.training and self.choice.is_plain else None


@dataclass(frozen=True)
class Comparison:
    """The optimizers on one model; times by the optimizers' names."""

    dropout: float | None  # of the step that shares are of, and of the training
    parameters: int  # those with a gradient
    step_seconds: float  # stock's, with BASELINE in it
    timing: Timing
    outcomes: dict[str, Outcome]
    left_out: dict[str, str]  # by name, why

    def share_of_step(self, name: str) -> float | None:
        """Share of stock's step that this optimizer takes; None where the model's dtype is
        another."""
        if self.outcomes[name].choice.dtype:
            return None
        rest = max(0.0, self.step_seconds - self.timing.median(BASELINE.name))
        own = self.timing.median(name)
        return own / (rest + own)

    def state_bytes(self, name: str) -> float:
        """Bytes of state per parameter."""
        return self.outcomes[name].state_bytes / self.parameters

    def all_bytes(self, name: str) -> float:
        """Bytes per parameter: itself, its gradient and its state."""
        outcome = self.outcomes[name]
        return (outcome.state_bytes + outcome.other_bytes) / self.parameters

    def to_dict(self) -> dict:
        trained = next((o.training for o in self.outcomes.values() if o.training), None)
        return {
            "dropout": self.dropout,
            "parameters": self.parameters,
            "baseline": BASELINE.name,
            "variants": {name: self._variant(name) for name in self.outcomes},
            "steps": trained and trained.steps,
            "stock_gap": trained and trained.stock_gap,
            "left_out": self.left_out,
        }

    def _variant(self, name: str) -> dict:
        outcome, times = self.outcomes[name], self.timing.times[name]
        training, choice = outcome.training, outcome.choice
        return {
            "library": choice.library,
            "cast_to": _text(choice.dtype) if choice.dtype else None,
            "master": choice.master,
            "state_dtype": choice.state_dtype,
            "step_ms": {
                "median": 1e3 * self.timing.median(name),
                "p10": 1e3 * self.timing.percentile(name, 10),
                "p90": 1e3 * self.timing.percentile(name, 90),
                "rounds": [1e3 * seconds for seconds in times],
            },
            "page_faults": self.timing.faults[name],
            "ratio_to_baseline": self.timing.ratio(name, BASELINE.name).to_dict(),
            "share_of_step": self.share_of_step(name),
            "state_bytes_per_parameter": self.state_bytes(name),
            "bytes_per_parameter": self.all_bytes(name),
            "losses": training and training.swapped,
            "gap": training and training.gap,
            "same": outcome.same,
        }


def compare_optimizers(
    choices: Sequence[Choice],
    left_out: dict[str, str],
    step_seconds: float,
    fast,
    slow,
    stock: Sameness,
    settings: Settings,
    advance: Callable[[], None],
) -> Comparison:
    """Times the optimizers on the parameters of `fast`, and trains `slow` with them.

    Args:
        step_seconds: a whole step of `fast`, stock and with BASELINE.
        stock: the loss curves of `slow` that those of the optimizers are compared with.
    """
    timing, sizes, parameters = _measure(choices, fast, settings, advance)
    outcomes = {}
    for choice in choices:
        training = None
        if choice.is_trained:
            losses = train_curve(
                slow, settings, stock.steps, advance, dtype=choice.dtype, make_optimizer=choice
            )
            training = dataclasses.replace(stock, swapped=losses)
        outcomes[choice.name] = Outcome(choice, *sizes[choice.name], training)
    return Comparison(fast.dropout, parameters, step_seconds, timing, outcomes, left_out)


def _measure(
    choices: Sequence[Choice], workload, settings: Settings, advance: Callable[[], None]
) -> tuple[Timing, dict[str, tuple[int, int]], int]:
    """Times; bytes of the states and of parameters with gradients; number of parameters."""
    trainer = Trainer(workload.build(), settings)
    batch = workload.small_batch()
    trainer.loss(batch).backward()
    stock = [p for p in trainer.model.parameters() if p.grad is not None]
    gradients = {
        dtype: [p.grad.to(dtype or p.grad.dtype) for p in stock]
        for dtype in {choice.dtype for choice in choices}
    }
    optimizers, copies = {}, {}
    for choice in choices:
        mine = copies[choice.name] = []
        for parameter, gradient in zip(stock, gradients[choice.dtype], strict=True):
            values = parameter.detach().to(choice.dtype or parameter.dtype, copy=True)
            mine.append(nn.Parameter(values))
            mine[-1].grad = gradient
        optimizers[choice.name] = choice(mine)
    for optimizer in optimizers.values():
        for _ in range(WARM_UP_STEPS):
            optimizer.step()

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        trainer.synchronize()

    def before(_name: str, _number: int) -> None:
        torch.autograd.grad(trainer.loss(batch), stock)  # leaves .grad alone
        trainer.synchronize()

    timing = time_rounds(
        {name: lambda _, mine=mine: step(mine) for name, mine in optimizers.items()},
        settings.pairs,
        0.0 if settings.quick else SECONDS,
        MAX_ROUNDS,
        advance,
        before,
    )
    sizes = {
        name: (_state_bytes(optimizer), sum(p.nbytes + p.grad.nbytes for p in copies[name]))
        for name, optimizer in optimizers.items()
    }
    return timing, sizes, sum(parameter.numel() for parameter in stock)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that the optimizer keeps for its parameters."""
    entries = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in entries if isinstance(value, Tensor))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
