"""Classes of modules that are expensive to import, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def is_a(value: object, module: str, name: str) -> bool:
    """isinstance(value, module.name), without importing the module: a class of a module that is not
    imported has no instances."""
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name, ()))


def is_dtensor(value: object) -> bool:
    return is_a(value, "torch.distributed.tensor", "DTensor")


def is_fake(value: object) -> bool:
    return is_a(value, "torch._subclasses.fake_tensor", "FakeTensor")


def are_dtensors(values: Iterable) -> list[bool]:
    """Whether each value is a DTensor, in a third of the time of `is_a`."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return [isinstance(value, kind) for value in values]


def is_async(value: object) -> bool:
    """Whether it is the result of a collective that may not have ended."""
    return is_a(value, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")
