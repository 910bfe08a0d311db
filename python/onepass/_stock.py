"""Modules as they are, without running code of the user's: their attributes, and whether a class
still has the method that its library defined.

Programs assign to `nn.Linear.forward` and the like, before or after this package is imported. The
function itself tells: by the module whose globals it uses and the name that its code was compiled
under, of which functools.wraps copies neither.
"""

from __future__ import annotations

import inspect
import sys
import types

from torch import Tensor, nn

# Modules whose classes are known by their forward, which is not proven with numbers. Elsewhere a
# forward may be decorated where it is defined.
_KNOWN = ("torch.nn.", "transformers.pytorch_utils.")


def method(cls: type, name: str = "forward") -> types.FunctionType | None:
    """The method that a class defines; None if that is not the one of its class statement."""
    found = vars(cls).get(name)
    if not isinstance(found, types.FunctionType):
        return None
    code, home = found.__code__, sys.modules.get(cls.__module__)
    compiled = getattr(code, "co_qualname", found.__qualname__)  # Python 3.11
    own = code.co_name == name and compiled == found.__qualname__ == f"{cls.__qualname__}.{name}"
    return found if own and found.__globals__ is getattr(home, "__dict__", None) else None


def original(module: nn.Module) -> type:
    """The class that a module had before `swap`, or has again since `unswap`."""
    return getattr(type(module), "_onepass_original", type(module))


def definer(cls: type, name: str = "forward") -> type:
    """The class that defines a method for cls; of those with the same one, the last."""
    found = inspect.getattr_static(cls, name)
    return next(base for base in reversed(cls.__mro__) if vars(base).get(name) is found)


def replaced(cls: type) -> type | None:
    """The class of torch whose forward a module of cls runs, if that was replaced."""
    cls = definer(cls)
    known = f"{cls.__module__}.".startswith(_KNOWN)
    return cls if known and method(cls) is None else None


def peek(module: nn.Module, name: str) -> object:
    """An attribute of a module, None if it has none; a property, which may be a parametrization,
    is returned as such, and `__getattr__` is not called."""
    own = vars(module)
    for found in (own, own["_parameters"], own["_buffers"], own["_modules"]):
        if name in found:
            return found[name]
    return inspect.getattr_static(type(module), name, None)


def parametrizations(module: nn.Module) -> nn.ModuleDict | None:
    """The parametrizations of a module's tensors, None if it has none."""
    held = module._modules.get("parametrizations")
    return held if isinstance(held, nn.ModuleDict) and len(held) else None


def tensors(module: nn.Module, name: str) -> list[Tensor]:
    """The tensor that an attribute is; for a property, the parameters that it may be computed
    from."""
    value = peek(module, name)
    if isinstance(value, property):
        return [x for x in module.parameters() if x.is_floating_point()]
    return [value] if isinstance(value, Tensor) else []
