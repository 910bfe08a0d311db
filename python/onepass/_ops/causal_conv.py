"""The causal convolution family's operator."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._dispatch_log import record_fallback
from onepass._ops import differentiation
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass._ops.operator import Raw
from onepass.reference import causal_conv as reference


@entry
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
) -> Tensor:
    """silu(convolution), or without silu, in x's memory order; on CUDA torch's operators."""
    if x.is_cuda:
        shape = " x ".join(map(str, x.shape))
        record_fallback("causal_conv1d", shape, "torch's convolution", 1, "no kernel on CUDA")
        return _definition(x, weight, bias, initial_state, seq_idx, silu)
    channels_last = x.dim() == 3 and x.stride(1) == 1 and x.stride(2) != 1
    return _causal_conv1d.run(x, weight, bias, initial_state, seq_idx, silu, channels_last)


@entry
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """silu(convolution) of tokens after those in conv_state, which moves on to them in place."""
    if x.is_cuda or differentiation.is_differentiated(x, conv_state, weight, bias):
        if not x.is_cuda and not torch.compiler.is_compiling():
            _update.check(conv_state, x, weight, bias, silu)
        tokens = x if x.dim() == 3 else x[..., None]
        activation = "silu" if silu else None
        given = wide(tokens, conv_state, weight, bias)
        output, state = reference.causal_conv1d_update(*given, activation)
        conv_state.copy_(state)
        return output.to(x.dtype).view(x.shape)
    output = _update.op(conv_state, x, weight, bias, silu)
    differentiation.count_change(conv_state)
    return output


def _empty_like(x: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return x.new_empty(x.shape)
    batch, channels, length = x.shape
    return x.new_empty((batch, length, channels)).transpose(1, 2)


def _outputs(x, channels_last):
    return _empty_like(x, channels_last)


def _definition(x, weight, bias, initial_state, seq_idx, silu):
    wide_x, weight, bias, state = wide(x, weight, bias, initial_state)
    activation = "silu" if silu else None
    output = reference.causal_conv1d(wide_x, weight, bias, activation, state, seq_idx)
    return output.to(x.dtype)


def _gradients(x, weight, bias, initial_state, channels_last, grad_mask):
    def gradient(bit, of):
        is_wanted = bool(grad_mask & bit) and of is not None
        return (x if of is None else of).new_empty(of.shape if is_wanted else (0,))

    dx = _empty_like(x, channels_last) if grad_mask & 1 else x.new_empty(0)
    return dx, gradient(2, weight), gradient(4, bias), gradient(8, initial_state)


def _updated(x):
    return x.new_empty(x.shape)


_update = Raw("causal_conv1d_update", _updated)
_causal_conv1d = differentiable("causal_conv1d", _outputs, _definition, _gradients)
