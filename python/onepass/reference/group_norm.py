"""Group norm in plain PyTorch, with an activation after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# By their numbers in csrc/core/activation.h.
ACTIVATIONS = {None: 0, "silu": 2}


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
) -> Tensor:
    """activation((x - mean) / sqrt(var + eps) * weight + bias), mean and variance of each group of
    channels of a sample.

    Wu and He, Group normalization, 2018.
    """
    batch, channels = input.shape[:2]
    grouped = input.reshape(batch, num_groups, -1)
    mean, rstd = statistics(input, num_groups, eps)
    y = ((grouped - mean[..., None]) * rstd[..., None]).reshape(input.shape)
    each = (channels, *(1,) * (input.dim() - 2))
    y = y if weight is None else y * weight.reshape(each)
    y = y if bias is None else y + bias.reshape(each)
    return (F.silu(y) if activation == "silu" else y).to(input.dtype)


def statistics(input: Tensor, num_groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, rstd), each (batch, num_groups)."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    mean = grouped.mean(-1)
    centred = grouped - mean[..., None]
    return mean, torch.rsqrt(centred.square().mean(-1) + eps)
