"""The classes that modules get back: without one kind of their swap, or after `unswap`."""

from __future__ import annotations

from torch import nn

from onepass.swapping.classes import Calls, call_name, make_class

# In the `__dict__` of a module whose loss `attach` made ours: "attach", or "both" if an earlier
# `swap` had done it.
ATTACHED = "_onepass_loss_by"


def without(cls: type, kind: str) -> type:
    """A swapped class without its part of a kind; the original if it has no other."""
    if kind not in cls._onepass_to:
        return cls
    calls = cls._onepass_spec if issubclass(cls, Calls) else ()
    calls = tuple(call for call in calls if call_name(call).partition("_")[0] != kind)
    return make_class(cls._onepass_original, Calls, calls) if calls else cls._onepass_original


def keeps_its_class(module: nn.Module) -> bool:
    """Whether `unswap` has nothing to undo in a swapped module: its loss alone, which is
    attached."""
    return ATTACHED in vars(module) and set(module._onepass_to) == {"loss"}


def unswapped(module: nn.Module) -> type:
    """The class that `unswap` gives a swapped module: its original's, but with an attached loss."""
    cls = type(module)
    if ATTACHED in vars(module):
        for kind in tuple(cls._onepass_to):
            cls = cls if kind == "loss" else without(cls, kind)
        return cls
    return cls._onepass_original
