"""Steps of one model in turn: stock, all kinds swapped, each kind alone; and kinds to leave out.

Rounds and ratios are those of `compare.measure`. There every variant is a separate model;
here the classes of one model's modules change from step to step, which takes no more memory than a
single model however many kinds there are. The weights change in every step of any variant: equal
weights are not needed for timing. Calls of inference are those of `compare.inference`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import onepass
from onepass.swapping.engine import begin
from onepass.swapping.matchers import KINDS
from onepass.tools.compare import memory
from onepass.tools.compare.inference import DECODE, FORWARD, PREFILL, Call, Inference
from onepass.tools.compare.measure import Lazy
from onepass.tools.compare.pairs import time_rounds
from onepass.tools.compare.settings import Settings
from onepass.tools.compare.train import Trainer
from onepass.tools.compare.variants import STOCK, SWAPPED, kinds_of, of_kinds
from onepass.tools.errors import BadInput
from onepass.tools.harness import Interval, Timing

SECONDS = 60.0  # rounds go on this long if the requested number takes less
PROOF_SECONDS = 30.0  # the same for proofs of the kinds that are left out
MAX_ROUNDS = 40
WORTH = 0.01  # share of stock's peak from which memory counts as saved,
LEAST_SAVED = 1 << 20  # and bytes: peaks of two processes differ by less
NONE_OF_IT = "the model has nothing of this kind"
IDLE = "does nothing in these calls"


@dataclass(frozen=True)
class Variant:
    """One of the measured swaps; `kinds` is None for stock."""

    kinds: tuple[str, ...] | None
    modules: int  # that changed
    saved_bytes: int | None  # None: nothing is kept for a backward
    peak_bytes: int


@dataclass(frozen=True)
class Advice:
    """The kinds to swap; see `advise`."""

    keep: tuple[str, ...]
    leave_out: tuple[str, ...]  # slower than stock alone
    ratio: Interval | None = None  # of the swap of kept kinds against that of all
    times_stock: Interval | None = None  # of the swap of kept kinds, in the same rounds

    @property
    def proven(self) -> bool:
        return self.ratio is None or self.ratio.low > 1.0


@dataclass(frozen=True)
class Profile:
    """The variants at one dropout probability; None with --model."""

    dropout: float | None
    items_per_batch: int
    timing: Timing
    variants: dict[str, Variant]
    absent: dict[str, str]  # by kind, why nothing was swapped
    advice: Advice
    phases: dict[str, Timing] = field(default_factory=dict)  # into which `timing` can be divided
    limited: bool = False  # by --kinds: a swap of all kinds was not measured
    objective: str | None = None  # that was trained; None: nothing was
    note: str = ""  # why `generate` was not called

    def times_stock(self, name: str) -> Interval:
        return self.timing.ratio(name, STOCK)

    def milliseconds_bought(self, name: str) -> Interval:
        found = self.timing.difference(STOCK, name)
        return Interval(1e3 * found.median, 1e3 * found.low, 1e3 * found.high)

    def saved_peak(self, name: str) -> int:
        """The bytes by which a variant lowers the peak of a step."""
        return self.variants[STOCK].peak_bytes - self.variants[name].peak_bytes

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of which the model has something."""
        return self.advice.keep + self.advice.leave_out

    @property
    def whole(self) -> str:
        """The variant in which all kinds are swapped; with one kind, it alone."""
        return SWAPPED if SWAPPED in self.variants else of_kinds(self.kinds)

    @property
    def swaps(self) -> tuple[str, ...]:
        """The kinds of the swap to use, which was measured to gain; empty: none was."""
        advice = self.advice
        rest = advice.times_stock is not None and verdict(advice.times_stock)
        if rest and advice.proven:
            return advice.keep
        if verdict(self.times_stock(self.whole)):
            return self.kinds
        if rest:
            return advice.keep
        alone = {(kind,): self.times_stock(of_kinds((kind,))).low for kind in self.kinds}
        if advice.times_stock is not None:
            alone.pop(advice.keep, None)  # measured twice, and the second time it did not gain
        best = max(alone, key=alone.__getitem__)
        return best if alone[best] > 1.0 else ()

    @property
    def saving(self) -> tuple[str, ...]:
        """The kinds that save memory and are not among `swaps`."""
        least = max(LEAST_SAVED, WORTH * self.variants[STOCK].peak_bytes)
        return tuple(
            kind
            for kind in self.kinds
            if kind not in self.swaps and self.saved_peak(of_kinds((kind,))) >= least
        )


def verdict(times_stock: Interval) -> bool | None:
    """Whether a swap pays; None: no difference was measured."""
    return True if times_stock.low > 1.0 else False if times_stock.high < 1.0 else None


class Turns:
    """A model and its optimizer, whose modules have the classes of one variant at a time.

    Context manager: at its end the model is stock.

    Attributes:
        reports: of the swaps, by variant.
        idle: kinds that need not be measured.
    """

    idle, note = (), ""

    def __init__(self, workload, settings: Settings):
        self._settings, self._workload = settings, workload
        self.dropout, self.items_per_batch = workload.dropout, workload.items_per_batch
        self.trainer = Trainer(workload.build(), settings)
        self.model = self.trainer.model
        self.reports: dict[str, onepass.Report] = {}
        self._end: Callable[[], None] | None = None

    @property
    def objective(self) -> str:
        return self.trainer.objective

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_) -> None:
        self._become_stock()

    def _become_stock(self) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            end()

    def become(self, variant: str) -> None:
        """Gives the modules the classes of a variant."""
        self._become_stock()
        if variant != STOCK:
            kinds = kinds_of(variant, self._settings) or None
            self.reports[variant], self._end = begin(self.model, kinds=kinds)

    def warm_up(self, variants: Sequence[str], advance: Callable[[], None]) -> dict[str, int]:
        """A step of each variant; the bytes that its forward keeps."""
        saved = {}
        for name in variants:
            self.become(name)
            saved[name] = self.trainer.saved_bytes(self._workload.batch(0))
            advance()
        return saved

    def time(
        self, variants: Sequence[str], seconds: float, advance: Callable[[], None]
    ) -> tuple[Timing, dict[str, Timing]]:
        """Rounds of a step of each variant; it has no phases."""
        settings, batches = self._settings, Lazy(self._workload.batch)

        def before(variant: str, number: int) -> None:
            self.become(variant)
            batches[number]

        def step(number: int) -> None:
            self.trainer.step(batches[number])
            self.trainer.synchronize()

        seconds = 0.0 if settings.quick else seconds
        steps = dict.fromkeys(variants, step)
        return time_rounds(steps, settings.pairs, seconds, MAX_ROUNDS, advance, before), {}


class Calls(contextlib.AbstractContextManager):
    """The same for calls of inference; the variants are copies that share the model's tensors."""

    dropout = objective = None

    def __init__(self, settings: Settings):
        self._inference = Inference(settings)
        self._calls: dict[str, Call] = {}
        self.reports: dict[str, onepass.Report] = {}
        self.model, self.items_per_batch = self._inference.model, self._inference.tokens
        self.note = self._inference.note
        self.idle = ("dropout", *["loss"] * self._inference.generates)

    def __exit__(self, *_) -> None:
        self._calls.clear()

    def warm_up(self, variants: Sequence[str], advance: Callable[[], None]) -> dict[str, None]:
        """Makes the variants, which are warmed up where they are timed."""
        for name in variants:
            self._calls[name], report = self._inference.variant(name)
            if report:
                self.reports[name] = report
        return dict.fromkeys(variants)

    def time(
        self, variants: Sequence[str], seconds: float, advance: Callable[[], None]
    ) -> tuple[Timing, dict[str, Timing]]:
        """Rounds of a call of each variant, and its phases where it has them."""
        self.warm_up([name for name in variants if name not in self._calls], advance)
        with self._inference.inside():
            found = self._inference.time({name: self._calls[name] for name in variants}, seconds)
        phases = {name: timing for name, (timing, _) in found.items()}
        if FORWARD in phases:
            return phases[FORWARD], {}
        prefill, decode = phases[PREFILL], phases[DECODE]
        whole = {n: [prefill.median(n) + s for s in times] for n, times in decode.times.items()}
        return dataclasses.replace(decode, times=whole), phases


def profile(turns: Turns | Calls, settings: Settings, advance: Callable[[], None]) -> Profile:
    """Measures every kind alone.

    Raises:
        BadInput: the swap takes no module of the model.
    """
    torch.manual_seed(settings.seed)
    present, absent = _kinds(turns.model, settings, turns.idle)
    if not present:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in absent.items())
        raise BadInput(f"the model must have something to swap, got none ({reasons})")
    # With one kind alone the whole swap is that kind's.
    alone = [of_kinds((kind,)) for kind in present]
    names = [STOCK, *([SWAPPED] if len(present) > 1 else []), *alone]
    saved = turns.warm_up(names, advance)
    timing, phases = turns.time(names, SECONDS, advance)
    peak_bytes = memory.peaks_of_steps(names, dropout=turns.dropout, settings=settings)
    advice = advise(present, timing)
    if advice.leave_out and advice.keep:
        rest = of_kinds(advice.keep)
        proof, _ = turns.time([STOCK, SWAPPED, rest], PROOF_SECONDS, advance)
        ratios = proof.ratio(rest, SWAPPED), proof.ratio(rest, STOCK)
        advice = Advice(advice.keep, advice.leave_out, *ratios)
    changed = {name: len(report.swapped) for name, report in turns.reports.items()}
    kinds = {STOCK: None, SWAPPED: present} | {of_kinds((kind,)): (kind,) for kind in present}
    variants = {
        name: Variant(kinds[name], changed.get(name, 0), saved[name], peak_bytes[name])
        for name in names
    }
    return Profile(
        turns.dropout, turns.items_per_batch, timing, variants, absent, advice, phases,
        bool(settings.kinds), turns.objective, turns.note,
    )  # fmt: skip


def _kinds(
    model: torch.nn.Module, settings: Settings, idle: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Kinds for which a module would be swapped, and the others with the reason."""
    present, absent = [], {}
    for kind in settings.kinds or KINDS:
        if kind in idle:
            absent[kind] = IDLE
            continue
        report = onepass.swap(model, kinds=kind, dry_run=True)
        if report.swapped:
            present.append(kind)
        else:
            reasons = dict.fromkeys(entry["reason"] for entry in report.skipped)
            absent[kind] = "; ".join(reasons) or NONE_OF_IT
    return tuple(present), absent


def advise(kinds: Sequence[str], timing: Timing) -> Advice:
    """Leaves out the kinds that are slower than stock alone, by the whole interval."""
    slower = [k for k in kinds if verdict(timing.ratio(of_kinds((k,)), STOCK)) is False]
    return Advice(tuple(kind for kind in kinds if kind not in slower), tuple(slower))
