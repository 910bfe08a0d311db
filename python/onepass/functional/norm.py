"""Layer norm and RMS norm, alone or fused with the residual add (and dropout) before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._memory_order import has_channels_last, like
from onepass._ops.modulated_norm import modulated_norm, scaled_add_norm
from onepass._ops.norm import NormKind, norm


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the last dimensions, as `torch.nn.functional.layer_norm`.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` per row, with the biased variance
    (Ba, Kiros, Hinton: Layer Normalization, 2016). Sums are taken in float32 (float64 for float64)
    and the result is rounded once.

    Args:
        input: shape (*, *normalized_shape); float32, bfloat16, float16 or float64. Any strides; a
            dense last dimension is read in place, other layouts are copied once.
        normalized_shape: the trailing dimensions that form a row.
        weight, bias: shape normalized_shape, each optional; any of float32, bfloat16, float16, or
            float64 when input is float64.
        eps: added to the variance.

    Returns:
        Tensor of input's shape and dtype (under autocast: of the dtype that torch gives).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> x, weight, bias = torch.randn(4, 512), torch.ones(512), torch.zeros(512)
        >>> onepass.functional.layer_norm(x, (512,), weight, bias).shape
        torch.Size([4, 512])
    """
    try:
        return norm(input, None, weight, bias, normalized_shape, kind=NormKind.LAYER, eps=eps)[0]
    except Exception:
        check_arguments(layer_norm, locals())
        raise


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    """RMS norm over the last dimensions, as `torch.nn.functional.rms_norm`.

    ``y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` per row (Zhang, Sennrich: Root Mean
    Square Layer Normalization, 2019).

    Args:
        input: shape (*, *normalized_shape); dtypes and strides as in `layer_norm`.
        normalized_shape: the trailing dimensions that form a row.
        weight: shape normalized_shape, optional.
        eps: added to the mean square; None is the epsilon of float32 (of float64 for float64).
        weight_offset: added to the weight: 1.0 for models that store the weight minus one. Must be
            0 without a weight.

    Returns:
        Tensor of input's shape and dtype (under autocast: of the dtype that torch gives), in
        channels_last if input is.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: weight_offset without a weight.

    Examples:
        >>> x, weight = torch.randn(4, 512), torch.ones(512, requires_grad=True)
        >>> y = onepass.functional.rms_norm(x, (512,), weight, eps=1e-6)
        >>> y.sum().backward()
        >>> weight.grad.shape
        torch.Size([512])
    """
    try:
        _check_offset("rms_norm", weight_offset, weight)
        output = norm(
            input,
            None,
            weight,
            None,
            normalized_shape,
            kind=NormKind.RMS,
            eps=eps,
            weight_offset=weight_offset,
        )[0]
        return like(output, input) if has_channels_last(input) else output
    except Exception:
        check_arguments(rms_norm, locals())
        raise


def add_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual add and layer norm in one pass over memory, as in a pre-norm transformer block.

    ``residual_out = residual + row_scale * column_scale * dropout(input)``, ``y =
    layer_norm(residual_out)``.

    Args:
        input: the branch, shape (*, *normalized_shape).
        residual: the stream, input's shape; may be wider (float32 beside bfloat16 activations).
            None, as before a first block: then residual_out is the sum without it, a tensor of
            its own in residual_dtype or input's dtype.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        dropout_p: probability of dropping an element of input; no mask is stored, the backward
            regenerates it.
        training: False turns dropout off.
        residual_dtype: dtype of residual_out; None is residual's.
        column_scale: LayerScale's gamma, shape normalized_shape; as in `add_dropout`.
        row_scale: DropPath's factor of each sample, shape (batch,); as in `add_dropout`.

    Returns:
        (y, residual_out): y in input's dtype, residual_out in residual_dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
            row_scale requires a gradient.
        TypeError: an argument is of a wrong type.
        ValueError: dropout_p is outside [0, 1].

    Examples:
        >>> branch, stream, weight = torch.randn(4, 512), torch.randn(4, 512), torch.ones(512)
        >>> y, stream = onepass.functional.add_layer_norm(
        ...     branch, stream, (512,), weight, dropout_p=0.1
        ... )
        >>> y.shape, stream.shape
        (torch.Size([4, 512]), torch.Size([4, 512]))
    """
    try:
        return _add_norm(
            input,
            residual,
            weight,
            bias,
            normalized_shape,
            _active_p("add_layer_norm", dropout_p, training),
            residual_dtype,
            column_scale,
            row_scale,
            kind=NormKind.LAYER,
            eps=eps,
        )
    except Exception:
        check_arguments(add_layer_norm, locals())
        raise


def add_rms_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual add and RMS norm in one pass over memory.

    ``residual_out = residual + row_scale * column_scale * dropout(input)``, ``y =
    rms_norm(residual_out)``. Arguments, results and errors as in `add_layer_norm` and `rms_norm`.

    Examples:
        >>> branch, stream = torch.randn(4, 512).bfloat16(), torch.randn(4, 512)
        >>> y, stream = onepass.functional.add_rms_norm(branch, stream, (512,), torch.ones(512))
        >>> y.dtype, stream.dtype
        (torch.bfloat16, torch.float32)
    """
    try:
        _check_offset("add_rms_norm", weight_offset, weight)
        return _add_norm(
            input,
            residual,
            weight,
            None,
            normalized_shape,
            _active_p("add_rms_norm", dropout_p, training),
            residual_dtype,
            column_scale,
            row_scale,
            kind=NormKind.RMS,
            eps=eps,
            weight_offset=weight_offset,
        )
    except Exception:
        check_arguments(add_rms_norm, locals())
        raise


def modulated_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm whose scale and shift come from the batch, as in diffusion transformers.

    ``y = layer_norm(x) * (1 + scale) + shift`` without parameters (Peebles, Xie: Scalable Diffusion
    Models with Transformers, 2022), where x is input or, with a residual, the gated sum
    ``h = residual + gate * input`` in the same pass. Sums are taken in float32 (float64 for
    float64) and each result is rounded once. Gradients of scale, shift and gate are summed over the
    rows that share them in a fixed order: the same bits for any number of threads.

    Args:
        input: shape (batch, *, *normalized_shape); dtypes and strides as in `layer_norm`.
        normalized_shape: the trailing dimensions that form a row.
        scale: one for each sample, shape (batch, *normalized_shape) or that with ones between, as
            in (batch, 1, width); or one for each row, input's shape. Any of float32, bfloat16,
            float16, or float64 when input is float64; rows that are slices of a larger tensor are
            read in place.
        shift: scale's shape, of any of these dtypes; None is 0.
        eps: added to the variance.
        residual: the stream that input is added to, input's shape; may be wider.
        gate: multiplies input before the add, scale's shape; None is 1.

    Returns:
        Tensor of input's shape and dtype (under autocast: of the dtype that torch's layer_norm
        gives), also where scale is wider; with a residual (y, h), h in residual's dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument. A gate
            without a residual.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> tokens, branch = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
        >>> shift, scale, gate = torch.randn(2, 192).chunk(3, dim=1)
        >>> y, h = onepass.functional.modulated_layer_norm(
        ...     branch, 64, scale, shift, eps=1e-6, residual=tokens, gate=gate
        ... )
        >>> y.shape, h.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16, 64]))
    """
    try:
        tensors = (input, scale, shift, residual, gate)
        y, h = modulated_norm(*tensors, normalized_shape, kind=NormKind.LAYER, eps=eps)
        return y if residual is None else (y, h)
    except Exception:
        check_arguments(modulated_layer_norm, locals())
        raise


def modulated_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm whose scale and shift come from the batch.

    ``y = rms_norm(x) * (1 + scale) + shift``; x, results and errors as in `modulated_layer_norm`,
    eps as in `rms_norm`.

    Examples:
        >>> x, scale = torch.randn(2, 16, 64).bfloat16(), torch.randn(2, 64)
        >>> onepass.functional.modulated_rms_norm(x, 64, scale).dtype
        torch.bfloat16
    """
    try:
        tensors = (input, scale, shift, residual, gate)
        y, h = modulated_norm(*tensors, normalized_shape, kind=NormKind.RMS, eps=eps)
        return y if residual is None else (y, h)
    except Exception:
        check_arguments(modulated_rms_norm, locals())
        raise


def _check_offset(op: str, weight_offset: float, weight: Tensor | None) -> None:
    if weight is None and weight_offset:
        raise ValueError(f"{op}: weight_offset must be 0 without a weight, got {weight_offset}")


def _add_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    dropout_p: float,
    residual_dtype: torch.dtype | None,
    column_scale: Tensor | None,
    row_scale: Tensor | None,
    **options,
) -> tuple[Tensor, Tensor]:
    if residual is None:
        residual = _zeros(input, normalized_shape, residual_dtype)
    options |= {"dropout_p": dropout_p, "residual_dtype": residual_dtype}
    if column_scale is None and row_scale is None:
        return norm(input, residual, weight, bias, normalized_shape, **options)
    scales = {"column_scale": column_scale, "row_scale": row_scale}
    return scaled_add_norm(input, residual, weight, bias, normalized_shape, **options, **scales)


def _zeros(
    input: Tensor, normalized_shape: int | Sequence[int], dtype: torch.dtype | None
) -> Tensor:
    """A stream that adds nothing, of one row that stays in the cache: so residual_out is a tensor
    of its own, written in the same pass. -0.0 keeps the sign of every zero."""
    dims = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    row = input.shape[input.dim() - dims :]
    return input.new_full(row, -0.0, dtype=dtype).expand(input.shape)


def _active_p(op: str, p: float, training: bool) -> float:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout_p must lie between 0 and 1, got {p}")
    if type(training) is not bool:
        raise TypeError  # which check_arguments names
    return p if training else 0.0
