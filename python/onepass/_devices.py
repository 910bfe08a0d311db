"""Devices of a call's tensors, compared where the operator that would compare them is not run.

With any tensor on "meta" torch calls the fake, whatever the others are on. Here and not in
csrc/ops, because the kernel, which looks at devices, is never reached.
"""

from __future__ import annotations

from torch import Tensor


def require_one_device(op: str, **given) -> None:
    """Refuses a tensor on "meta" beside one that has data: a result of the fake on the device of
    the other is memory that nobody wrote.

    Fake tensors are not looked at, nor others that dispatch by themselves: their devices are the
    mode's to compare.

    Args:
        op: the operator.
        **given: its tensors and lists of tensors by name; anything else is passed over.

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
    """Refuses tensors on "meta" where a fake that did nothing would hide that nothing was done.

    Raises:
        RuntimeError: one is.
    """
    for name, tensor in _tensors_of(given):
        if tensor.is_meta:
            raise RuntimeError(f"{op}: {name} must be on the CPU or a CUDA device, got meta")


def refuse_fakes(op: str, name: str) -> None:
    """Raises RuntimeError, where a fake operator cannot know the real one's result."""
    raise RuntimeError(f"{op}: {name} must have values, got fake tensors") from None


def _tensors_of(given: dict) -> list[tuple[str, Tensor]]:
    """Tensors and those in lists, by name, but for those that dispatch by themselves."""
    return [
        (name, tensor)
        for name, value in given.items()
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, Tensor) and _has_own_device(tensor)
    ]


def _has_own_device(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
