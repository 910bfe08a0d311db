"""Whether a call must go through autograd, and a faster `apply`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass._compiling import constant_where_traced


def is_differentiated(*tensors: Tensor | None) -> bool:
    """True if some input requires a gradient, or inside forward-mode differentiation.

    The raw ops would silently drop tangents; the autograd.Functions have no forward mode and
    raise.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
        # Inside vmap a tensor does not show whether the wrapped one requires a gradient.
        if are_transforms_active():
            return True
    return forward_ad._current_level >= 0


def are_transforms_active() -> bool:
    """Whether a transform of torch.func is active; a compiled one is active while it is traced."""
    if torch.compiler.is_compiling():
        return _as_traced()
    return torch._C._are_functorch_transforms_active()


@constant_where_traced
def _as_traced() -> bool:
    return torch._C._are_functorch_transforms_active()


def constant(number: float) -> float:
    """Makes a float constant: a symbolic one of Dynamo's cannot enter a second
    autograd.Function."""
    return float.fromhex(float(number).hex())


def applied(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` for positional arguments, in half the time in plain eager mode.

    torch's own binds the arguments to the signature of `forward` on every call, and unwraps tensors
    that outlived a functorch transform. Under a compiler or a transform torch's own runs here too.
    """
    plain_apply = super(torch.autograd.Function, function).apply

    def apply(*arguments):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*arguments)
        return plain_apply(*arguments)

    return apply
