"""The linear layer as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional
from onepass._policy.precision import precision_of


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by the products of `onepass.functional.linear`.

    Examples:
        >>> layer = onepass.nn.Linear(64, 256)
        >>> layer(torch.randn(8, 64)).shape
        torch.Size([8, 256])
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias, precision=precision_of(self))
