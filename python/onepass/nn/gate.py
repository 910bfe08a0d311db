"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional
from onepass.functional.gate import _kind_of
from onepass.nn.linear import Linear


class GatedMLP(torch.nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, with transformers' names of its parts.

    Shazeer, GLU variants improve transformer, 2020.

    Args:
        in_features: size of the input's last dimension, and of the output's.
        hidden_features: size of the two projections' outputs.
        activation: as in `onepass.functional.gated_activation`.
        bias: whether the three linear layers have one.

    Raises:
        ValueError: activation is none of those.

    Examples:
        >>> mlp = onepass.nn.GatedMLP(64, 176)
        >>> mlp(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _kind_of(activation, "GatedMLP")  # which raises for unknown ones
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.activation = activation
        self.gate_proj = Linear(in_features, hidden_features, **options)
        self.up_proj = Linear(in_features, hidden_features, **options)
        self.down_proj = Linear(hidden_features, in_features, **options)

    def forward(self, input: Tensor) -> Tensor:
        gate, up = self.gate_proj(input), self.up_proj(input)
        return self.down_proj(functional.gated_activation(gate, up, activation=self.activation))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
