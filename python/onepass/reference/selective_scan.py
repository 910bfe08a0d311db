"""Selective scan, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose states are in memory at a time


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, last_state) of ``h[t] = exp(step[t] A) h[t - 1] + step[t] u[t] B[t]`` and
    ``output[t] = (C[t] h[t] + D u[t]) silu(z[t])``, where the step is delta + delta_bias or its
    softplus.

    The states of a chunk are computed at once, in log2(CHUNK) rounds (Hillis, Steele 1986).
    """
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step
    B, C = (_of_channels(factor, u.shape[1]) for factor in (B, C))
    if initial_state is None:
        sequences = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = u.new_zeros((sequences, *A.shape))
    inputs = (step, step * u, B, C)
    if cu_seqlens is None:
        y, last_state = _scan(A, *inputs, initial_state)
    else:
        lengths = cu_seqlens.diff().tolist()
        pieces = zip(*(x.split(lengths, -1) for x in inputs), initial_state.split(1), strict=True)
        found = [_scan(A, *piece) for piece in pieces]
        y = torch.cat([y for y, _ in found], -1) if found else torch.zeros_like(u)
        last_state = torch.cat([last for _, last in found]) if found else initial_state
    if D is not None:
        y = y + D[:, None] * u
    return y if z is None else y * F.silu(z), last_state


def _of_channels(factor: Tensor, channels: int) -> Tensor:
    """(batch, state, length) or (batch, groups, state, length) as (batch, channels or 1, ...)."""
    if factor.dim() == 3:
        return factor[:, None]
    return factor.repeat_interleave(channels // factor.shape[1], 1)


def _scan(
    A: Tensor, step: Tensor, product: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(y, last state), chunk by chunk."""
    outputs = [product.new_empty((*product.shape[:2], 0))]
    for begin in range(0, step.shape[-1], CHUNK):
        taken = (..., slice(begin, begin + CHUNK))
        # (batch, channels, state, tokens): h[t] = decay[t] h[before] + h[t]
        decay = torch.exp(A[:, :, None] * step[taken][:, :, None])
        h = B[taken] * product[taken][:, :, None]
        shift = 1
        while shift < h.shape[-1]:
            h = h + F.pad(decay[..., shift:] * h[..., :-shift], (shift, 0))
            decay = decay * F.pad(decay[..., :-shift], (shift, 0), value=1.0)
            shift *= 2
        h = h + decay * state[..., None]
        outputs.append((C[taken] * h).sum(2))
        state = h[..., -1]
    return torch.cat(outputs, -1), state


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """(output, the next state) of one token, with or without heads."""
    step = dt if dt_bias is None else dt + dt_bias
    step = F.softplus(step) if dt_softplus else step
    if state.dim() == 4:  # each group for as many heads
        B, C = (factor.repeat_interleave(state.shape[1] // factor.shape[1], 1) for factor in (B, C))
    decayed = torch.exp(step[..., None] * A) * state
    state = decayed + (step * x)[..., None] * B[..., None, :]
    y = (C[..., None, :] * state).sum(-1)
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z), state
