"""Causal convolution of each channel alone, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    sequence: Tensor | None = None,
) -> Tensor:
    """``activation(bias + sum over k of weight[:, k] * before[..., t - (width - 1) + k])``, where
    `before` is the input, initial_state in front of it, and zero in front of that.

    With `sequence`, the number of each position's sequence, (batch, length), positions of other
    sequences count as zero.
    """
    before = weight.shape[-1] - 1
    if initial_state is None:
        padded = F.pad(input, (before, 0))
    else:
        padded = torch.cat((initial_state, input), -1)
    if sequence is None:
        output = F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])
    else:
        numbers = F.pad(sequence, (before, 0))
        output = 0 if bias is None else bias[:, None]
        for k in range(before + 1):
            taken = slice(k, k + input.shape[-1])
            is_in = (numbers[:, taken] == sequence)[:, None]
            taps = torch.where(is_in, padded[..., taken], 0)
            output = output + weight[:, k, None] * taps
    return F.silu(output) if activation == "silu" else output


def causal_conv1d_update(
    input: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, the next state) of tokens after those in `state`, (batch, channels, at least
    width - 1)."""
    before = state[..., state.shape[-1] - weight.shape[-1] + 1 :]
    output = causal_conv1d(input, weight, bias, activation, before)
    return output, torch.cat((state, input), -1)[..., input.shape[-1] :]
