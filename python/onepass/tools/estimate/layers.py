"""A step of a model with many equal layers, from steps of the same model with a few of them.

Each storage that a step makes is an event, with the bytes that are alive then. If layers are equal,
a longer model has the events of a shorter one and those of more layers between them, and the bytes
at an event grow by the same amount per layer: for events counted from the start of the step as well
as from its end. Three short models in a row show whether that is so. Events of at least one whole
layer must be among both, so that the events of the layers between lie on the line from one to the
other, and the peak is among those counted from the start or from the end.

Three short models cannot show that a layer is treated in another way because of its number. A run
of the whole model shows it: :class:`Expected` compares each of its events. A layer may be treated
so under some changes alone, such as checkpointing: `estimate.survey` asks for each of them.
"""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor, nn

from onepass.tools.estimate import step
from onepass.tools.estimate.subject import Subject
from onepass.tools.estimate.timeline import Peak

COUNTS = (2, 3, 4, 5)  # layers of the short models: the first three, or the last
LEAST = 12  # layers for which the short models together are less work
Event = tuple[str, dict[str, int]]  # the operator, and the bytes alive by phase


class NotAlike(Exception):
    """The whole model's step does not have the events of the short models' steps, repeated."""


class Series:
    """Short models: the same model with a few of its layers."""

    def __init__(self, subject: Subject):
        """
        Raises:
            NotAlike: the model has no list of so many equal layers, or has several.
        """
        if subject.real:
            raise NotAlike("with data, the whole model must be run")
        self.whole = subject
        model = subject.model(None)
        name, self.count = _list_of_layers(model)
        self._subjects = []
        for count in COUNTS:
            short = subject.model(None)
            del short.get_submodule(name)[count:]
            self._subjects.append(Subject(short, subject.batch, subject.fake))

    def expected(self, options: step.Options) -> Expected:
        """The result that :func:`onepass.tools.estimate.step.run` would have, without optimizers.

        Raises:
            NotAlike: the short models are not alike.
        """
        runs = [self._run(number, options) for number in range(3)]
        try:
            return self._extended(COUNTS[:3], runs)
        except NotAlike:  # with two layers, one may be the first and the last in its ways
            runs = [*runs[1:], self._run(3, options)]
            return self._extended(COUNTS[1:], runs)

    def _run(self, number: int, options: step.Options) -> tuple[step.Step, step.Trace]:
        trace = step.Trace()
        return step.run(self._subjects[number], options, {}, trace), trace

    def _extended(
        self, counts: tuple[int, ...], runs: list[tuple[step.Step, step.Trace]]
    ) -> Expected:
        steps, traces = zip(*runs, strict=True)
        line = _Line(self.count - counts[0])
        kept = line.kept([trace.kept for trace in traces])
        numbers = ("parameter_count", "parameters", "others", "gradients", "saved")
        found = {name: line(*(getattr(s, name) for s in steps)) for name in numbers}
        ends = {
            phase: line.ends([trace.events[phase] for trace in traces])
            for phase in (step.FORWARD, step.BACKWARD)
        }
        kinds = {kind: None for s in steps for kind in s.swapped}
        swapped = {kind: line(*(s.swapped[kind] for s in steps)) for kind in kinds}
        result = replace(
            steps[-1],
            **found,
            **{phase: of_phase.peak for phase, of_phase in ends.items()},
            kept=step.largest_first(kept),
            activations=sum(item.nbytes for item in kept),
            swapped=Counter(swapped),
        )
        return Expected(result, ends)


@dataclass(frozen=True)
class Expected:
    """A step of the whole model, from the short ones."""

    step: step.Step
    ends: dict[str, _Ends]  # by phase

    def agrees(self, found: step.Step, trace: step.Trace) -> bool:
        """Whether a run of the whole model had this result, and these events."""
        return self.step == replace(found, updates={}) and all(
            ends.are_of(trace.events[phase]) for phase, ends in self.ends.items()
        )


@dataclass(frozen=True)
class _Ends:
    """The events of a phase that short models tell, for all layers."""

    start: list[Peak]
    end: list[Peak]  # the last event first
    of_a_layer: int  # events that a layer more brings
    count: int  # of all events

    @property
    def peak(self) -> Peak:
        """The first event with the most bytes."""
        return max(self.start + self.end[::-1], key=lambda peak: peak.total)

    def are_of(self, events: list[Event]) -> bool:
        """Whether they are the ends of these events, and those between lie on lines."""
        if len(events) != self.count:
            return False
        found = [Peak(sum(parts.values()), parts, at) for at, parts in events]
        if found[: len(self.start)] != self.start:
            return False
        if found[::-1][: len(self.end)] != self.end:
            return False
        between = range(len(self.start), len(events) - len(self.end))
        return all(self._on_a_line(events, number) for number in between)

    def _on_a_line(self, events: list[Event], number: int) -> bool:
        """Whether an event lies in the middle of those a layer before and after it."""
        before, after = number - self.of_a_layer, number + self.of_a_layer
        if before < 0 or after >= len(events):
            return False
        (at, parts), (at_before, first), (at_after, last) = (
            events[place] for place in (number, before, after)
        )
        return (
            at == at_before == at_after
            and parts.keys() == first.keys() == last.keys()
            and all(2 * parts[key] == first[key] + last[key] for key in parts)
        )


@dataclass(frozen=True)
class _Line:
    """Fit through three models, each of which has a layer more than the one before."""

    more: int  # layers than the first has

    def __call__(self, first: int, second: int, third: int) -> int:
        """The value for all layers of one that grows by the same amount with each."""
        if second - first != third - second:
            raise NotAlike("a layer more is not always as much")
        return first + self.more * (second - first)

    def kept(self, lists: list[list[step.Kept]]) -> list[step.Kept]:
        if len({tuple((kept.name, kept.type) for kept in found) for found in lists}) > 1:
            raise NotAlike("other modules keep something")
        return [
            replace(
                of_each[0],
                count=self(*(kept.count for kept in of_each)),
                nbytes=self(*(kept.nbytes for kept in of_each)),
            )
            for of_each in zip(*lists, strict=True)
        ]

    def ends(self, events: list[list[Event]]) -> _Ends:
        of_a_layer = len(events[1]) - len(events[0])
        if of_a_layer <= 0 or len(events[2]) - len(events[1]) != of_a_layer:
            raise NotAlike("a layer more is not always as many operators")
        start = self._lines(zip(*events, strict=False))
        end = self._lines(zip(*map(reversed, events), strict=False))
        if len(start) + len(end) < len(events[0]) + of_a_layer:
            raise NotAlike("the first layers are not like the last ones")
        return _Ends(start, end, of_a_layer, len(events[0]) + self.more * of_a_layer)

    def _lines(self, events) -> list[Peak]:
        """The events for all layers, as far as they are alike."""
        found = []
        for (at, first), (at_second, second), (at_third, third) in events:
            if not (at == at_second == at_third and first.keys() == second.keys() == third.keys()):
                break
            try:
                parts = {key: self(first[key], second[key], third[key]) for key in first}
            except NotAlike:
                break
            found.append(Peak(sum(parts.values()), parts, at))
        return found


def _list_of_layers(model: nn.Module) -> tuple[str, int]:
    """The name of the one long list of layers, and their number."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < LEAST:
            continue
        layers = list(module)
        if all(_are_alike(layers[0], layer, number) for number, layer in enumerate(layers)):
            found.append((name, len(layers)))
    if len(found) != 1:
        raise NotAlike(f"{len(found)} lists of equal layers")
    return found[0]


def _are_alike(first: nn.Module, other: nn.Module, distance: int) -> bool:
    """Whether two modules are equal but for the values of their parameters and buffers, and for
    numbers that may say the place in a list: they differ by the distance."""
    if type(first) is not type(other) or first.__dict__.keys() != other.__dict__.keys():
        return False
    if first._modules.keys() != other._modules.keys():
        return False
    for name, mine in first.__dict__.items():
        theirs = other.__dict__[name]
        if name in ("_parameters", "_buffers"):
            if mine.keys() != theirs.keys():
                return False
            if not all(_same_layout(mine[key], theirs[key]) for key in mine):
                return False
        elif name != "_modules" and not _are_equal(mine, theirs, distance):
            return False
    return all(
        child is other._modules[name]
        or child is not None
        and other._modules[name] is not None
        and _are_alike(child, other._modules[name], distance)
        for name, child in first._modules.items()
    )


def _same_layout(first: Tensor | None, other: Tensor | None) -> bool:
    if first is None or other is None:
        return first is other
    return (
        first.shape == other.shape
        and first.stride() == other.stride()
        and first.dtype is other.dtype
        and first.requires_grad == other.requires_grad
    )


def _are_equal(first: object, other: object, distance: int) -> bool:
    if first is other:
        return True
    if type(first) is not type(other) or isinstance(first, Tensor):
        return False
    if type(first) is int:
        return other - first in (0, distance)
    if isinstance(first, types.MethodType):
        return first.__func__ is other.__func__
    try:
        return bool(first == other)
    except (RuntimeError, TypeError, ValueError):  # of arrays
        return False
