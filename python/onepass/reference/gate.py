"""Gated activations in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.reference import linear

# In the order of their numbers in csrc/core/activation.h, from 1.
ACTIVATIONS = linear.ACTIVATIONS | {
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def gated_activation(
    gate: Tensor, up: Tensor | None = None, activation: str = "silu", gate_last: bool = False
) -> Tensor:
    """``activation(gate) * up``; without up, gate holds both in its last dimension.

    Dauphin, Fan, Auli, Grangier, Language modeling with gated convolutional networks, 2016
    (sigmoid); Shazeer, GLU variants improve transformer, 2020.
    """
    if up is None:
        first, second = gate.chunk(2, -1)
        gate, up = (second, first) if gate_last else (first, second)
    return ACTIVATIONS[activation](gate) * up


def gated_activation_backward(
    doutput: Tensor, gate: Tensor, up: Tensor | None, activation: str, gate_last: bool
) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup), which can be differentiated in turn; dgate has both halves where up is None."""
    factors = [gate] if up is None else [gate, up]
    output = gated_activation(gate, up, activation, gate_last)
    dgate, *dup = torch.autograd.grad(output, factors, doutput, create_graph=True)
    return dgate, dup[0] if dup else None
