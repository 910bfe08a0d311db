"""Running averages of gradients outside the operator, for updates that need products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Factor = float | Tensor | None  # that clips gradients


def mix(
    momentum: Tensor,
    gradient: Tensor,
    weight: float,
    factor: Factor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """momentum + weight (factor gradient - momentum), computed in `dtype`."""
    gradient = gradient.to(dtype)
    if factor is not None:
        gradient = gradient * factor
    return torch.lerp(momentum.to(dtype), gradient, weight, out=out)


class Average(NamedTuple):
    """A momentum, moved towards its gradient once in a step."""

    momentum: Tensor
    version: int  # of momentum, as long as it has not moved
    gradient: Tensor
    weight: float
    factor: Factor

    def move(self) -> None:
        """Idempotent: torch counts writes in `_version`."""
        momentum, version, gradient, weight, factor = self
        if momentum._version != version:
            return
        if momentum.dtype is gradient.dtype and factor is None:
            momentum.lerp_(gradient, weight)
            return
        dtype = torch.float64 if momentum.dtype is torch.float64 else torch.float32
        momentum.copy_(mix(momentum, gradient, weight, factor, dtype))
