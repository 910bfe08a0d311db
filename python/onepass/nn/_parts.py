"""Whether a part of a module may be computed without being called."""

from __future__ import annotations

from types import MethodType

from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook as all_modules_have_hooks


def runs_its_class(part: Module) -> bool:
    """Whether calling a module runs the forward of its class and nothing else.

    Every forward that computes a part without calling it asks this at each call.
    """
    return is_untouched(part) and not all_modules_have_hooks()


def is_untouched(part: Module) -> bool:
    """The same but for hooks on every module, which come and go: neither hooks of its own, nor a
    forward or call of the instance's own."""
    cls = type(part)
    return (
        not (part._forward_hooks or part._forward_pre_hooks)
        and not (part._backward_hooks or part._backward_pre_hooks)
        and is_method(part.forward, cls.forward)
        and cls.__call__ is Module.__call__
        and part._compiled_call_impl is None
    )


def has_hooks(part: Module) -> bool:
    """Whether a module has hooks of its own, of the forward or the backward."""
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )


def is_method(attribute: object, function: object) -> bool:
    """Whether an attribute is the method of its class, not set on the object. It is read as torch
    reads it, so that compiled graphs get the same guards."""
    return isinstance(attribute, MethodType) and attribute.__func__ is function


def forward_of(part: Module):
    """The forward of a module's class, or of the class that `swap` has replaced."""
    cls = type(part)
    return vars(cls).get("_onepass_original", cls).forward
