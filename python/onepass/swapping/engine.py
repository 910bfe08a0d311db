"""`swap`, `unswap`, `swapped`: the walk over a model, the options, and all or nothing."""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from onepass.swapping import classes, matchers
from onepass.swapping import probe as probing
from onepass.swapping.classes import ForeignNormForward, NormSpec, is_swapped, make_class
from onepass.swapping.report import Change, Report, grouped

_RANDOM_STREAMS = (
    "dropout was swapped: its random stream is reproducible from manual_seed and not equal to "
    "stock's; an unseeded shuffle drawn from the same generator moves too"
)
_ATTENTION_STREAMS = (
    "attention was swapped: where it drops weights, its random stream is reproducible from "
    "manual_seed and not equal to stock's"
)
_NEED_WEIGHTS = (
    "{names}: calls with need_weights=True, torch's default, ask for the matrix of weights: torch "
    "computes them as before and nothing is gained; pass need_weights=False"
)
_ENCODER_LAYERS = (
    "{names}: in inference too they run the modules in them, where torch computes a layer in one "
    "call; of the nested tensors that nn.TransformerEncoder makes of a padding mask they compute "
    "the rows as one packed batch, and padding comes back as zeros, as in stock"
)
_ATTENTION_CALLS = (
    "calls of F.scaled_dot_product_attention with nested or distributed tensors, a CausalBias, or "
    f"a head_dim above {classes.MOST_HEAD_DIM} run torch's"
)
_REDIRECTION = (
    "in forwards whose calls of F.scaled_dot_product_attention are redirected, each torch function "
    "and each look at a tensor's shape takes about a microsecond longer: with few tokens, as in "
    "decoding, they may be slower than stock"
)
_REGISTRY = (
    "to run transformers' models on onepass's attention: import onepass.integrations.transformers; "
    "onepass.integrations.transformers.attach(model)"
)
_ATTACHED = (
    "{names}: on onepass's attention by transformers' registry; unswap leaves that, "
    "onepass.integrations.transformers.detach(model) undoes it"
)
_STILL_ATTACHED = "on onepass's attention all the same: attached, which is not swap's to undo"
_PROBED = (
    "norms of other classes were accepted by a numeric probe on the CPU; in dtype combinations "
    "that it did not prove (float64 for most) they run their own forward"
)
_FAST_PATH = (
    "{names}: in eval mode without gradients torch's fast path computes these layers in one call "
    "and reads their parameters only: the swapped modules run in training, and whenever the fast "
    "path is off; nested tensors, which it makes of a padding mask, run the stock forward"
)
_SHARDED = "is sharded (FSDP); swap before sharding"


_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Found(NamedTuple):
    """A module of the model, with every name it goes by."""

    module: nn.Module
    names: list[str]
    wrapped: list[str]  # why a module on the way to it, or itself, must not be touched


class _Plan(NamedTuple):
    kind: str
    name: str
    module: nn.Module
    cls: type[nn.Module]


def swap(
    model: nn.Module,
    *,
    kinds: Sequence[str] = matchers.KINDS,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    dry_run: bool = False,
    strict: bool = False,
    probe: bool = True,
) -> Report:
    """Makes a model run on onepass's operators, in place.

    Modules change their class and nothing else: parameters, hooks, state_dict keys, tied and shared
    modules, training flags stay the same objects. Swap before `torch.compile`, before
    `fully_shard`, before or after `DistributedDataParallel`. A file that `torch.save` writes of the
    whole model needs onepass to be loaded; a state_dict does not. Calling it again changes nothing
    that is swapped already.

    Attention is torch's own modules, and modules whose forward calls
    `F.scaled_dot_product_attention`, as their code says: that function is redirected while such a
    forward runs, in its thread, and nowhere else.

    Args:
        model: any module; it may itself be a norm.
        kinds: which families to swap, of "norm", "attention" and "dropout".
        include, exclude: globs on fully qualified names ("*.mlp.*"); exclude wins. A module shared
            under several names is included by any and excluded by any of them.
        filter_fn: asked last, `filter_fn(module, name)`; False keeps the module as it is.
        dry_run: report what would be done, change nothing.
        strict: raise if a candidate is refused, or if an explicitly passed kind matches no module.
        probe: prove norms of unknown classes numerically and swap those that pass. False skips
            them all.

    Returns:
        Report: not the model.

    Raises:
        TypeError: model is not a module.
        ValueError: kinds holds an unknown name.
        RuntimeError: under strict; the message names each refused module. If anything raises, the
            model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model must be a torch.nn.Module, got {type(model).__name__}")
    explicit = kinds is not matchers.KINDS
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        if kind not in matchers.KINDS:
            raise ValueError(f"swap: kinds must be of {matchers.KINDS}, got {kind!r}")
    include = _patterns("include", include)
    exclude = _patterns("exclude", exclude)

    report = Report(model, dry_run=dry_run)
    plans: list[_Plan] = []
    refused: list[dict[str, str]] = []
    verdicts: dict[tuple, NormSpec | str] = {}
    kept: dict[int, str] = {}  # names of modules whose calls must not be redirected, by id
    found = _walk(model)
    for module, names, wrapped in found:
        cls = type(module)
        if is_swapped(cls):
            kind = cls._onepass_kind
            if kind in kinds:
                original = cls._onepass_original
                report.swapped.append(_swapped_entry(names[0], kind, original, cls))
                report._changes.append(Change(module, original, cls, new=False))
            continue
        found_match = matchers.match(module, kinds)
        if found_match is None:
            continue
        if found_match.attached:
            kept[id(module)] = names[0]
            reason = _filtered(module, names, include, exclude, filter_fn)
            if reason:
                entry = {"name": names[0], "type": _full_name(cls)}
                report.skipped.append({**entry, "reason": f"{reason}; {_STILL_ATTACHED}"})
            else:
                report.swapped.append(_entry(names[0], found_match.kind, cls, matchers.ATTACHED))
            continue
        entry = {"name": names[0], "type": _full_name(cls), "reason": found_match.reason}
        if found_match.unknown:
            report.unknown.append(entry)
            continue
        if found_match.forward is classes.AttentionCalls or found_match.reason == matchers.REGISTRY:
            kept[id(module)] = names[0]
        reason = _filtered(module, names, include, exclude, filter_fn)
        if reason:
            report.skipped.append({**entry, "reason": reason})
            continue
        target, reason = _target(module, found_match, wrapped, probe, verdicts)
        if target is None:
            refused.append({**entry, "reason": reason})
            report.skipped.append(refused[-1])
            continue
        kept.pop(id(module), None)
        plans.append(_Plan(found_match.kind, names[0], module, target))

    for plan, reason in _around_kept(plans, kept):
        plans.remove(plan)
        entry = {"name": plan.name, "type": _full_name(type(plan.module)), "reason": reason}
        refused.append(entry)
        report.skipped.append(entry)
    report.swapped += [
        _swapped_entry(plan.name, plan.kind, type(plan.module), plan.cls) for plan in plans
    ]
    if strict:
        _check_strict(kinds if explicit else (), report, refused)
    report.notes = _notes(model, found, report, plans, include, exclude)
    if not dry_run:
        _apply([(plan.module, plan.cls) for plan in plans])
        report._changes += [
            Change(plan.module, plan.cls._onepass_original, plan.cls, new=True) for plan in plans
        ]
    return report


def unswap(model: nn.Module) -> list[str]:
    """Gives every swapped module of a model its original class back.

    Returns:
        The fully qualified names of the modules that changed.

    Raises:
        TypeError: model is not a module.
        RuntimeError: the model was sharded or parametrized after the swap: its modules have other
            classes by now. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unswap: model must be a torch.nn.Module, got {type(model).__name__}")
    found = [item for item in _walk(model) if isinstance(item.module, classes.Swapped)]
    _restore(found)
    return [item.names[0] for item in found]


@contextlib.contextmanager
def swapped(model: nn.Module, **options) -> Iterator[Report]:
    """`with swapped(model) as report:` swaps for the block, and restores whatever ends it.

    Takes :func:`swap`'s options. Modules that were swapped before stay so.
    """
    report = swap(model, **options)
    try:
        yield report
    finally:
        modules = [change.module for change in report._changes if change.new]
        found = {id(item.module): item for item in _walk(model)}
        _restore(
            [
                found.get(id(module)) or _Found(module, ["(removed)"], [])
                for module in modules
                if isinstance(module, classes.Swapped)
            ]
        )


def _restore(found: list[_Found]) -> None:
    for module, names, wrapped in found:
        if _SHARDED in wrapped:
            got = "which is sharded"
        elif not is_swapped(type(module)):
            got = f"whose class became {type(module).__name__} after the swap"
        else:
            continue
        raise RuntimeError(
            f"unswap: model must have the classes that swap gave it, got {names[0]!r}, {got}"
        )
    _apply([(item.module, type(item.module)._onepass_original) for item in found])


def _apply(changes: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Sets every class, or, if one cannot be set, none."""
    done = []
    try:
        for module, cls in changes:
            before = type(module)
            module.__class__ = cls
            done.append((module, before))
    except BaseException:
        for module, before in reversed(done):
            object.__setattr__(module, "__class__", before)
        raise


def _walk(model: nn.Module) -> list[_Found]:
    """Every module once, in the order of `named_modules`."""
    found: dict[int, _Found] = {}

    def visit(module: nn.Module, name: str, wrapped: list[str], path: frozenset[int]) -> None:
        reason = _wrapper(module)
        if reason:
            wrapped = [*wrapped, reason]
        item = found.setdefault(id(module), _Found(module, [], []))
        item.names.append(name)
        item.wrapped.extend(wrapped)
        path = path | {id(module)}
        for child_name, child in module._modules.items():
            if child is not None and id(child) not in path:
                visit(child, f"{name}.{child_name}" if name else child_name, wrapped, path)

    visit(model, "", [], frozenset())
    return list(found.values())


def _wrapper(module: nn.Module) -> str:
    """Why this module and all below it must keep their classes; empty if there is no reason.

    The modules that define the wrappers are looked up among those imported already: they are
    expensive to import, and a model cannot hold what nobody imported.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
        return _SHARDED
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "is inside a compiled module; swap before torch.compile"
    if module._compiled_call_impl is not None:
        return "is compiled by module.compile(); swap before that"
    return ""


def _filtered(module, names, include, exclude, filter_fn) -> str:
    """Which option keeps this candidate as it is; empty if none does."""
    if include is not None and not any(_matches(include, name) for name in names):
        return "not in include"
    for pattern in exclude or ():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return f"excluded by {pattern!r}"
    if filter_fn is not None and not filter_fn(module, names[0]):
        return "filter_fn returned False"
    return ""


def _target(
    module: nn.Module,
    match: matchers.Match,
    wrapped: list[str],
    probe: bool,
    verdicts: dict[tuple, NormSpec | str],
) -> tuple[type[nn.Module] | None, str]:
    """(the class to swap to, ""), or (None, the reason for refusing); fills the verdicts."""
    if wrapped:
        return None, wrapped[0]
    if match.reason:
        return None, match.reason
    forward, spec = match.forward, None
    if match.structure is not None:
        if not probe:
            return None, "not proven: probe is off"
        key = probing.configuration(module, match.structure)
        if key not in verdicts:
            verdicts[key] = probing.probe(module, match.structure)
        forward, spec = ForeignNormForward, verdicts[key]
        if isinstance(spec, str):
            return None, spec
    try:
        return make_class(type(module), forward, spec), ""
    except TypeError as error:
        return None, f"its class cannot be subclassed: {error}"


def _around_kept(plans: list[_Plan], kept: dict[int, str]) -> list[tuple[_Plan, str]]:
    """Plans to redirect calls that would redirect those of a module that must keep its own too."""
    refused = []
    for plan in reversed(plans):  # children first
        if not issubclass(plan.cls, classes.AttentionCalls):
            continue
        inner = [kept[id(module)] for module in plan.module.modules() if id(module) in kept]
        if inner:
            kept[id(plan.module)] = plan.name
            refused.append((plan, f"holds {inner[0]!r}, which keeps its attention as it is"))
    return refused[::-1]


def _check_strict(kinds, report: Report, refused: list[dict[str, str]]) -> None:
    if refused:
        got = "; ".join(
            f"{entry['name']!r} ({entry['type'].rpartition('.')[2]}): {entry['reason']}"
            for entry in refused
        )
        raise RuntimeError(f"swap: model must hold no refused candidate under strict, got {got}")
    matched = {entry["kind"] for entry in report.swapped}
    for kind in kinds:
        if kind not in matched:
            raise RuntimeError(
                f"swap: kinds must each match a module under strict, got no match for {kind!r}"
            )


def _notes(model, found, report, plans, include, exclude) -> list[str]:
    notes = []
    if report._changes:
        notes.append(f"{len(report._changes)} of the swapped modules had been swapped before")
    if any(entry["reason"] == _wrapper(model) for entry in report.skipped):
        notes.append(f"nothing in this model can be swapped: its root {_wrapper(model)}")
    if any(plan.kind == "dropout" for plan in plans):
        notes.append(_RANDOM_STREAMS)
    notes += _attention_notes(found, plans)
    if any(entry["reason"] == matchers.REGISTRY for entry in report.skipped):
        notes.append(_REGISTRY)
    attached = [entry["name"] for entry in report.swapped if entry["to"] == matchers.ATTACHED]
    if attached:
        notes.append(_ATTACHED.format(names=", ".join(grouped(attached))))
    if any(issubclass(plan.cls, ForeignNormForward) for plan in plans):
        notes.append(_PROBED)
    names = [name for item in found for name in item.names]
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns or ():
            if not fnmatch.filter(names, pattern):
                notes.append(f"{option} pattern {pattern!r} matches no module")
    kinds = {plan.kind for plan in plans} if torch.cuda.is_available() else set()
    if kinds - {"attention"} and not matchers.has_kernels("cuda"):
        notes.append("this build has kernels for the CPU only: unswap before moving to a GPU")
    if "attention" in kinds and not matchers.has_kernels("cuda", "attention"):
        notes.append("this build has attention for the CPU only: on a GPU torch's runs as before")
    return notes


def _attention_notes(found: list[_Found], plans: list[_Plan]) -> list[str]:
    names = {id(item.module): item.names[0] for item in found}
    forwards = {id(plan.module): plan.cls for plan in plans}

    def swapped_to(forward: type, modules) -> list[str]:
        return [
            names[id(module)]
            for module in modules
            if issubclass(forwards.get(id(module), object), forward)
        ]

    def note(text: str, modules: list[str]) -> list[str]:
        return [text.format(names=", ".join(grouped(modules)))] if modules else []

    modules = [item.module for item in found]
    layers = [module for module in modules if isinstance(module, _LAYERS)]
    in_layers = {id(part) for layer in layers for part in layer.children()}
    alone = [module for module in modules if id(module) not in in_layers]
    calling = swapped_to(classes.AttentionCalls, modules)
    dropping = [m for m in modules if isinstance(m, nn.MultiheadAttention) and m.dropout > 0.0]
    bypassed = [
        names[id(layer)]
        for layer in layers
        if type(layer).forward is nn.TransformerEncoderLayer.forward
        and id(layer) not in forwards
        and any(id(part) in forwards for part in layer.modules())
    ]
    notes = []
    if calling or swapped_to(classes.MultiheadAttentionForward, dropping):
        notes.append(_ATTENTION_STREAMS)
    notes += note(_NEED_WEIGHTS, swapped_to(classes.MultiheadAttentionForward, alone))
    notes += note(_ENCODER_LAYERS, swapped_to(classes.EncoderLayerForward, modules))
    notes += note(_ATTENTION_CALLS, calling) + note(_REDIRECTION, calling)
    return notes + note(_FAST_PATH, bypassed)


def _patterns(option: str, patterns) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"swap: {option} must hold globs, got {pattern!r}")
    return patterns


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _swapped_entry(name: str, kind: str, original: type, target: type) -> dict[str, str]:
    return _entry(name, kind, original, _to(target))


def _entry(name: str, kind: str, original: type, to: str) -> dict[str, str]:
    return {"name": name, "from": _full_name(original), "to": to, "kind": kind}


def _to(cls: type[classes.Swapped]) -> str:
    if issubclass(cls, ForeignNormForward):
        return f"onepass {cls._onepass_spec}"
    return cls._onepass_to


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
