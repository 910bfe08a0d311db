"""Group norm as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional
from onepass.functional.group_norm import _kind_of


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm`, and an activation after it in the same pass; see
    `onepass.functional.group_norm`.

    Args:
        activation: None or "silu".

    Raises:
        ValueError: activation is none of these, or num_groups does not divide num_channels.

    Examples:
        >>> norm = onepass.nn.GroupNorm(8, 32, activation="silu")
        >>> norm(torch.randn(2, 32, 8, 8)).shape
        torch.Size([2, 32, 8, 8])
    """

    def __init__(self, *args, activation: str | None = None, **kwargs):
        _kind_of(activation, "GroupNorm")  # which raises for unknown ones
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        plain = super().extra_repr()
        return plain if self.activation is None else f"{plain}, activation={self.activation!r}"
