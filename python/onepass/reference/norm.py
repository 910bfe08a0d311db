"""Layer norm and RMS norm; autograd of these gives the gradients' definition."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.reference.dropout import dropped, scaled


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
    column_scale=None,
    row_scale=None,
):
    """residual_out = residual + row_scale * column_scale * dropout(input);
    (layer_norm(residual_out), residual_out)."""
    x = _add(input, residual, dropout_p, seed, residual_dtype, column_scale, row_scale)
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
    column_scale=None,
    row_scale=None,
):
    """residual_out = residual + row_scale * column_scale * dropout(input);
    (rms_norm(residual_out), residual_out)."""
    x = _add(input, residual, dropout_p, seed, residual_dtype, column_scale, row_scale)
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
    """The modulated form of rms_norm; see modulated_layer_norm."""
    return _modulated(input, normalized_shape, scale, shift, eps, residual, gate, kind=1)


def modulated(x, normalized_shape, scale, shift, eps, *, kind: int, offset: float = 1.0):
    """norm(x) * (offset + scale) + shift; kind 0 is layer norm, 1 RMS norm. A scale of None is 1
    in a norm without an offset."""
    norm = rms_norm if kind else layer_norm
    y = norm(x, normalized_shape, eps=eps)
    if scale is not None:
        y = y * (offset + for_rows(scale, x, normalized_shape))
    y = y if shift is None else y + for_rows(shift, x, normalized_shape)
    return y.to(x.dtype)


def statistics(x, normalized_shape, eps, *, kind: int) -> tuple[Tensor, Tensor]:
    """(mean, rstd) of each row; of an RMS norm the mean is empty."""
    mean, dims = x.new_empty(0), _last_dims(normalized_shape)
    if not kind:
        mean = x.mean(dims)
        x = x - x.mean(dims, keepdim=True)
    return mean, torch.rsqrt((x * x).mean(dims) + eps)


def gated_add(branch, residual, gate, normalized_shape, row_scale=None):
    """residual + row_scale * gate * branch."""
    each = None if gate is None else for_rows(gate, branch, normalized_shape)
    return (residual + scaled(branch, each, row_scale)).to(residual.dtype)


def for_rows(scale, x, normalized_shape):
    """A scale (batch, *normalized_shape), given x's dimensions; other scales have them already, or
    belong to all rows."""
    if scale.dim() == x.dim() or tuple(scale.shape) == _shape(normalized_shape):
        return scale
    ones = (1,) * (x.dim() - scale.dim())
    return scale.reshape(scale.shape[0], *ones, *scale.shape[1:])


def _modulated(input, normalized_shape, scale, shift, eps, residual, gate, *, kind):
    if residual is None:
        return modulated(input, normalized_shape, scale, shift, eps, kind=kind)
    h = gated_add(input, residual, gate, normalized_shape)
    return modulated(h, normalized_shape, scale, shift, eps, kind=kind).to(input.dtype), h


def _shape(normalized_shape) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def _last_dims(normalized_shape) -> tuple[int, ...]:
    return tuple(range(-len(_shape(normalized_shape)), 0))


def _add(input, residual, dropout_p, seed, residual_dtype, column_scale=None, row_scale=None):
    branch = dropped(input, dropout_p, seed)
    return (residual + scaled(branch, column_scale, row_scale)).to(residual_dtype or residual.dtype)
