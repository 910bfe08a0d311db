"""Layer norm and RMS norm; autograd of these gives the gradients' definition."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.dropout import dropout


def layer_norm(input: Tensor, normalized_shape, weight=None, bias=None, eps: float = 1e-5):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions."""
    dims = _last_dims(normalized_shape)
    centred = input - input.mean(dims, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


def rms_norm(input: Tensor, normalized_shape, weight=None, eps=None, *, weight_offset: float = 0.0):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimensions."""
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    dims = _last_dims(normalized_shape)
    y = input * torch.rsqrt((input * input).mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight + weight_offset)
    elif weight_offset:
        y = y * (1 + weight_offset)
    return y.to(input.dtype)


def add_layer_norm(
    input,
    residual,
    normalized_shape,
    weight=None,
    bias=None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    seed=None,
    residual_dtype=None,
):
    """residual_out = residual + dropout(input); (layer_norm(residual_out), residual_out)."""
    x = _add(input, residual, dropout_p, seed, residual_dtype)
    return layer_norm(x, normalized_shape, weight, bias, eps).to(input.dtype), x


def add_rms_norm(
    input,
    residual,
    normalized_shape,
    weight=None,
    eps=None,
    *,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    seed=None,
    residual_dtype=None,
):
    """residual_out = residual + dropout(input); (rms_norm(residual_out), residual_out)."""
    x = _add(input, residual, dropout_p, seed, residual_dtype)
    y = rms_norm(x, normalized_shape, weight, eps, weight_offset=weight_offset)
    return y.to(input.dtype), x


def modulated_layer_norm(
    input, normalized_shape, scale, shift=None, eps: float = 1e-5, *, residual=None, gate=None
):
    """layer_norm(input) * (1 + scale) + shift; with a residual (that of h, h), h = residual + gate
    * input."""
    return _modulated(input, normalized_shape, scale, shift, eps, residual, gate, kind=0)


def modulated_rms_norm(
    input, normalized_shape, scale, shift=None, eps=None, *, residual=None, gate=None
):
    """As modulated_layer_norm, of rms_norm."""
    return _modulated(input, normalized_shape, scale, shift, eps, residual, gate, kind=1)


def modulated(x, normalized_shape, scale, shift, eps, *, kind: int):
    """norm(x) * (1 + scale) + shift; kind 0 is layer norm, 1 RMS norm."""
    norm = rms_norm if kind else layer_norm
    y = norm(x, normalized_shape, eps=eps) * (1 + for_rows(scale, x, normalized_shape))
    y = y if shift is None else y + for_rows(shift, x, normalized_shape)
    return y.to(x.dtype)


def gated_add(branch, residual, gate, normalized_shape):
    """residual + gate * branch."""
    if gate is not None:
        branch = for_rows(gate, branch, normalized_shape) * branch
    return (residual + branch).to(residual.dtype)


def for_rows(scale, x, normalized_shape):
    """A scale (batch, *normalized_shape) with x's dimensions; others have them."""
    if scale.dim() == x.dim():
        return scale
    ones = (1,) * (x.dim() - scale.dim())
    return scale.reshape(scale.shape[0], *ones, *scale.shape[1:])


def _modulated(input, normalized_shape, scale, shift, eps, residual, gate, *, kind):
    if residual is None:
        return modulated(input, normalized_shape, scale, shift, eps, kind=kind)
    h = gated_add(input, residual, gate, normalized_shape)
    return modulated(h, normalized_shape, scale, shift, eps, kind=kind).to(input.dtype), h


def _last_dims(normalized_shape) -> tuple[int, ...]:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return tuple(range(-count, 0))


def _add(input, residual, dropout_p, seed, residual_dtype):
    branch = input if seed is None else dropout(input, dropout_p, seed)
    return (residual + branch).to(residual_dtype or residual.dtype)
