"""Whether a call must go through autograd, and a faster `apply`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass import _dispatch_log
from onepass._compiling import constant_where_traced


def is_differentiated(*tensors: Tensor | None) -> bool:
    """True if some input requires a gradient, or inside forward-mode differentiation.

    The raw ops would silently drop tangents; `applied` runs a formula there.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
        # Inside vmap a tensor does not show whether the wrapped one requires a gradient.
        if are_transforms_active():
            return True
    return forward_ad._current_level >= 0


def is_differentiated_again() -> bool:
    """Asked in a backward: whether its results are differentiated, by create_graph=True or in
    forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


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


def count_change(*tensors: Tensor | None) -> None:
    """Tells autograd that an operator has written into tensors."""
    if not torch.compiler.is_compiling():  # a compiler does it by itself
        for x in tensors:
            if x is not None and not x.is_inference():  # inference tensors have no version
                torch.autograd.graph.increment_version(x)


def applied(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` for positional arguments, in half the time in plain eager mode.

    torch's own `apply` binds the arguments to the signature of `forward` on every call, and unwraps
    tensors that outlived a functorch transform. Under a compiler or a transform it runs here too.

    In forward-mode differentiation `function.formula` runs instead: the definition in torch's
    operators, which have all derivatives of all orders. A function without one raises there.
    """
    plain_apply = super(torch.autograd.Function, function).apply

    formula = getattr(function, "formula", None)

    def apply(*arguments):
        if forward_ad._current_level >= 0 and formula is not None:
            _tell(function)
            results = formula(*arguments)
            if results is not NotImplemented:
                return results
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*arguments)
        return plain_apply(*arguments)

    return apply


def _tell(function: type[torch.autograd.Function]) -> None:
    if not torch.compiler.is_compiling() and _dispatch_log.is_recording():
        _dispatch_log.record_fallback(
            op=function.__name__.lstrip("_"),
            arguments="forward-mode differentiation",
            kernel="the definition in torch's operators",
            threads=torch.get_num_threads(),
            reason="kernels compute no tangents",
        )
