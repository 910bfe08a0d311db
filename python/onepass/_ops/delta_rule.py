"""The operators of the delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._dispatch_log import record_fallback
from onepass._ops import differentiation
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass._ops.operator import Raw
from onepass.reference import delta_rule as reference

_CHUNK = 64  # kDeltaRuleTokens of csrc/ops/delta_rule.h


@entry
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    g_has_channels: bool,
) -> tuple[Tensor, Tensor]:
    """(output, final_state); on CUDA torch's operators."""
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, g_has_channels, False)
    if q.is_cuda:
        shape = " x ".join(map(str, v.shape))
        record_fallback("delta_rule", shape, "torch's operators", 1, "no kernel on CUDA")
        return _definition(*inputs)[:2]
    return _delta_rule.run(*inputs)[:2]


@entry
def delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    g_has_channels: bool,
) -> Tensor:
    """The output; the state becomes that after the last token in place."""
    tensors = (state, q, k, v, g, beta)
    options = (cu_seqlens, scale, qk_l2norm, g_has_channels)
    if q.is_cuda or differentiation.is_differentiated(*tensors):
        if not q.is_cuda and not torch.compiler.is_compiling():
            _update.check(*tensors, *options)
        before = state.clone()  # which the backward reads
        output, after = delta_rule(q, k, v, g, beta, before, *options)
        state.copy_(after)
        return output
    output = _update.op(*tensors, *options)
    differentiation.count_change(state)
    return output


@entry
def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    g_has_channels: bool,
) -> tuple[Tensor, Tensor]:
    """(output, final_state), for few tokens. Where a gradient is wanted, as delta_rule, also within
    no_grad: checkpointing computes a result without a graph first, and then the same bits with.
    Likewise in compiled and exported programs, which may be trained."""
    options = (cu_seqlens, scale, qk_l2norm, g_has_channels)
    tensors = (q, k, v, g, beta, initial_state)
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    plain = not (requires_grad or differentiation.is_differentiated(*tensors))
    if q.is_cuda or not plain or torch.compiler.is_compiling():
        return delta_rule(q, k, v, g, beta, initial_state, *options)
    _delta_rule.forward.check(q, k, v, g, beta, initial_state, *options, False)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
    if initial_state is None:
        state = q.new_zeros(shape, dtype=dtype)
    else:
        state = q.new_empty(shape, dtype=dtype).copy_(initial_state)
    output = _update.op(state, q, k, v, g, beta, *options)
    return output, state


def _outputs(q, v, cu_seqlens, save_states):
    accumulator = torch.float64 if q.dtype is torch.float64 else torch.float32
    batch, length, heads, value_dim = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = (length + _CHUNK - 1) // _CHUNK
    chunks += 0 if cu_seqlens is None else sequences
    of_head = (heads, q.shape[3], value_dim)
    return (
        v.new_empty(v.shape),
        q.new_empty((sequences, *of_head), dtype=accumulator),
        q.new_empty((batch, chunks, *of_head) if save_states else (0,), dtype=accumulator),
    )


def _definition(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, g_has_channels, save_states
):
    if save_states:
        return NotImplemented
    tensors = wide(q, k, v, g, beta)
    output, final_state = reference.delta_rule(
        *tensors, scale, *wide(initial_state), cu_seqlens, qk_l2norm
    )
    return output.to(v.dtype), final_state, final_state.new_empty(0)


def _gradients(q, k, v, g, beta, initial_state, grad_mask):
    def gradient(place, of):
        if of is None or not grad_mask >> place & 1:
            return (q if of is None else of).new_empty(0)
        return of.new_empty(of.shape)

    return tuple(gradient(*each) for each in enumerate((q, k, v, g, beta, initial_state)))


def _updated(v):
    return v.new_empty(v.shape)


_update = Raw("delta_rule_update", _updated)
_delta_rule = differentiable("delta_rule", _outputs, _definition, _gradients)
