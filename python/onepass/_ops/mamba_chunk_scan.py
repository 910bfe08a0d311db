"""The operator of Mamba 2's scan."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._dispatch_log import record_fallback
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass.reference import mamba_chunk_scan as reference

_CHUNK = 64  # kChunkScanTokens of csrc/ops/mamba_chunk_scan.h


@entry
def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> tuple[Tensor, Tensor]:
    """(output, final_states); on CUDA torch's operators."""
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens)
    options = (dt_softplus, dt_min, dt_max, False)
    if x.is_cuda:
        shape = " x ".join(map(str, x.shape))
        record_fallback("mamba_chunk_scan", shape, "torch's operators", 1, "no kernel on CUDA")
        return _definition(*inputs, *options)[:2]
    return _mamba_chunk_scan.run(*inputs, *options)[:2]


def _outputs(x, B, cu_seqlens, save_states):
    accumulator = torch.float64 if x.dtype is torch.float64 else torch.float32
    batch, length, heads, head_dim = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = (length + _CHUNK - 1) // _CHUNK
    chunks += 0 if cu_seqlens is None else sequences
    state = B.shape[3]
    states = (batch, chunks, heads, state, head_dim) if save_states else (0,)
    return (
        x.new_empty(x.shape),
        x.new_empty((sequences, heads, head_dim, state), dtype=accumulator),
        x.new_empty(states, dtype=accumulator),
    )


def _definition(
    x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, dt_min, dt_max,
    save_states,
):  # fmt: skip
    if save_states:
        return NotImplemented
    tensors = wide(x, dt, A, B, C, D, z, dt_bias)
    output, final_states = reference.mamba_chunk_scan(
        *tensors, dt_softplus, *wide(initial_states), cu_seqlens, (dt_min, dt_max)
    )
    return output.to(x.dtype), final_states, final_states.new_empty(0)


def _gradients(x, dt, A, B, C, D, z, dt_bias, initial_states, grad_mask):
    def gradient(place, of):
        if of is None or not grad_mask >> place & 1:
            return (x if of is None else of).new_empty(0)
        return of.new_empty(of.shape)

    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    return tuple(gradient(place, of) for place, of in enumerate(inputs))


_mamba_chunk_scan = differentiable("mamba_chunk_scan", _outputs, _definition, _gradients)
