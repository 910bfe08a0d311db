"""Hooks on tensors: whose they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

_ON_EACH_OUTPUT = ("torch.distributed.", "torch.utils.module_tracker")


def is_on_each_output(hook: Callable) -> bool:
    """Whether torch sets this hook on every output of a module."""
    return _module_of(hook).startswith(_ON_EACH_OUTPUT)


def _module_of(hook: Callable) -> str:
    """The module of a hook, also if torch has wrapped it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if getattr(hook, "__module__", None) == "torch.autograd.graph":  # register_multi_grad_hook
        hook = inspect.getclosurevars(hook).nonlocals.get("fn", hook)
    return getattr(hook, "__module__", None) or ""
