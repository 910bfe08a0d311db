"""The selective scan family's operator."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._dispatch_log import record_fallback
from onepass._ops import differentiation
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass._ops.operator import Raw
from onepass.reference import selective_scan as reference

_CHUNK = 128  # kScanChunk of csrc/ops/selective_scan.h


@entry
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """(output, last_state), the output in u's memory order; on CUDA torch's operators."""
    channels_last = u.dim() == 3 and u.stride(1) == 1 and u.stride(2) != 1
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus)
    if u.is_cuda:
        shape = " x ".join(map(str, u.shape))
        record_fallback("selective_scan", shape, "torch's operators", 1, "no kernel on CUDA")
        return _definition(*inputs, False)[:2]
    return _selective_scan.run(*inputs, channels_last, False)[:2]


@entry
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> Tensor:
    """The output of one token; the state becomes the next one in place."""
    tensors = (state, x, dt, A, B, C, D, z, dt_bias)
    if x.is_cuda or differentiation.is_differentiated(*tensors):
        if not x.is_cuda and not torch.compiler.is_compiling():
            _update.check(*tensors, dt_softplus)
        before = state.clone()  # which the backward reads
        given = wide(before, *tensors[1:])
        output, after = reference.selective_state_update(*given, dt_softplus)
        state.copy_(after)
        return output.to(x.dtype)
    output = _update.op(*tensors, dt_softplus)
    differentiation.count_change(state)
    return output


def _empty_like(u: Tensor, channels_last: bool, dtype: torch.dtype) -> Tensor:
    if not channels_last:
        return u.new_empty(u.shape, dtype=dtype)
    batch, channels, length = u.shape
    return u.new_empty((batch, length, channels), dtype=dtype).transpose(1, 2)


def _outputs(u, A, cu_seqlens, channels_last, save_states):
    accumulator = torch.float64 if u.dtype is torch.float64 else torch.float32
    sequences = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = (u.shape[2] + _CHUNK - 1) // _CHUNK
    chunks += 0 if cu_seqlens is None else sequences
    states = (u.shape[0], chunks, A.shape[1], u.shape[1]) if save_states else (0,)
    return (
        _empty_like(u, channels_last, u.dtype),
        u.new_empty((sequences, *A.shape), dtype=accumulator),
        u.new_empty(states, dtype=accumulator),
    )


def _definition(
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus, save_states
):
    if save_states:
        return NotImplemented
    tensors = wide(u, delta, A, B, C, D, z, delta_bias)
    output, last_state = reference.selective_scan(
        *tensors, delta_softplus, *wide(initial_state), cu_seqlens
    )
    return output.to(u.dtype), last_state, last_state.new_empty(0)


def _gradients(u, delta, A, B, C, D, z, delta_bias, initial_state, channels_last, grad_mask):
    def gradient(place, of):
        if of is None or not grad_mask >> place & 1:
            return (u if of is None else of).new_empty(0)
        if place in (0, 1, 6):
            return _empty_like(u, channels_last, of.dtype)
        return of.new_empty(of.shape)

    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    return tuple(gradient(place, of) for place, of in enumerate(inputs))


def _updated(x):
    return x.new_empty(x.shape)


_update = Raw("selective_state_update", _updated)
_selective_scan = differentiable("selective_scan", _outputs, _definition, _gradients)
