"""Dropout as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout` that stores no mask; see :func:`onepass.functional.dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, self.training, self.inplace)
