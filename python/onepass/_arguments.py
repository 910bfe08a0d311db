"""Arguments of a wrong type, checked only after a call has failed: correct calls pay nothing."""

from __future__ import annotations

import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_NAMES = {
    Tensor: "a tensor",
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}
_ACCEPTED = {
    float: (numbers.Real, torch.SymInt, torch.SymFloat),
    int: (numbers.Integral, torch.SymInt),
}


def check_arguments(function: Callable, given: Mapping[str, object]) -> None:
    """Checks the types of a failed call's arguments: `function`'s parameters among `given`.

    Does nothing if the error being handled is onepass's own, which is more exact.

    Raises:
        TypeError: one is not of the type that its annotation names: the error that torch's own
            functions begin with.
        RuntimeError: one is a nested tensor, which has no sizes to check.
    """
    op = function.__name__
    # For None the operators would know neither the expected type nor the argument's name.
    if re.match(r"\w+: \w+ must (?!be given, got none$)", str(sys.exc_info()[1])):
        return
    for name, hint in typing.get_type_hints(function).items():
        if name not in given or name == "return":
            continue
        kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
        if not any(_fits(given[name], kind) for kind in kinds):
            *others, last = map(_name, kinds)
            rule = f"{', '.join(others)} or {last}" if others else last
            raise TypeError(
                f"{op}: {name} must be {rule}, got {type(given[name]).__name__}"
            ) from None
        if isinstance(given[name], Tensor) and given[name].is_nested:
            raise RuntimeError(f"{op}: {name} must not be nested, got a nested tensor") from None


def refuse_gradient(op: str, name: str) -> None:
    """Refuses an argument that requires a gradient and would get none.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{op}: {name} must not require a gradient, got one that does")


def refuse_activation(op: str, activation: int) -> None:
    """Refuses an activation within an operator whose backward has none.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{op}: activation_kind must be 0 where a gradient is wanted, got {activation}"
    )


def refuse_second_derivative(op: str, option: str) -> None:
    """Refuses a second derivative of a call whose option overwrites the needed values.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{op}: {option} must be False with create_graph=True, got True")


def refuse_inplace(op: str, where: str) -> None:
    """Refuses a call that may not write into its arguments.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{op}: inplace must be False {where}, got True")


def switches(variable: str, known: Sequence[str]) -> list[str]:
    """The words of an environment variable, separated by commas.

    Raises:
        ValueError: one is none of the known.
    """
    words = [word for word in os.environ.get(variable, "").split(",") if word]
    for word in words:
        if word not in known:
            names = ", ".join(map(repr, known))
            raise ValueError(f"{variable} must be {names} or empty, got {word!r}")
    return words


def require_writable(op: str, name: str, tensor: Tensor) -> None:
    """The checks that torch's operators make before they write into a tensor that requires a
    gradient. An autograd.Function makes them only after the write.

    Raises:
        RuntimeError: it is a leaf, a view of one, or a view that may not be modified.
    """
    require_result(op, name, tensor)
    autograd = torch._C._autograd
    if tensor._is_view() and autograd._get_creation_meta(tensor) != autograd.CreationMeta.DEFAULT:
        got = "a view that torch lets nobody modify, such as one of several by chunk or unbind"
        _refuse_write(op, name, got)


def require_result(op: str, name: str, tensor: Tensor) -> None:
    """The check before a write, now or in the backward, into a tensor that requires a gradient.

    Raises:
        RuntimeError: it is a leaf, or a view of one.
    """
    if tensor.is_leaf:
        _refuse_write(op, name, "a leaf")
    if tensor._is_view() and tensor._base.is_leaf and tensor._base.requires_grad:
        _refuse_write(op, name, "a view of a leaf")


def _refuse_write(op: str, name: str, got: str) -> None:
    raise RuntimeError(
        f"{op}: {name} must be the result of an operator to be written in place where a gradient "
        f"is required, got {got}"
    )


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value: object, kind: object) -> bool:
    if kind is object:
        return True
    of = typing.get_args(kind)
    if of:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        return is_sequence and all(_fits(item, of[0]) for item in value)
    return isinstance(value, _ACCEPTED.get(kind, kind))


def _name(kind: object) -> str:
    of = typing.get_args(kind)
    if of:
        return f"a sequence of {_name(of[0]).partition(' ')[2]}s"
    return _NAMES.get(kind) or f"a {kind.__module__}.{kind.__name__}"
