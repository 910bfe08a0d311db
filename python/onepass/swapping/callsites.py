"""Whether a module's own forward calls `F.scaled_dot_product_attention`, `F.linear` or
`F.cross_entropy`, by its code.

Nothing is run. Every name in the forward is looked up where Python would find it: in its globals,
on the module and its class, in its closure and defaults. Functions found there are read the same
way, a few calls deep, so that helpers, decorators, aliases and processor objects are followed.
Submodules are not followed: each is examined separately.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

_ATTENTION = "scaled_dot_product_attention"
_CHECKPOINTS = {"checkpoint", "checkpoint_sequential", "_gradient_checkpointing_func"}
_CHECKPOINT_FUNCTIONS = (
    torch.utils.checkpoint.checkpoint,
    torch.utils.checkpoint.checkpoint_sequential,
)
# By kind, functions recognised by their value only, since submodules may have these names.
_FUNCTIONS = {"linear": (F.linear,), "loss": (F.cross_entropy, nn.CrossEntropyLoss)}
_FORWARDS = {"linear": nn.Linear.forward, "loss": nn.CrossEntropyLoss.forward}  # by super()
_NAMES = {function.__name__ for functions in _FUNCTIONS.values() for function in functions}
_SOFTMAX = F.softmax, torch.softmax, torch.Tensor.softmax, nn.Softmax
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # transformers'
_EXPERTS = "experts_interface"  # of transformers, too
_LOSSES = "LOSS_MAPPING"  # of transformers' loss_function
_DISPATCH = ("diffusers.models.attention_dispatch", "dispatch_attention_fn")
_KEEPING = {"SWAP", "ROT_TWO", "POP_TOP", "EXTENDED_ARG", "CACHE"}  # the value before them
_WRAPPERS = (
    "torch.",
    *(f"onepass.{part}." for part in ("functional", "integrations", "nn", "swapping", "_ops")),
)
_DEPTH = 4  # of calls within calls
_MOST_FUNCTIONS = 200


class Calls(NamedTuple):
    """The calls that a forward reaches."""

    attention: bool = False
    linear: bool = False
    loss: bool = False
    checkpoint: bool = False
    registry: bool = False
    dispatch: bool = False  # of diffusers
    experts: bool = False  # by a name in transformers' config
    losses: bool = False  # by a name of transformers
    by_hand: bool = False  # softmax and products of matrices, in code that Python can follow


def calls_of(module: nn.Module) -> Calls:
    """The calls that the forward of this module reaches, without its submodules."""
    forward = inspect.getattr_static(type(module), "forward")
    found: set[str] = set()
    read: list[types.CodeType] = []
    pending = [(function, module, _DEPTH) for function in _functions(forward)]
    seen = {id(function) for function, _, _ in pending}
    while pending and len(seen) < _MOST_FUNCTIONS:
        function, owner, depth = pending.pop()
        found |= _reads(function)
        read.append(function.__code__)
        for name, values in _named(function, owner):
            found |= _classified(function, name, values)
            for value in values:
                callee, its_owner = _callee(value, owner)
                for inner in _functions(callee):
                    if depth and id(inner) not in seen:
                        seen.add(id(inner))
                        pending.append((inner, its_owner, depth - 1))
    if "softmax" in found and "registry" not in found:  # instructions take long to read
        found |= {"by_hand"} if sum(map(_products, read)) > 1 else set()
    return Calls(*(name in found for name in Calls._fields))


def attributes_read(module: nn.Module) -> set[str]:
    """The instance's own attributes that its forward may read: their names are in its code, or in
    that of methods that it names. All of them if some code cannot be seen."""
    own, names = vars(module).keys(), set()
    pending = [inspect.getattr_static(type(module), "forward")]
    while pending:
        function = _undecorated(pending.pop())
        function = getattr(function, "__func__", getattr(function, "fget", function))
        code = getattr(function, "__code__", None)
        if code is None:
            return set(own)
        new = names_of(code) - names
        names |= new
        pending += [value for name in new for value in _methods(module, name)]
        if hasattr(function, "__wrapped__"):
            pending.append(function.__wrapped__)
    return names & own


def _methods(module: nn.Module, name: str) -> list:
    """The definitions of a method or property, also those that are overridden."""
    found = (vars(cls).get(name) for cls in type(module).__mro__ if cls not in (nn.Module, object))
    kinds = (types.FunctionType, staticmethod, classmethod, property)
    return [value for value in found if isinstance(value, kinds)]


def _classified(function: types.FunctionType, name: str, values: list) -> set[str]:
    """The field of `Calls` for a name in a function: by its value; or, as an attribute of an object
    that is unknown here (F, or the result of a call), by the name.
    """
    values = [_undecorated(value) for value in values if value is not function]
    if any(value is F.scaled_dot_product_attention for value in values):
        return {"attention"}
    if name == _ATTENTION and not values:
        return {"attention"}
    if (name in ("softmax", "Softmax") and not values) or any(
        _is_softmax(value) for value in values
    ):
        return {"softmax"}
    for kind, functions in _FUNCTIONS.items():
        of_module = function.__globals__.get(name)  # may be a submodule's name: see _reads
        functions = [f for f in (*functions, _FORWARDS[kind]) if f is not of_module]
        if any(value is f for value in values for f in functions):
            return {kind}
    if name in _CHECKPOINTS or any(value is f for value in values for f in _CHECKPOINT_FUNCTIONS):
        return {"checkpoint"}
    functions = [value for value in values if isinstance(value, types.FunctionType)]
    if any((value.__module__, value.__name__) == _DISPATCH for value in functions):
        return {"dispatch"}
    if name == _EXPERTS:
        return {"experts"}
    if name == _LOSSES:
        return {"losses"}
    return {"registry"} if name == _REGISTRY else set()


def _is_softmax(value: object) -> bool:
    return isinstance(value, nn.Softmax) or any(value is softmax for softmax in _SOFTMAX)


def _products(code: types.CodeType) -> int:
    """The number of places at which code multiplies matrices."""
    count = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "BINARY_MATRIX_MULTIPLY":
            count += 1
        elif instruction.opname == "BINARY_OP":
            count += instruction.argrepr.startswith("@")
        elif instruction.argval in _PRODUCTS and instruction.opname.startswith("LOAD"):
            count += 1
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return count + sum(map(_products, inner))


def _reads(function: types.FunctionType) -> set[str]:
    """The kinds of `_FUNCTIONS` that some expression in the code evaluates to, under any module
    alias."""
    names, variables = names_of(function.__code__), function.__globals__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    local = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    known = (*map(variables.get, names), *local.values())
    wanted = {f: kind for kind, functions in _FUNCTIONS.items() for f in functions}
    if not names & _NAMES and not any(value is f for value in known for f in wanted):
        return set()  # its instructions take 50 times longer to read
    values = list(_values(function.__code__, variables, local))
    return {kind for f, kind in wanted.items() if any(value is f for value in values)}


def _values(code: types.CodeType, variables: dict, local: dict) -> Iterator[object]:
    """The objects that the code reads: globals, imports, and attributes of modules among these.

    Instructions are read in order; an unknown one ends an expression.
    """
    value = package = None
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = variables.get(name)
        elif op.startswith("LOAD_FAST") or op == "LOAD_DEREF":
            value = local.get(name)
        elif op in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
        elif op == "LOAD_CONST":
            value = name
        elif op == "IMPORT_NAME":  # after its names: None for `import a.b`, which gives a
            value = package = sys.modules.get(name if value else name.partition(".")[0])
        elif op.startswith("STORE_FAST") or op == "STORE_DEREF":
            local[name], value = value, package  # of which more may be imported
        elif op not in _KEEPING:
            value = None
        yield value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _values(constant, variables, dict(local))


def _is_filled(cell: types.CellType) -> bool:
    return cell != types.CellType()  # not assigned yet


def _named(function: types.FunctionType, owner) -> Iterator[tuple[str, list]]:
    """Every name in a function's code, with its possible values."""
    code = function.__code__
    variables = function.__globals__
    names = names_of(code)
    bases = type(owner).__mro__
    inherited = "super" in names or any(variables.get(n) is cls for n in names for cls in bases)
    for name in names:
        values = [variables[name]] if name in variables else []
        yield name, values + _attributes(owner, name, inherited)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        if _is_filled(cell):
            yield name, [cell.cell_contents]
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", [value]


def names_of(code: types.CodeType) -> set[str]:
    """Globals and attributes that code uses, including code of functions defined in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


def _attributes(owner, name: str, inherited: bool) -> list:
    """The possible values of `owner.name`, including overridden definitions of base classes."""
    attributes = getattr(owner, "__dict__", {})
    values = [attributes[name]] if name in attributes else []
    if name in attributes.get("_modules", ()):
        values.append(attributes["_modules"][name])
    for cls in type(owner).__mro__:
        if name in vars(cls) and cls not in (nn.Module, object):
            values.append(vars(cls)[name])
            if not inherited:
                break
    return values


def _callee(value, owner) -> tuple[object, object]:
    """(function that runs when value is called, owner of its attributes); (None, None) for a
    module."""
    value = _undecorated(value)
    if isinstance(value, (nn.Module, types.ModuleType, type)):
        return None, None
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
        return value, owner
    return inspect.getattr_static(type(value), "__call__", None), value  # a processor object


def _undecorated(value):
    while isinstance(value, (functools.partial, functools.partialmethod)):
        value = value.func
    return value


def _functions(value) -> Iterator[types.FunctionType]:
    """The function in a descriptor and those it wraps, except torch's, and onepass's that call the
    function that they replace."""
    value = _undecorated(value)
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    while isinstance(value, types.FunctionType):
        if not f"{value.__module__}.".startswith(_WRAPPERS):
            yield value
        value = getattr(value, "__wrapped__", None)
