"""The modules of a model, by all their names, and the choice by the options."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from onepass.swapping.reasons import Reason, SkipReason

COMPILERS = (Reason.IN_COMPILED, Reason.COMPILED)


class Found(NamedTuple):
    """A module of the model, with all its names."""

    module: nn.Module
    names: list[str]
    wrapped: list[SkipReason]  # why it, or a module around it, must not be changed


def walk(model: nn.Module, into_compiled: bool = False) -> list[Found]:
    """Every module once, in the order of `named_modules`.

    Args:
        into_compiled: what torch.compile compiled counts as not wrapped.
    """
    found: dict[int, Found] = {}

    def visit(
        module: nn.Module, name: str, wrapped: list[SkipReason], path: frozenset[int]
    ) -> None:
        reason = wrapper(module)
        if reason and not (into_compiled and reason.kind in COMPILERS):
            wrapped = [*wrapped, reason]
        item = found.setdefault(id(module), Found(module, [], []))
        item.names.append(name)
        item.wrapped.extend(wrapped)
        path = path | {id(module)}
        for child_name, child in module._modules.items():
            if child is not None and id(child) not in path:
                visit(child, f"{name}.{child_name}" if name else child_name, wrapped, path)

    visit(model, "", [], frozenset())
    return list(found.values())


def wrapper(module: nn.Module) -> SkipReason | None:
    """Why this module and all below it must keep their classes; None if there is no reason.

    The Python modules that define the wrappers are looked up among the imported ones: they are
    expensive to import, and a model cannot hold classes that were not imported.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
        return Reason.SHARDED.format()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return Reason.IN_COMPILED.format()
    if module._compiled_call_impl is not None:
        return Reason.COMPILED.format()
    return None


class Choice(NamedTuple):
    """The options of a swap that choose modules; globs are on fully qualified names."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    force: tuple[str, ...] | None
    filter_fn: Callable[[nn.Module, str], bool] | None

    def refusal(self, item: Found) -> SkipReason | None:
        """The option that keeps this candidate unchanged; None if there is none."""
        if self.include is not None and not _any_matches(self.include, item.names):
            return Reason.NOT_INCLUDED.format()
        for pattern in self.exclude or ():
            if _any_matches((pattern,), item.names):
                return Reason.EXCLUDED.format(pattern)
        if self.filter_fn is not None and not self.filter_fn(item.module, item.names[0]):
            return Reason.FILTERED.format()
        return None

    def forces(self, item: Found) -> bool:
        return _any_matches(self.force or (), item.names)

    def without_a_match(self, found: list[Found]) -> list[str]:
        """Sentences on globs that match no module."""
        names = [name for item in found for name in item.names]
        return [
            f"{option} pattern {pattern!r} matches no module"
            for option in ("include", "exclude", "force")
            for pattern in getattr(self, option) or ()
            if not fnmatch.filter(names, pattern)
        ]


def globs(
    option: str, patterns: str | Sequence[str] | None, op: str = "swap"
) -> tuple[str, ...] | None:
    """An option's globs as a tuple: `strings`."""
    return None if patterns is None else strings(option, "globs", patterns, op)


def strings(
    option: str, what: str, given: str | Sequence[str], op: str = "swap"
) -> tuple[str, ...]:
    """An option's strings as a tuple.

    Raises:
        TypeError: it is neither a string nor a sequence of strings.
    """
    given = (given,) if isinstance(given, str) else given
    if not isinstance(given, Iterable):
        raise TypeError(f"{op}: {option} must hold {what}, got {type(given).__name__}")
    given = tuple(given)
    for item in given:
        if not isinstance(item, str):
            raise TypeError(f"{op}: {option} must hold {what}, got {item!r}")
    return given


def _any_matches(patterns: Sequence[str], names: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)
