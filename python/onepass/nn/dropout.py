"""Dropout as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout` that stores no mask; see `onepass.functional.dropout`.

    Tensors in channels_last stay in it: there an element's index is its place in memory.

    Examples:
        >>> dropout = onepass.nn.Dropout(0.5)
        >>> sorted(set(dropout(torch.ones(1000)).tolist()))
        [0.0, 2.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.p > 0.0 and not self.inplace and isinstance(input, Tensor):
            if input.dim() in (4, 5) and _is_channels_last(input):
                rows = functional.dropout(input.movedim(1, -1), self.p)
                return rows.movedim(-1, 1)
        return functional.dropout(input, self.p, self.training, self.inplace)


def _is_channels_last(input: Tensor) -> bool:
    """Whether it lies so, and not in the usual order as well (one channel does)."""
    # Not by memory_format, which torch.vmap does not know.
    return not input.is_contiguous() and input.movedim(1, -1).is_contiguous()
