"""How a batch is given to a model: the one rule of `verify`, `explain`, `estimate`, `compare` and
`profile-swap`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping

from torch import nn


def arguments(model: nn.Module, batch: object) -> tuple[tuple, dict[str, object]]:
    """The arguments of model's forward, by position and by keyword, that a batch stands for.

    A mapping is given as keywords, a tuple or list item by item, anything else alone. Where forward
    cannot take that and requires a single argument, this is the batch as it is.
    """
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
    elif isinstance(batch, (tuple, list)):
        args, kwargs = tuple(batch), {}
    else:
        return (batch,), {}
    forward = model.forward
    is_method = hasattr(forward, "__func__")  # else an attribute, whose owner a cache would keep
    decide = _takes_it_whole if is_method else _takes_it_whole.__wrapped__
    if decide(forward.__func__ if is_method else forward, is_method, len(args), tuple(kwargs)):
        return (batch,), {}
    return args, kwargs


@functools.lru_cache(maxsize=256)  # a signature takes 10 us and more
def _takes_it_whole(
    function: Callable, is_method: bool, count: int, names: tuple[str, ...]
) -> bool:
    """Whether one argument can be given, but not as many by position and these keywords."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a compiled or scripted function
        return False
    given, one = (None,) * (is_method + count), (None,) * (is_method + 1)
    return not binds(signature, given, dict.fromkeys(names)) and binds(signature, one, {})


@contextlib.contextmanager
def named_in_errors(op: str, model: nn.Module, args: tuple, kwargs: Mapping) -> Iterator[None]:
    """Names `op`, and what forward takes, in the error of a call in the block with arguments that
    forward does not take."""
    try:
        yield
    except TypeError as error:
        if takes(model, args, dict(kwargs)):
            raise
        taken = ", ".join(inspect.signature(model.forward).parameters)
        given = ", ".join([type(x).__name__ for x in args] + [f"{name}=" for name in kwargs])
        raise TypeError(
            f"{op}: batch must be what forward takes, ({taken}), got ({given})"
        ) from error


def call(model: nn.Module, batch: object) -> object:
    """The model's output for a batch."""
    args, kwargs = arguments(model, batch)
    return model(*args, **kwargs)


def described(model: nn.Module, batch: object) -> str:
    """Description of what forward takes, and of the batch."""
    if isinstance(batch, Mapping):
        found = f"a dict of {', '.join(map(str, batch))}" if batch else "an empty dict"
    elif isinstance(batch, (tuple, list)):
        found = f"a {type(batch).__name__} of {len(batch)}"
    else:
        found = type(batch).__name__
    try:
        names = ", ".join(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return f"the batch is {found}"
    return f"forward takes ({names}), the batch is {found}"


def takes(model: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether forward can be called so, as far as its signature tells."""
    try:
        return binds(inspect.signature(model.forward), args, kwargs)
    except (TypeError, ValueError):
        return True


def binds(signature: inspect.Signature, args: tuple, kwargs: dict) -> bool:
    """Whether a function can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
