"""Calls of our functions that function modes and tensor classes see, as they see torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

Given = ParamSpec("Given")
Result = TypeVar("Result")


def visibly(function: Callable[Given, Result], *args: Given.args, **named: Given.kwargs) -> Result:
    """function(*args, **named), which modes that profile or count see as a call of this function;
    a compiler traces through them."""
    if not torch.compiler.is_compiling() and has_torch_function(args):
        return handle_torch_function(function, args, *args, **named)
    return function(*args, **named)
