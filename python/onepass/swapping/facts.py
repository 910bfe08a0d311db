"""Facts that a proof reads of a module, by which a fused forward knows that it still holds."""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

from onepass.nn._parts import runs_its_class
from onepass.swapping import callsites
from onepass.swapping.specs import Held

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def held(module: nn.Module, *children: str, besides: str = "") -> tuple[Held, ...]:
    """The facts that a proof reads of a module and of some children.

    Args:
        besides: an attribute that the fused forward reads itself at each call.
    """
    found = []
    for name, part in (("", module), *((name, module._modules[name]) for name in children)):
        read = callsites.attributes_read(part) - {*MODULE_ATTRIBUTES, besides}
        attributes = tuple((key, fingerprint(vars(part)[key])) for key in sorted(read))
        if name or attributes:
            found.append(Held(name, type(part) if name else None, attributes))
    return tuple(found)


def is_as_proven(module: nn.Module, held: tuple[Held, ...]) -> bool:
    """Whether a module and its children are still those of the proof, so that a fused forward may
    do without calling them; asked at each call."""
    for name, cls, attributes in held:
        part = module
        if name:
            part = module._modules.get(name)
            if type(part) is not cls or not runs_its_class(part):
                return False
        for key, known in attributes:
            value = getattr(part, key, held)
            if value is not known and fingerprint(value) != known:
                return False
    return True


def fingerprint(value):
    """Fingerprint of an attribute; hashable, and equal for copies of it. An object of
    another package is told by its class alone."""
    if isinstance(value, functools.partial):
        return fingerprint(value.func), fingerprint(value.args), fingerprint(value.keywords)
    if isinstance(value, types.MethodType):
        return value.__func__
    if isinstance(value, (list, set, frozenset, dict)):
        return type(value), repr(value) if is_value(value) else len(value)
    functions = (types.FunctionType, types.BuiltinFunctionType, type)
    return value if isinstance(value, functions) or is_value(value) else type(value)


def is_value(value) -> bool:
    """Whether a value is told by its text: a number, a string, a list of such."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_value, value))
    if isinstance(value, dict):
        return all(map(is_value, value)) and all(map(is_value, value.values()))
    return value is None or isinstance(
        value, (bool, int, float, str, bytes, torch.dtype, torch.device)
    )
