"""One ordinary training step, and the sameness phase, which consists of many."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onepass._batch import call
from onepass.tools.compare import attribution
from onepass.tools.compare.settings import Settings, at
from onepass.tools.errors import BadModel
from onepass.tools.model import cast
from onepass.tools.user_model import (
    check_dense_gradients,
    check_loss,
    check_trainable,
    objective_of,
    telling_errors,
)

STOCK_RUNS = 4  # span the stock-versus-stock band
CURVE_POINTS = 20
# The factor of the numerics rule: the swapped run is one more draw beside the stock runs, and a new
# draw is often a little farther out than all earlier ones.
BAND_FACTOR = 2.0
USER_SECONDS = 60.0  # for the sameness phase of --model, whose steps may be long
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95)}


def fused_adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """torch's fastest AdamW, which trains every variant of the model."""
    return torch.optim.AdamW(parameters, **ADAMW, fused=True)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that require a gradient; raises BadModel if none does."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise BadModel("must have a parameter that requires a gradient")
    return trained


class Trainer:
    """A model with its optimizer; `objective` says what its last loss was."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        compiled: bool = False,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = fused_adamw,
        around: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        """A step runs inside `around()`."""
        self.model, self.around = model.train(), around
        self.device, self._autocast = settings.device, settings.autocast
        self.casts = settings.dtype == torch.bfloat16
        check_trainable(model)
        self.forward: Callable = torch.compile(model) if compiled else model
        self.optimizer = make_optimizer(trained_parameters(model))
        self._has_trained = False
        self.objective = ""

    @contextlib.contextmanager
    def uncast(self) -> Iterator[None]:
        """Inside, there is no autocast."""
        autocast, self._autocast = self._autocast, contextlib.nullcontext
        try:
            yield
        finally:
            self._autocast = autocast

    def loss(self, batch) -> Tensor:
        """Scalar loss of a batch, under autocast when the dtype asks for it."""
        with self._autocast(), telling_errors(self.model, batch):
            loss, self.objective = objective_of(call(self.forward, batch))
        return loss

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients; the first time it checks that they can be trained with."""
        if self._has_trained:
            loss.backward()
            return
        check_loss(loss)
        with telling_errors(self.model):
            loss.backward()
        check_dense_gradients(self.model)
        self._has_trained = True

    def step(self, batch) -> Tensor:
        """Forward, loss, backward, AdamW step, zero_grad; returns the loss, detached."""
        with self.around():
            loss = self.loss(batch)
            self.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def watched_step(self, batch) -> dict[str, dict[str, float]]:
        """The same step, its milliseconds divided by phase and part; see `attribution`."""
        timeline = attribution.Timeline(self.device)
        with self.around(), timeline.watch(self.model):
            timeline.enter_phase("forward")
            loss = self.loss(batch)
            timeline.enter_phase(attribution.PAUSED)
            timeline.watch_backward(loss)
            timeline.enter_phase("backward")
            self.backward(loss)
            timeline.enter_phase("update", "optimizer")
            self.optimizer.step()
            self.optimizer.zero_grad()
            timeline.enter_phase(attribution.PAUSED)
        return timeline.milliseconds()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def saved_bytes(self, batch) -> int:
        """Runs a step; returns the bytes that its forward keeps alive for the backward.

        Unique storages, whole, since a view keeps its storage alive; parameters are there anyway
        and do not count.
        """
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with self.around():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = self.loss(batch)
            total = sum(storages.values())
            self.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total


@dataclass
class Sameness:
    """Loss curves at one dropout probability: the band of stock, and swapped."""

    dropout: float | None
    stock_runs_differ_by: str
    curve_name: str
    steps: list[int]
    stock: list[list[float]]  # per run and point; the first run is the one swapped is compared with
    swapped: list[float]
    others: dict[str, list[float]]  # swapped, with products of float32 at other precisions

    def gap_of(self, losses: list[float]) -> float:
        """The largest distance from the first stock run."""
        return _worst([abs(a - b) for a, b in zip(losses, self.stock[0], strict=True)])

    @property
    def difference(self) -> list[float]:
        """|swapped - stock| per point."""
        return [abs(a - b) for a, b in zip(self.swapped, self.stock[0], strict=True)]

    @property
    def band(self) -> list[float]:
        """Largest difference between any two stock runs, per point."""
        return [max(point) - min(point) for point in zip(*self.stock, strict=True)]

    @property
    def gap(self) -> float:
        return _worst(self.difference)

    @property
    def stock_gap(self) -> float:
        return _worst(self.band)

    @property
    def same(self) -> bool | None:
        """Whether the gap lies in the band; NaN in swapped alone never does.

        None: the curves cannot tell, since stock's own losses are not finite, or all losses are one
        number, as where the loss underflows to zero.
        """
        losses = {loss for run in self.stock for loss in run}
        if not all(map(math.isfinite, losses)):
            return None
        if len(losses | set(self.swapped)) == 1:
            return None
        return self.gap <= BAND_FACTOR * self.stock_gap

    def to_dict(self) -> dict:
        return {
            "dropout": self.dropout,
            "stock_runs_differ_by": self.stock_runs_differ_by,
            "curve": self.curve_name,
            "steps": self.steps,
            "stock_losses": self.stock,
            "swapped_losses": self.swapped,
            "medium_losses": self.others.get("medium"),
            "gap": self.gap,
            "medium_gap": self.gap_of(self.others["medium"]) if "medium" in self.others else None,
            "precisions": {
                name: {"losses": losses, "gap": self.gap_of(losses)}
                for name, losses in self.others.items()
            },
            "stock_gap": self.stock_gap,
            "band_factor": BAND_FACTOR,
            "same": self.same,
        }


def _worst(values: list[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def train_curve(
    workload,
    settings: Settings,
    points: Sequence[int],
    advance: Callable[[], None],
    *,
    seed: int = 0,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    dtype: torch.dtype | None = None,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = fused_adamw,
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> list[float]:
    """Trains a workload's model up to the last of `points`; returns the loss at each of them.

    Args:
        points: step numbers, ascending.
        seed: of dropout, beside the run's own.
        prepare: changes the stock model before it is trained.
        dtype: parameters and floating-point batches are cast to it; None: unchanged.
        around: steps run inside `around()`.
    """
    model = workload.build()
    prepare(model)
    if dtype:
        model.to(dtype)
    trainer = Trainer(model, settings, make_optimizer=make_optimizer, around=around)
    torch.manual_seed(settings.seed + seed)
    losses, loss = [], None
    for step in range(points[-1] + 1):
        if step in points:
            losses.append(workload.curve_point(trainer, loss))
        if step < points[-1]:
            loss = trainer.step(cast(workload.batch(step), dtype))
            advance()
    return losses


def compare_training(
    workload, settings: Settings, advance: Callable[[], None], further_runs: int = 0
) -> Sameness:
    """Trains stock STOCK_RUNS times and swapped once, on the same batches; and once more at each
    precision that is a variant of the speed phase.

    Without dropout the stock runs differ only in the order of their sums, with dropout in its seed:
    swapped draws other random numbers by design, so it counts as one more seed.

    Args:
        further_runs: how many more runs of as many steps will follow; they share the time.
    """
    dropout = workload.dropout
    steps = settings.steps or _affordable_steps(workload, settings, further_runs)
    points = sorted({round(k * steps / CURVE_POINTS) for k in range(CURVE_POINTS + 1)})
    if dropout is None:  # a training loss has no value before the first step
        points = points[1:]

    def stock_run(seed: int) -> list[float]:
        def reorder(model: nn.Module) -> None:
            if seed and not dropout:
                workload.reorder(model, seed)

        return train_curve(workload, settings, points, advance, seed=seed, prepare=reorder)

    stock = [stock_run(seed) for seed in range(STOCK_RUNS)]
    swapped = train_curve(workload, settings, points, advance, prepare=settings.swap)
    others = {}
    for precision in settings.precisions:
        swap = functools.partial(settings.swap, precision=precision)
        others[precision] = train_curve(
            workload, settings, points, advance, prepare=swap, around=at(precision)
        )
    differ_by = {None: "rounding of the initial weights, random seed", 0.0: "summation order"}
    return Sameness(
        dropout,
        differ_by.get(dropout, "dropout seed"),
        workload.curve_name,
        points,
        stock,
        swapped,
        others,
    )


def _affordable_steps(workload, settings: Settings, further_runs: int) -> int:
    trainer = Trainer(workload.build(), settings)
    trainer.step(workload.batch(0))
    trainer.synchronize()
    start = time.perf_counter()
    trainer.step(workload.batch(0))
    trainer.synchronize()
    seconds = time.perf_counter() - start
    runs = curves_of(settings) + further_runs
    return max(5, min(200, int(USER_SECONDS / seconds / runs)))


def curves_of(settings: Settings) -> int:
    """How many runs the sameness phase has."""
    return STOCK_RUNS + 1 + len(settings.precisions)
