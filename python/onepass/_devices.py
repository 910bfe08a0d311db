"""Checks of a call's devices, for calls in which the operator that would check them does not run.

If any tensor is on "meta", torch calls the fake, whatever the devices of the others. The checks are
here and not in csrc/ops, because the kernel, which compares devices, is never reached.
"""

from __future__ import annotations

from torch import Tensor


def require_one_device(op: str, **given) -> None:
    """Refuses a tensor on "meta" beside one that has data: the fake's result on the device of the
    other would be uninitialized memory.

    Fake tensors, and others that dispatch by themselves, are skipped: their mode compares devices.

    Args:
        op: the operator.
        **given: its tensors and lists of tensors by name; other values are skipped.

    Raises:
        RuntimeError: one is on "meta", another is not.
    """
    named = _tensors_of(given)
    without_data = [name for name, tensor in named if tensor.is_meta]
    others = [(name, tensor.device) for name, tensor in named if not tensor.is_meta]
    if not without_data or not others:
        return
    (name, *_), ((other, device), *_) = without_data, others
    where = "one device" if other == name else f"the device of {other}"
    raise RuntimeError(f"{op}: {name} must be on {where}, {device}, got meta")


def refuse_meta(op: str, **given) -> None:
    """Refuses tensors on "meta" for an operator whose effect the fake would silently omit.

    Raises:
        RuntimeError: one is.
    """
    for name, tensor in _tensors_of(given):
        if tensor.is_meta:
            raise RuntimeError(f"{op}: {name} must be on the CPU or a CUDA device, got meta")


def refuse_fakes(op: str, name: str) -> None:
    """Raises RuntimeError if a fake operator cannot know the real one's result."""
    raise RuntimeError(f"{op}: {name} must have values, got fake tensors") from None


def _tensors_of(given: dict) -> list[tuple[str, Tensor]]:
    """Tensors and those in lists, by name, except those that dispatch by themselves."""
    return [
        (name, tensor)
        for name, value in given.items()
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, Tensor) and _has_own_device(tensor)
    ]


def _has_own_device(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
