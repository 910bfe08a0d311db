"""Random tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def equally_hard(x: Tensor, dims: int | Sequence[int], *, centred: bool = True) -> Tensor:
    """x scaled over `dims` around its mean, or around 0, to one small spread.

    Otherwise the largest error of many rows of few numbers is that of a single row, whose numbers
    happen to be nearest: one draw, however many rows there are.
    """
    wide = x.double()
    mean = wide.mean(dims, keepdim=True) if centred else torch.zeros_like(wide)
    spread = (wide - mean).square().mean(dims, keepdim=True).sqrt().clamp(min=1e-30)
    return (mean + (wide - mean) * (0.01 / spread)).to(x.dtype)
