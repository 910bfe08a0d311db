"""`swap(sample=)`: of what a swap would change, the changes that gain on a batch of the user's.

Modules of one class and shape are decided together, by calls of one of them with the arguments
that it got when the model ran on the sample: stock and swapped take turns, forward alone in eval
mode, forward and backward in train mode. Inner modules come first; outer ones are measured around
those that were taken. Changes without a call that can be repeated (attention by name in a config,
arguments that hold foreign objects) are measured by steps of the whole model. Last comes a step
with all that was taken against stock: unless it gains by its whole interval, nothing is swapped.

The model's state is restored as by `Report.verify`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onepass._batch import arguments, named_in_errors
from onepass._policy.precision import check_precision, precision_of
from onepass.swapping import quantized
from onepass.swapping.changes import Edit, in_force
from onepass.swapping.plan import ClassChange, LeftOut, Plan
from onepass.swapping.reasons import Reason, SkipReason
from onepass.swapping.texts import grouped
from onepass.swapping.undisturbed import State

if TYPE_CHECKING:
    from onepass.tools.harness import Interval, Timing

# Modules are timed for this long, or for as long as this many steps take; steps for half of that.
SECONDS, STEPS = 1.0, 10
ROUNDS, MOST_ROUNDS = 5, 50  # as measure_pairs takes them
WIDE = 0.1  # of its median, to either side: an interval that tells too little
MOST_CALLS = 4  # of a module, with different arguments
STOCK, SWAPPED = "stock", "swapped"
_NO_CHOICE = "swap: choice must be a report's choice, got {got}"
_BUSY = (
    "the machine is busy: {count} {verb} too noisy to tell; those modules stay as they were, so "
    "swap again when it is quiet, or give the report's choice of a quiet hour as choice="
)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# Why the last `swap(sample=)` of a module left it as it is, by kind; until `unswap`.
LEFT_OUT: WeakKeyDictionary[nn.Module, dict[str, SkipReason]] = WeakKeyDictionary()


class Decision(NamedTuple):
    """The outcome of a swap, to be repeated without measuring, by the names of modules: for copies
    of the model, or with other sizes."""

    swapped: list[list[str]]  # [name of a module, kind]
    left_out: list[LeftOut]
    notes: list[str]  # for the report
    precision: str | None = None  # of products of float32; None: torch's setting
    precisions: dict[str, str | None] | None = None  # by name, where they differ; None: not known

    @classmethod
    def of(cls, plan: Plan, notes: list[str]) -> Decision:
        """The decision of a plan; without a precision of its own with what an earlier swap gave."""
        swapped = [[entry["name"], entry["kind"]] for entry in plan.report.swapped]
        precision, found = plan.precision, plan.precisions()
        if precision is None:  # layers that "int8" leaves out have "highest"
            kept = [own for own in found.values() if own is not None]
            precision = next(iter([own for own in kept if own != "highest"] + kept), None)
        differing = {name: own for name, own in found.items() if own != precision}
        return cls(swapped, plan.left_out, notes, precision, differing)

    def to_dict(self) -> dict[str, object]:
        """Plain data: `Report.choice`."""
        fields = self._asdict() | {"left_out": [left._asdict() for left in self.left_out]}
        if self.precisions is None:
            del fields["precision"], fields["precisions"]
        return fields

    @classmethod
    def from_dict(cls, choice: object) -> Decision:
        got = type(choice).__name__
        if not isinstance(choice, dict):
            raise TypeError(_NO_CHOICE.format(got=got))
        try:
            swapped = [[name, kind] for name, kind in choice["swapped"]]
            left_out = [LeftOut(**left) for left in choice["left_out"]]
            decision = cls(swapped, left_out, list(choice["notes"]))
            if "precision" in choice:  # older ones do not hold it
                known = {"precision": choice["precision"], "precisions": {**choice["precisions"]}}
                decision = decision._replace(**known)
        except (TypeError, KeyError, ValueError):
            raise TypeError(
                _NO_CHOICE.format(got=f"{got} of {', '.join(map(str, choice))}")
            ) from None
        for precision in (decision.precision, *(decision.precisions or {}).values()):
            check_precision("swap", precision)
        return decision

    def precision_beside(self, asked: str | None) -> str | None:
        """The precision of a swap that repeats this and was asked for one.

        Raises:
            ValueError: it is another one.
        """
        if self.precisions is None:
            return asked
        if asked not in (None, self.precision):
            raise ValueError(
                f"swap: precision must be {self.precision!r} beside this choice, got {asked!r}"
            )
        return self.precision

    def repeat(self, plan: Plan) -> list[str]:
        """Takes all else out of a plan; returns notes for the report."""
        for left in self.left_out:
            names, kinds = {*left.names}, {*left.kinds}
            modules = {
                id(change.module)
                for change in plan.classes
                if change.name in names and kinds.issuperset(change.cls._onepass_to)
            }
            plan.leave_out(modules, SkipReason(Reason[left.reason], left.text), left.by_name)
        chosen = {(name, kind) for name, kind in self.swapped}
        for kind in plan.kinds:
            others = {id(c.module) for c in plan.classes if (c.name, kind) not in chosen}
            by_name = kind == "attention" and any(
                (name, kind) not in chosen for name in plan.names_of_named
            )
            plan.leave_out(others, Reason.NOT_CHOSEN.format(), by_name, kind)
        done = {(entry["name"], entry["kind"]) for entry in plan.report.swapped}
        missing: dict[str, list[str]] = {}
        for name, kind in self.swapped:
            if kind in plan.kinds and (name, kind) not in done:
                missing.setdefault(kind, []).append(name)
        lost = [f"{kind} of {', '.join(grouped(names))}" for kind, names in missing.items()]
        return [f"chosen and not swapped: {'; '.join(lost)}"] * bool(lost) + self.notes


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple
    kwargs: dict

    @classmethod
    def of(cls, model: nn.Module, batch: object) -> Call:
        """The call of a model that gets this batch."""
        return cls(*arguments(model, batch))


class _Unit(NamedTuple):
    """Changes that are made together, or not at all."""

    changes: list[ClassChange]  # of modules of one class and shape
    named: list[Edit]  # of configs by which modules take attention by name
    calls: list[Call]  # of the first module; empty: whole steps are timed

    @property
    def kind(self) -> str:
        """The kind that it swaps, for a report."""
        kinds = self.changes[0].cls._onepass_to if self.changes else ("attention",)
        return " and ".join(kinds)

    def edits(self) -> list[Edit]:
        return quantized.edits_of(self.changes) + self.named


def keep_gains(plan: Plan, model: nn.Module, sample: object) -> list[str]:
    """Takes the changes out of a plan that do not gain on the sample, a batch as `_batch` gives it
    to the model.

    Returns:
        Notes for the report.
    """
    try:
        import onepass.tools.harness  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"swap: sample needs {error.name}, which is missing: pip install 'onepass[tools]'"
        ) from None
    with in_force(plan.edits_of_precision()):  # which stock's classes do not read
        state = State(model, (change.module for change in plan.classes))
        with named_in_errors("swap with a sample", model, *Call.of(model, sample)):
            return state.around(_Measurement(plan, model, sample).decide)


class _Measurement:
    def __init__(self, plan: Plan, model: nn.Module, sample: object):
        self.plan, self.model = plan, model
        self.step = repeated(model, [Call.of(model, sample)])
        self.taken: list[Edit] = []
        self.saved: Counter[str] = Counter()  # seconds of a step, by kind
        self.extra = 0.0  # seconds that went into measuring again
        self.measured = self.noisy = 0  # decisions, and those that no measurement allows

    def decide(self) -> list[str]:
        calls = self._calls()
        start = time.perf_counter()
        self.step()
        seconds = max(SECONDS, STEPS * (time.perf_counter() - start))
        end = time.perf_counter() + seconds
        by_steps = []
        units = self._units(calls)
        for left, unit in zip(range(len(units), 0, -1), units, strict=True):
            remaining = max(0.0, end + self.extra - time.perf_counter())
            timing = self._of_calls(unit, remaining / left)
            if timing is None:
                by_steps.append(unit)
            else:
                self._take_or_leave_out(unit, timing, SWAPPED, len(unit.changes))
        variants = {
            str(number): self._with(self.taken + unit.edits())
            for number, unit in enumerate(by_steps)
        }
        if variants:
            timing = self._timed({STOCK: self._with(self.taken), **variants}, seconds / 2)
            for number, unit in enumerate(by_steps):
                self._take_or_leave_out(unit, timing, str(number))
        gain = self._decide_all(seconds / 2) if self.taken else []
        return self._doubts() + gain

    def _doubts(self) -> list[str]:
        if not self.noisy:
            return []
        count = f"{self.noisy} of {self.measured} measurement{'s' * (self.measured > 1)}"
        return [_BUSY.format(count=count, verb="are" if self.noisy > 1 else "is")]

    def _calls(self) -> dict[int, list[Call] | None]:
        """Calls by id of each module that a change is of, in a step of the stock model; None
        if one cannot be repeated."""
        calls: dict[int, list[Call] | None] = {}

        def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
            found = calls.setdefault(id(module), [])
            if found is None or len(found) >= MOST_CALLS:
                return
            call = _copied(Call(args, kwargs))
            if call is None:
                calls[id(module)] = None
            elif _signature(call) not in map(_signature, found):
                found.append(call)

        handles = []
        try:
            for change in self.plan.classes:
                handles.append(change.module.register_forward_pre_hook(note, with_kwargs=True))
            self.step()
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _units(self, calls: dict[int, list[Call] | None]) -> list[_Unit]:
        """Inner modules first. Changes of modules that were not called are left out."""
        groups: dict[tuple, list[ClassChange]] = {}
        for change in reversed(self.plan.classes):
            module = change.module
            if id(module) not in calls:
                self._leave_out([change], Reason.NOT_CALLED.format())
                continue
            shapes = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
            signatures = tuple(map(_signature, calls[id(module)] or ()))
            kind = type(module), change.cls, module.training, precision_of(module)
            key = (*kind, shapes, signatures)
            groups.setdefault(key, []).append(change)
        units = [_Unit(group, [], calls[id(group[0].module)] or []) for group in groups.values()]
        return units + [_Unit([], self.plan.named, [])] * bool(self.plan.named)

    def _of_calls(self, unit: _Unit, seconds: float) -> Timing | None:
        """Time of the calls of the unit's first module; None if it has no calls that can be
        repeated."""
        if not unit.calls:
            return None
        module = unit.changes[0].module
        swapped = object.__new__(unit.changes[0].cls)
        swapped.__dict__ = module.__dict__  # all of it is shared
        functions = {
            name: repeated(which, unit.calls)
            for name, which in ((STOCK, module), (SWAPPED, swapped))
        }
        with in_force(self.taken):
            try:
                return self._timed(functions, seconds)
            except Exception:  # foreign code that cannot be called alone
                return None

    def _with(self, edits: list[Edit]) -> Callable[[], None]:
        """A step with these edits in force."""

        def step() -> None:
            with in_force(edits):
                self.step()

        return step

    def _timed(self, functions: dict[str, Callable[[], object]], seconds: float) -> Timing:
        """Once more, where that may decide."""
        timing = self._timed_once(functions, seconds)
        if any(_is_noisy(timing.ratio(name, STOCK)) for name in functions if name != STOCK):
            start = time.perf_counter()
            again = self._timed_once(functions, seconds)
            times = {name: timing.times[name] + again.times[name] for name in functions}
            timing = dataclasses.replace(timing, times=times)
            self.extra += time.perf_counter() - start
        return timing

    def _timed_once(self, functions: dict[str, Callable[[], object]], seconds: float) -> Timing:
        from onepass.tools import harness

        clock = harness.clock_of(self._device.type)
        if self._device.type == "cpu" and torch.get_num_threads() == 1:
            clock = harness.HostClock(time.thread_time)
        return harness.measure_pairs(
            functions, rounds=ROUNDS, seconds=seconds, max_rounds=MOST_ROUNDS, warm_up=1,
            clock=clock,
        )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _take_or_leave_out(self, unit: _Unit, timing: Timing, variant: str, count: int = 1) -> None:
        """Decides by a variant's time against stock's; count: how many calls of a step the timed
        one is."""
        ratio = timing.ratio(variant, STOCK)
        self.measured += 1
        if ratio.low <= 1.0:
            reason = self._doubt(ratio, Reason.TOO_NOISY) or Reason.NO_GAIN
            self._leave_out(unit.changes, reason.format(ratio), unit.named)
            return
        self.taken += unit.edits()
        self.saved[unit.kind] += count * (timing.median(STOCK) - timing.median(variant))

    def _leave_out(
        self, changes: list[ClassChange], reason: SkipReason, named: Sequence[Edit] = ()
    ):
        self.plan.leave_out({id(change.module) for change in changes}, reason, bool(named))

    def _doubt(self, ratio: Interval, reason: Reason) -> Reason | None:
        """The reason, counted, if the interval allows no decision."""
        if not _is_noisy(ratio):
            return None
        self.noisy += 1
        return reason

    def _decide_all(self, seconds: float) -> list[str]:
        variants = {STOCK: self.step, SWAPPED: self._with(self.taken)}
        ratio = self._timed(variants, seconds).ratio(SWAPPED, STOCK)
        self.measured += 1
        if ratio.low <= 1.0:  # what gains alone, from cached data, may lose in a step
            reason = self._doubt(ratio, Reason.TOO_NOISY_IN_ALL) or Reason.NO_GAIN_IN_ALL
            self._leave_out(self.plan.classes, reason.format(ratio), self.plan.named)
            return []
        step = "forward and backward" if self.model.training else "forward"
        (kind, most), where = self.saved.most_common(1)[0], self._device.type.upper()
        mostly = f", most of it {kind}" if most > self.saved.total() / 2 else ""
        precision = self.plan.precision
        at = "" if precision is None else f" at precision={precision!r}"
        gain = f"{ratio} times as fast on this {where}{mostly}"
        return [f"measured on the sample{at}, {step}: {gain}"]


def _is_noisy(ratio: Interval) -> bool:
    """Whether the interval includes 1 and is wide."""
    wide = ratio.high > (1 + WIDE) * ratio.median or ratio.low < (1 - WIDE) * ratio.median
    return wide and ratio.low <= 1.0 <= ratio.high


def repeated(module: nn.Module, calls: Sequence[Call]) -> Callable[[], None]:
    """Calls of a module, in train mode with the backward of each; outputs get a gradient of ones,
    but an output's own loss alone where there is one."""
    ones: dict[tuple, Tensor] = {}

    def like(output: Tensor) -> Tensor:
        key = (output.shape, output.dtype, output.device)
        if key not in ones:
            ones[key] = torch.ones_like(output)
        return ones[key]

    def run() -> None:
        for call in calls:
            args, kwargs = _fresh(call)
            with torch.set_grad_enabled(module.training):
                output = module(*args, **kwargs)
            if not module.training:
                continue
            wanted = [p for p in module.parameters() if p.requires_grad]
            given = {id(leaf): leaf for leaf in _tensors((args, kwargs)) if leaf.requires_grad}
            wanted += given.values()
            outputs = [x for x in _tensors(_plain(output)) if x.requires_grad]
            loss = [x for x in outputs if x.dim() == 0]
            outputs = loss[:1] or outputs
            if wanted and outputs:
                torch.autograd.grad(outputs, wanted, list(map(like, outputs)), allow_unused=True)

    return run


def _fresh(call: Call) -> Call:
    """The call with new leaves, which hold the same memory."""
    return _with_tensors(call, torch.detach)


def _copied(call: Call) -> Call | None:
    """The call with copies of its tensors; None if it holds other objects than plain values."""
    leaves = pytree.tree_leaves(tuple(call))
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return _with_tensors(call, lambda tensor: tensor.detach().clone())


def _with_tensors(call: Call, new: Callable[[Tensor], Tensor]) -> Call:
    """The call with a new leaf for each tensor; a tensor that is there twice stays one, as query,
    key and value of self-attention."""
    leaves: dict[int, Tensor] = {}

    def leaf_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in leaves:
            leaves[id(tensor)] = new(tensor).requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    return Call(*pytree.tree_map_only(Tensor, leaf_of, tuple(call)))


def _signature(call: Call) -> tuple:
    """The facts that two calls must share to take the same time."""
    leaves, spec = pytree.tree_flatten(tuple(call))
    facts = (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    )
    return (*facts, str(spec))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _plain(output: object) -> object:
    return dict(output) if isinstance(output, dict) else output
