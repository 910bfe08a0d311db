"""The checks of csrc/ops for fakes: the operators that check, called on tensors without data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check(operator: Callable, *arguments, **options) -> None:
    """Calls an operator that only checks, for a fake that got these arguments.

    Symbolic sizes are used with their values in this call, without a guard: calls that eager would
    refuse are refused, and other sizes are checked when the compiled code runs. Calls with
    data-dependent sizes (`item()`, `nonzero()`) are checked only at run time. Devices of fake
    tensors are not compared: all are checked as "meta".

    Raises:
        RuntimeError: from the check.
    """
    if not all(map(_is_known, (*arguments, *options.values()))):
        return
    # Fake and tracing modes must not see it.
    with torch._C._DisableTorchDispatch():
        operator(*map(_known, arguments), **{k: _known(v) for k, v in options.items()})


def _is_known(value) -> bool:
    if isinstance(value, Tensor):
        return _is_known(value.shape) and _is_known(value.stride())
    if isinstance(value, (tuple, list)):
        return all(map(_is_known, value))
    return not isinstance(value, _SYMBOLIC) or value.node.has_hint()


def _known(value):
    if isinstance(value, Tensor):
        if type(value) in (Tensor, Parameter):  # on "meta"; the check refuses other devices
            return value
        shape, strides = _known(value.shape), _known(value.stride())
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [_known(item) for item in value]
    return value.node.pytype(value.node.hint) if isinstance(value, _SYMBOLIC) else value
