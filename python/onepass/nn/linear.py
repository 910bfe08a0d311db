"""The linear layer as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by the products of `onepass.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias)
