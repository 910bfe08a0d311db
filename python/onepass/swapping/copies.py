"""Copies of a forward that call ours in place of functions of its file.

Models of transformers call functions that stand in their own file, such as `apply_rotary_pos_emb`
or `causal_conv1d_fn`. They are globals of a forward, so a swapped class gets a copy of the forward
whose code reads such a global by another name, which is bound to our function in the same module.
Nothing else uses that name: the module's own functions, other instances and other threads run as
before.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import nn

from onepass.swapping import callsites

Found = TypeVar("Found")
Spec = TypeVar("Spec")


def called(module: nn.Module, recognise: Callable[[str, object], Found | None]) -> list[Found]:
    """The results of `recognise`, of a name and its value, for the functions that the forward of a
    module calls by a global name; without None."""
    inner = innermost(module)
    return [] if inner is None else list(_called(inner, recognise))


def is_decorated(module: nn.Module, recognise: Callable[[str, object], object | None]) -> bool:
    """Whether the forward that calls such functions cannot be replaced by a copy."""
    reached = innermost(module)
    inner = None if reached is None else inspect.unwrap(reached)
    if inner is reached or not isinstance(inner, types.FunctionType):
        return False
    return any(True for _ in _called(inner, recognise))


def innermost(module: nn.Module) -> types.FunctionType | None:
    """The function that the decorators of a module's forward hold, as far as they can be copied."""
    *_, inner = _levels(inspect.getattr_static(type(module), "forward"))
    return inner if isinstance(inner, types.FunctionType) else None


def _called(
    forward: types.FunctionType, recognise: Callable[[str, object], Found | None]
) -> Iterator[Found]:
    variables = forward.__globals__
    for name in sorted(callsites.names_of(forward.__code__)):
        found = recognise(name, variables[name]) if name in variables else None
        if found is not None and _reads_alone(forward.__code__, name):
            yield found


def _levels(forward) -> Iterator:
    """A forward, and repeatedly the function in its closure, as with decorators."""
    yield forward
    while any(cell is not None for cell in _cells(forward)):
        forward = forward.__wrapped__
        yield forward


def _cells(function) -> list[types.CellType | None]:
    """The cells of its closure that hold the wrapped function, None in place of others."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType) or not isinstance(inner, types.FunctionType):
        return []
    return [
        cell if cell != types.CellType() and cell.cell_contents is inner else None
        for cell in function.__closure__ or ()
    ]


def _reads_alone(code: types.CodeType, name: str) -> bool:
    """Whether a name is only used to read a global."""
    used = all(
        instruction.opname == "LOAD_GLOBAL"
        for instruction in dis.get_instructions(code)
        if instruction.argval == name and instruction.opname != "LOAD_CONST"
    )
    inner = (value for value in code.co_consts if isinstance(value, types.CodeType))
    return used and all(_reads_alone(value, name) for value in inner)


def redirected(
    forward: types.FunctionType,
    specs: Sequence[Spec],
    computing: Callable[[Callable, Spec], Callable],
) -> types.FunctionType:
    """A copy of a forward that calls ours in place of proven functions.

    Args:
        specs: the proven functions; `spec.name` is the global that holds one.
        computing: makes ours of a proven function and its spec.
    """
    cells = _cells(forward)
    closure = forward.__closure__
    if any(cells):
        inner = types.CellType(redirected(forward.__wrapped__, specs, computing))
        closure = tuple(
            inner if found else cell for found, cell in zip(cells, closure, strict=True)
        )
    variables, names = forward.__globals__, {}
    for spec in specs:
        # A pickle may come from another version of a package.
        if not any(cells) and spec.name in variables:
            names[spec.name] = f"_onepass_{spec.name}_{zlib.crc32(repr(spec).encode()):08x}"
            ours = computing(variables[spec.name], spec)
            variables[names[spec.name]] = _while_unchanged(variables, spec.name, ours)
    copy = types.FunctionType(
        _renamed(forward.__code__, names),
        variables,
        forward.__name__,
        forward.__defaults__,
        closure,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(copy, forward)


def _renamed(code: types.CodeType, names: dict[str, str]) -> types.CodeType:
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _renamed(value, names) if isinstance(value, types.CodeType) else value
            for value in code.co_consts
        ),
    )


def _while_unchanged(variables: dict, name: str, ours: Callable) -> Callable:
    """`ours` for a global, until a program assigns another function to that name."""
    proven = variables[name]

    @functools.wraps(ours)
    def call(*args, **named):
        function = variables[name]
        return (ours if function is proven else function)(*args, **named)

    return call
