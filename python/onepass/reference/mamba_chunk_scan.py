"""The scan of Mamba 2, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose products with each other are in memory at a time


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """(output, final states) of ``h[t] = exp(step[t] A) h[t - 1] + step[t] x[t] B[t]^T`` and
    ``output[t] = (h[t] C[t] + D x[t]) silu(z[t])``, where the step is dt + dt_bias or its softplus,
    between the limits.

    Chunk by chunk, by products of matrices (Dao, Gu 2024). Exponents are sums of `step A` over the
    tokens between two, each on its own: a difference of sums from the chunk's begin on would be
    inexact after a step that forgets everything.
    """
    step = dt if dt_bias is None else dt + dt_bias
    step = F.softplus(step) if dt_softplus else step
    step = step.clamp(*dt_limit)
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_states is None:
        initial_states = x.new_zeros((sequences, *x.shape[2:], B.shape[-1]))
    inputs = (step * A, step[..., None] * x, B, C)
    if cu_seqlens is None:
        y, final_states = _scan(*inputs, initial_states)
    else:
        lengths = cu_seqlens.diff().tolist()
        pieces = zip(*(t.split(lengths, 1) for t in inputs), initial_states.split(1), strict=True)
        found = [_scan(*piece) for piece in pieces]
        y = torch.cat([y for y, _ in found], 1) if found else torch.zeros_like(x)
        final_states = torch.cat([last for _, last in found]) if found else initial_states
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * x
    return y if z is None else y * F.silu(z), final_states


def _scan(a: Tensor, x: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """(y, the states after the last token). Heads are in front: b (batch), g (group), h (head of a
    group), t and s (tokens of a chunk), p (column), n (number of the state)."""
    groups, dtype = B.shape[2], x.dtype
    a, x = (t.transpose(1, 2).unflatten(1, (groups, -1)) for t in (a, x))
    B, C = (t.transpose(1, 2) for t in (B, C))
    h = h.unflatten(1, (groups, -1))
    outputs = [x.new_empty((*x.shape[:3], 0, x.shape[-1]))]
    for begin in range(0, x.shape[3], CHUNK):
        of_a, of_x = a[..., begin : begin + CHUNK], x[:, :, :, begin : begin + CHUNK]
        of_B, of_C = (t[:, :, begin : begin + CHUNK] for t in (B, C))
        tokens = of_a.shape[-1]
        lower = torch.ones((tokens, tokens), dtype=torch.bool, device=x.device).tril()
        # between[t, s]: the sum of a over tokens (s, t]
        between = of_a[..., None].expand(*of_a.shape, tokens).masked_fill(~lower.tril(-1), 0)
        decay = between.cumsum(-2).masked_fill(~lower, float("-inf")).exp().to(dtype)
        from_before = of_a.cumsum(-1).exp()
        y = torch.einsum("bgtn,bgsn,bghts,bghsp->bghtp", of_C, of_B, decay, of_x)
        y = y + torch.einsum("bgtn,bghpn->bghtp", of_C, h) * from_before[..., None]
        taken_in = torch.einsum("bgsn,bghsp->bghpn", of_B, of_x * decay[..., -1, :, None])
        h = from_before[..., -1, None, None] * h + taken_in
        outputs.append(y)
    return torch.cat(outputs, 3).flatten(1, 2).transpose(1, 2), h.flatten(1, 2)
