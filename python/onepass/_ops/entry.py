"""Wrappers of every family's entry: the log, the rule of DTensors, and the generator's state, which
a refused call must not change."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from onepass._dispatch_log import logged
from onepass._imported import is_dtensor
from onepass._random import Given, Result, restores_rng_on_error

_PLAIN = (Tensor, torch.nn.Parameter)

run_on_dtensors: Callable | None = None  # of `onepass._dtensor`, which registers it


def _parameters(function: Callable) -> tuple[list[str], dict[str, object]]:
    """Names of those that may be given by position; the defaults of all, `Parameter.empty` where
    there is none."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name: p.default for p in parameters}


def entry(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps a family's entry, whose first argument is a tensor."""
    return logged(_placed(function))


def drawing_entry(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps a family's entry that draws seeds."""
    return entry(restores_rng_on_error(function))


def _placed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A call whose first argument is a DTensor runs on each process's part."""

    function.parameters = _parameters(function)  # here: the compiler would trace the signature

    @functools.wraps(function)
    def call(first: Tensor, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if type(first) not in _PLAIN and is_dtensor(first):
            return run_on_dtensors(function, first, *args, **kwargs)
        return function(first, *args, **kwargs)

    return call
