"""The plan of a swap, module by module, before anything is done."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from onepass._policy import small_calls
from onepass._policy.precision import ATTRIBUTE, precision_of, quantizes
from onepass.swapping import (
    activated,
    adaptive,
    by_name,
    changes,
    classes,
    gated,
    matchers,
    quantized,
    rotary,
    rotary_proof,
    scans,
)
from onepass.swapping import probe as probing
from onepass.swapping.changes import ABSENT, Change, Edit
from onepass.swapping.classes import ForeignNormForward, is_swapped, make_class
from onepass.swapping.providers import LAZY_LOGITS, SCANS_PROOF, provider
from onepass.swapping.reasons import Reason, SkipReason
from onepass.swapping.report import Report
from onepass.swapping.restored import without
from onepass.swapping.specs import (
    ActivatedSpec,
    AdaptiveSpec,
    Call,
    GatedSpec,
    HeadSpec,
    NormSpec,
    RotarySpec,
    ScanSpec,
    Structure,
)
from onepass.swapping.walk import Choice, Found, walk

Verdict = NormSpec | ActivatedSpec | AdaptiveSpec | GatedSpec | RotarySpec | ScanSpec
# By configuration: the judged object, kept alive as long as the configuration refers to it.
Verdicts = dict[tuple, tuple[object, Verdict | SkipReason]]
_SHARED: contextvars.ContextVar[Verdicts | None] = contextvars.ContextVar("verdicts", default=None)
_STILL_ATTACHED = "; on onepass's attention all the same, as an earlier call left it"
_NOT_BY_FORCE = "; force does not change that"
_WITH_PRODUCTS = ("attention", "linear")
_LINEAR = (nn.Linear, nn.MultiheadAttention)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Reasons that refuse nothing, with their kinds.
NO_GAIN_HERE = {Reason.GROUP_NORM: "norm", Reason.SCAN_ELSEWHERE: "scan"}
_READ_DIRECTLY = torch.nn.modules.linear.NonDynamicallyQuantizableLinear  # by MultiheadAttention


@contextlib.contextmanager
def verdicts_shared() -> Iterator[None]:
    """Plans made inside prove each configuration once. For copies of a model that are swapped again
    and again: the modules that were judged stay alive until the end."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


class ClassChange(NamedTuple):
    name: str
    module: nn.Module
    cls: type[nn.Module]


class LeftOut(NamedTuple):
    """Changes that a measurement took out of a plan together, JSON-able."""

    names: list[str]  # of modules
    kinds: list[str]
    by_name: bool  # attention by name is among them
    reason: str  # name of a `Reason`
    text: str


class Plan:
    """Walks the model as it is made; nothing is changed.

    Attributes:
        report: its lists are full, its notes are not.
        kinds: those that were asked for.
        found: every module of the model.
        classes: the classes to be set.
        named: the edits that give modules onepass's attention by name.
        left_out: what `leave_out` took out.
        kinds_left_out: the same by (module, kind, reason).
        refused: entries of candidates that cannot be swapped, for `strict`.
        forced: names of modules that are swapped only because the user vouched for them.
        unproven: (name of a swapped module, why a function that it calls is not replaced).
        as_fast: the reasons of linear layers that would not gain.
        list_as_fast: whether the report lists these as skipped.
        lazy_logits: whether heads of models of transformers shall return lazy logits.
        precision: that which the swapped modules' products of float32 get; None: torch's setting,
            or what an earlier swap gave them.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: tuple[str, ...],
        choice: Choice,
        probe: bool,
        dry_run: bool,
        list_as_fast: bool,
        lazy_logits: bool,
        into_compiled: bool = False,
        precision: str | None = None,
        precisions: Mapping[str, str | None] | None = None,
    ):
        """Makes the plan.

        Args:
            precisions: of a choice, by name where they differ from `precision`; both then replace
                what an earlier swap gave, also where they are None.
        """
        self.report = Report(model, dry_run=dry_run)
        self.found = walk(model, into_compiled)
        self._items = {id(item.module): item for item in self.found}
        self.classes: list[ClassChange] = []
        self.named: list[Edit] = []
        self.left_out: list[LeftOut] = []
        self.kinds_left_out: list[tuple[nn.Module, str, SkipReason]] = []
        self.refused: list[dict[str, str]] = []
        self.forced: list[str] = []
        self.unproven: list[tuple[str, SkipReason]] = []
        self.as_fast: list[SkipReason] = []
        self.list_as_fast = list_as_fast
        self.kinds, self._choice, self._probe = kinds, choice, probe
        self.lazy_logits, self.precision = lazy_logits, precision
        shared = _SHARED.get()
        self._verdicts: Verdicts = {} if shared is None else shared
        # Names of modules whose calls stay, by id, for each kind that is redirected.
        self._kept: dict[str, dict[int, str]] = {kind: {} for kind in matchers.KINDS}
        self._wanted: list[tuple[Found, bool]] = []  # by name; whether forced
        self._unwanted: list[Found] = []  # by name
        self._listed: set[tuple[int, str]] = set()  # (id, kind) of modules in any list
        self._unknown: list[tuple[Found, str, SkipReason]] = []
        self._computed: set[int] = set()  # ids of norms that the forward of another one computes
        for item in self.found:
            self._consider(item)
        self._take_by_name(model)
        self._leave_around_kept()
        self.report.swapped += [
            _entry(change.name, kind, type(change.module), to)
            for change in self.classes
            for kind, to in change.cls._onepass_to.items()
        ]
        self.report.swapped += [
            _entry(item.names[0], "attention", type(item.module), by_name.TO)
            for item, _ in self._wanted
        ]
        self._list_unknown()
        self._repeats = precisions is not None
        # A measurement that takes changes out does not move the first and the last layer.
        self._differing = precisions if self._repeats else dict.fromkeys(self._ends(), "highest")

    @property
    def names_of_named(self) -> list[str]:
        """Names of the modules that get attention by name."""
        return [item.names[0] for item, _ in self._wanted]

    def edits(self) -> list[Edit]:
        return quantized.edits_of(self.classes) + self.named + self.edits_of_precision()

    def edits_of_precision(self) -> list[Edit]:
        """Lists the edits of the precision of swapped modules with products, earlier ones too."""
        return [
            Edit(item.module, ATTRIBUTE, ABSENT if precision is None else precision)
            for item, precision in self.precisions_given()
        ]

    def precisions_given(self) -> list[tuple[Found, str | None]]:
        """The swapped modules that have products of matrices, with the precision that they get; but
        for earlier ones that the options keep as they are."""
        if self.precision is None and not self._repeats:
            return []
        earlier = {name for name, _ in self.report._earlier}
        return [
            (item, self._differing.get(name, self.precision))
            for item in self._with_products()
            if not ((name := item.names[0]) in earlier and self._choice.refusal(item))
        ]

    def precisions(self) -> dict[str, str | None]:
        """The precision that each swapped module with products has after the swap, by name."""
        given = {id(item.module): precision for item, precision in self.precisions_given()}
        return {
            item.names[0]: given.get(id(item.module), precision_of(item.module))
            for item in self._with_products()
        }

    def _with_products(self) -> list[Found]:
        names = {entry["name"] for entry in self.report.swapped if entry["kind"] in _WITH_PRODUCTS}
        return [item for item in self.found if item.names[0] in names]

    def _ends(self) -> list[str]:
        """The names of linear layers that stay in float32 under "int8", unless the options include
        them by name: the first and the last of the model, and those that share an embedding's
        weight."""
        if not quantizes(self.precision) or self._choice.include is not None:
            return []
        swapped = {entry["name"] for entry in self.report.swapped if entry["kind"] == "linear"}
        linear = [
            item
            for item in self.found
            if item.names[0] in swapped
            or (isinstance(item.module, _LINEAR) and not isinstance(item.module, _READ_DIRECTLY))
        ]
        # A module that calls F.linear comes before the layers in it, and runs them in any order.
        known = {id(item.module) for item in linear}
        alone = [
            item
            for item in linear
            if known.isdisjoint(id(m) for m in item.module.modules() if m is not item.module)
        ]
        embedded = {
            id(item.module.weight) for item in self.found if isinstance(item.module, _EMBEDDINGS)
        }
        tied = [
            item
            for item in linear
            if embedded & {id(weight) for weight in small_calls.linear_weights(item.module)}
        ]
        return [
            item.names[0]
            for item in (*alone[:1], *alone[-1:], *tied)
            if small_calls.has_float32_weights(item.module)
        ]

    def leave_out(
        self, modules: set[int], reason: SkipReason, by_name: bool, only: str | None = None
    ) -> None:
        """Takes the changes of these modules, by id, out of the plan, and if asked all attention
        by name; they are listed as skipped.

        Args:
            only: this kind of the modules' changes; None: all.
        """
        gone = {
            (change.name, kind): self._items[id(change.module)]
            for change in self.classes
            if id(change.module) in modules
            for kind in change.cls._onepass_to
            if only in (None, kind)
        }
        self.classes = [
            left
            for change in self.classes
            if (left := _without(change, only) if id(change.module) in modules else change)
        ]
        if by_name:
            gone |= {(item.names[0], "attention"): item for item, _ in self._wanted}
            self.report._named = [e for e in self.report._named if e not in self.named]
            self.named, self._wanted = [], []
        if not gone:
            return
        self.report.swapped = [
            entry
            for entry in self.report.swapped
            if (row := (entry["name"], entry["kind"])) not in gone or row in self.report._earlier
        ]
        for (_, kind), item in gone.items():
            entry = self._skip(item, reason.kind.with_text(f"{kind}: {reason}"))
            self.kinds_left_out.append((item.module, kind, entry["reason"]))
        names, kinds = (list(dict.fromkeys(column)) for column in zip(*gone, strict=True))
        self.left_out.append(LeftOut(names, kinds, by_name, reason.kind.name, str(reason)))

    def _consider(self, item: Found) -> None:
        module, cls = item.module, type(item.module)
        if is_swapped(cls):
            before = [kind for kind in cls._onepass_to if kind in self.kinds]
            for kind in before:
                self._list_earlier(item, kind, cls._onepass_original, cls._onepass_to[kind])
            if self.lazy_logits and "loss_function" in getattr(cls, "_onepass_spec", ()):
                if "loss" in before and not classes.redirects(cls, "loss_head"):
                    self._refuse(item, Reason.LOGITS_BEFORE.format())
            if isinstance(spec := getattr(cls, "_onepass_spec", None), ActivatedSpec):
                self._computed |= {id(module._modules.get(name)) for name in spec.norms}
            if before:
                change = Change(module, cls._onepass_original, cls)
                self.report._changes.append(change)
        refusal = functools.cache(functools.partial(self._choice.refusal, item))
        for match in matchers.matches(module, self.kinds, self.precision):
            self._consider_match(item, match, refusal)
            if self._is_replaced(module):
                return

    def _is_replaced(self, module: nn.Module) -> bool:
        """Whether it gets another forward."""
        change = self.classes[-1] if self.classes else None
        return (
            change is not None
            and change.module is module
            and not issubclass(change.cls, classes.Calls)
        )

    def _consider_match(
        self, item: Found, match: matchers.Match, refusal: Callable[[], SkipReason | None]
    ) -> None:
        module = item.module
        if isinstance(match.structure, gated.Parts):
            verdict = self._block(module, match.structure)
            if isinstance(verdict, str):  # its parts have fitting sizes, but it is no block
                if matchers.is_called_mlp(module):
                    self._unknown.append((item, match.kind, verdict))
                return
        activates = match.forward is classes.GroupNormForward
        if id(module) in self._computed and (match.forward is None or activates):
            return
        self._listed.add((id(module), match.kind))
        forced = match.forceable and self._choice.forces(item)
        if match.unknown and not forced:
            self._unknown.append((item, match.kind, match.reason))
            return
        as_fast = match.reason is not None and match.reason.kind is Reason.AS_FAST
        calls = match.named or match.kind in matchers.BESIDE or match.forward is classes.Calls
        calls = calls and match.kind not in matchers.COPIED
        if calls and not as_fast:
            self._kept[match.kind][id(module)] = item.names[0]
        if as_fast:
            self.as_fast.append(match.reason)
            if not self.list_as_fast:
                return
        reason = refusal()
        if as_fast:
            self._skip(item, reason or match.reason)
            return
        if match.named:
            self._consider_named(item, match.kind, reason)
            return
        if match.reason is not None and match.reason.kind in NO_GAIN_HERE:
            reason = reason or match.reason  # nothing is refused
        if reason:
            self._skip(item, reason)
            return
        target, reason = self._target(item, match)
        if target is None:
            self._refuse(item, reason)
            return
        if calls:
            del self._kept[match.kind][id(module)]
        if self.classes and self.classes[-1].module is module:
            self.classes.pop()  # the new one redirects its calls too
        self.classes.append(ClassChange(item.names[0], module, target))
        if isinstance(match.structure, adaptive.Adaptive):
            self._computed.add(id(module.norm))
        if isinstance(match.structure, activated.Activated):
            norms = target._onepass_spec.norms
            self._computed |= {id(module._modules[name]) for name in norms}

    def _consider_named(self, item: Found, kind: str, reason: SkipReason | None) -> None:
        if by_name.is_attached(item.module):
            del self._kept[kind][id(item.module)]
            if reason:
                self._skip(item, reason + _STILL_ATTACHED)
            else:
                self._list_earlier(item, kind, type(item.module), by_name.TO)
        elif reason:
            self._skip(item, reason)
            self._unwanted.append(item)
        else:
            self._wanted.append((item, self._choice.forces(item)))

    def _target(
        self, item: Found, match: matchers.Match
    ) -> tuple[type[nn.Module] | None, SkipReason | None]:
        """(the class to swap to, None), or (None, the reason for refusing); records verdicts."""
        module, forced = item.module, self._choice.forces(item)
        if item.wrapped:
            return None, item.wrapped[0]
        reason, spec, forward = match.reason, None, match.forward
        vouched = False  # it is swapped by force alone
        if forward is classes.Calls:
            before = self.classes[-1] if self.classes else None
            before = before.cls._onepass_spec if before and before.module is module else ()
            spec = _sorted(*before, *(match.calls or (match.kind,)))
            if self.lazy_logits and "loss_function" in match.calls and not reason:
                spec = _sorted(*spec, *self._head(module))
        if reason and forced and match.forceable:
            reason, vouched = matchers.obstacle_to(module, match.kind), True
        if reason:
            return None, reason + _NOT_BY_FORCE * forced
        if isinstance(match.structure, gated.Parts):
            spec = self._block(module, match.structure)
        elif isinstance(match.structure, (rotary.Functions, scans.Functions)):
            verdicts = self._functions(match.structure)
            proven = [verdict for verdict in verdicts if not isinstance(verdict, SkipReason)]
            refused = [verdict for verdict in verdicts if isinstance(verdict, SkipReason)]
            if all(scans.computes_nothing(spec) for spec in proven):
                return None, refused[0] + _NOT_BY_FORCE * forced
            self.unproven += [(item.names[0], reason) for reason in refused]
            spec = _sorted(*before, *proven)
        elif isinstance(match.structure, activated.Activated):
            spec = self._activated(module, match.structure)
        elif isinstance(match.structure, adaptive.Adaptive):
            spec = self._adaptive(module, match.structure.form)
        elif match.structure is not None:
            spec = self._verdict(module, match.structure, forced=False)
            if isinstance(spec, SkipReason) and forced:
                spec, vouched = self._verdict(module, match.structure, forced=True), True
            forward = ForeignNormForward
        if isinstance(spec, SkipReason):
            return None, spec + _NOT_BY_FORCE * forced
        try:
            target = make_class(type(module), forward, spec)
        except TypeError as error:
            return None, Reason.NO_SUBCLASS.format(error)
        if why := changes.refusal(module, target):
            return None, Reason.REFUSES.format(why)
        if vouched:
            self.forced.append(item.names[0])
        return target, None

    def _head(self, model: nn.Module) -> list[HeadSpec]:
        """The head of a model of transformers, if its logits can be lazy; other heads are
        listed."""
        lazy_logits = provider(LAZY_LOGITS)
        name = lazy_logits.head_name(model)
        if name is None:
            self._refuse(self._items[id(model)], Reason.NOT_A_CHILD.format())
            return []
        head = model._modules[name]
        item = self._items[id(head)]
        if reason := self._choice.refusal(item):
            self._skip(item, reason)
            return []
        reason = item.wrapped[0] if item.wrapped else lazy_logits.obstacle(head)
        if reason:
            self._refuse(item, reason)
        return [] if reason else [HeadSpec(name)]

    def _verdict(self, module, structure: Structure, forced: bool) -> NormSpec | SkipReason:
        if not self._probe and not forced:
            return Reason.PROBE_OFF.format()
        key = (forced, *probing.configuration(module, structure))
        return self._judged(
            key, module, Reason.PROBE, lambda: probing.probe(module, structure, forced=forced)
        )

    def _adaptive(self, module: nn.Module, form: str) -> AdaptiveSpec | SkipReason:
        if not self._probe:
            return Reason.PROBE_OFF.format()
        key = adaptive.configuration(module, form)
        return self._judged(key, module, Reason.PROBE, lambda: adaptive.prove(module, form))

    def _activated(
        self, module: nn.Module, found: activated.Activated
    ) -> ActivatedSpec | SkipReason:
        """Without the norms that the options keep."""
        kept = {}
        for name in found.norms:
            item = self._items[id(module._modules[name])]
            reason = item.wrapped[0] if item.wrapped else self._choice.refusal(item)
            if reason and reason.kind is not Reason.NOT_INCLUDED:  # the module itself is
                kept[name] = reason
        found = found._replace(norms=tuple(name for name in found.norms if name not in kept))
        if not found.norms:
            return next(iter(kept.values()))
        if found.form == "Sequential":
            return ActivatedSpec(*found)
        if not self._probe:
            return Reason.PROBE_OFF.format()
        key = activated.configuration(module, found)
        return self._judged(key, module, Reason.PROBE, lambda: activated.prove(module, found))

    def _block(self, module: nn.Module, parts: gated.Parts) -> GatedSpec | SkipReason:
        if not self._probe:
            return Reason.PROBE_OFF.format()
        key = gated.configuration(module, parts)
        return self._judged(key, module, Reason.BLOCK, lambda: gated.prove(module, parts))

    def _functions(
        self, found: rotary.Functions | scans.Functions
    ) -> list[RotarySpec | ScanSpec | SkipReason]:
        """The verdicts on the functions that a module calls."""
        if not self._probe:
            return [Reason.PROBE_OFF.format()]
        if isinstance(found, rotary.Functions):
            reason, more, prove = Reason.ROTARY, found.sizes, rotary_proof.prove
        else:
            reason, more, prove = Reason.SCAN, found.beside, provider(SCANS_PROOF).prove
        return [
            self._judged(
                (called.name, id(called.function), more),
                called,
                reason,
                functools.partial(prove, called, more),
            )
            for called in found.called
        ]

    def _judged(
        self, key: tuple, judged: object, reason: Reason, prove: Callable[[], Verdict | str]
    ) -> Verdict | SkipReason:
        """The verdict on a configuration, proven once; a text is the reason of a refusal."""
        if key not in self._verdicts:
            found = prove()
            verdict = reason.with_text(found) if isinstance(found, str) else found
            self._verdicts[key] = judged, verdict
        return self._verdicts[key][1]

    def _take_by_name(self, model: nn.Module) -> None:
        reasons, self.named, forced = by_name.plan_swap(model, self._wanted, self._unwanted)
        self.report._named += self.named
        for item, asked in self._wanted:
            if id(item.module) in reasons:
                reason = Reason.BY_NAME.with_text(reasons[id(item.module)])
                self._refuse(item, reason + _NOT_BY_FORCE * asked)
                continue
            del self._kept["attention"][id(item.module)]
            if id(item.module) in forced:
                self.forced.append(item.names[0])
        self._wanted = [pair for pair in self._wanted if id(pair[0].module) not in reasons]

    def _leave_around_kept(self) -> None:
        """Refuses to redirect calls if that would also redirect those of a module that must keep
        its."""
        for kind, kept in self._kept.items():
            around = {}
            for change in self.classes[::-1]:  # children first
                if classes.redirects(change.cls, kind):
                    parts = map(id, change.module.modules())
                    inner = next((kept[part] for part in parts if part in kept), None)
                    if inner is not None:
                        around[id(change.module)] = inner
                        kept[id(change.module)] = change.name
            for item in self.found:
                if id(item.module) in around:
                    inner = around[id(item.module)]
                    self._refuse(item, Reason.HOLDS_KEPT.format(inner, kind))
            self.classes = [
                left
                for change in self.classes
                if (left := _without(change, kind) if id(change.module) in around else change)
            ]

    def _list_unknown(self) -> None:
        """Lists unknown modules, except those that hold a listed module of their kind."""
        for item, kind, reason in self._unknown:
            parts = (part for part in item.module.modules() if part is not item.module)
            if not any((id(part), kind) in self._listed for part in parts):
                self.report.unknown.append(_refusal(item, reason))

    def _list_earlier(self, item: Found, kind: str, original: type, to: str) -> None:
        self._listed.add((id(item.module), kind))
        self.report._earlier.add((item.names[0], kind))
        self.report.swapped.append(_entry(item.names[0], kind, original, to))

    def _skip(self, item: Found, reason: SkipReason) -> dict[str, str]:
        entry = _refusal(item, reason)
        if entry not in self.report.skipped[-1:]:  # one entry for both kinds of its calls
            self.report.skipped.append(entry)
        return entry

    def _refuse(self, item: Found, reason: SkipReason) -> None:
        self.refused.append(self._skip(item, reason))


def _without(change: ClassChange, kind: str | None) -> ClassChange | None:
    """The change without the calls of a kind, None: of all; None if it redirects no others."""
    cls = type(change.module) if kind is None else without(change.cls, kind)
    return change._replace(cls=cls) if is_swapped(cls) else None


def _sorted(*calls: Call) -> tuple[Call, ...]:
    """A spec of `classes.Calls`."""
    return tuple(sorted({*calls}, key=str))


def _entry(name: str, kind: str, original: type, to: str) -> dict[str, str]:
    return {"name": name, "from": _full_name(original), "to": to, "kind": kind}


def _refusal(item: Found, reason: SkipReason) -> dict[str, str]:
    return {"name": item.names[0], "type": _full_name(type(item.module)), "reason": reason}


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
