"""The linear layer whose weight is quantised and frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import quantized_linear as _quantized_linear
from onepass._ops.differentiation import is_differentiated
from onepass._ops.linear import Activation
from onepass.functional.attention import _autocast
from onepass.functional.linear import _ACTIVATIONS, _composed, linear
from onepass.reference.quantized_linear import Format

FORMATS = tuple(format.name.lower() for format in Format)
ACTIVATIONS = (None, "int8")


def quantized_linear(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    shifts: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    weights: str,
    activations: str | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    input_order: Tensor | None = None,
    outlier_columns: Tensor | None = None,
    outliers: Tensor | None = None,
) -> Tensor:
    """``residual + activation(input weight^T + bias)`` with the weight
    ``scale * value(code) + shift``, which is never whole in memory.

    Few rows (at most 16, or 12 without AVX-512) read the codes once, in place, and turn them into
    numbers in registers; codes of nf4 are rounded to bfloat16 there where the CPU multiplies pairs
    of those and input is bfloat16, other codes are exact. More rows turn them into numbers of
    input's dtype while they are packed. So the bits of a row of the output depend on which of the
    two it is, and on nothing else in the other rows or in the number of threads. Sums are float32.

    Gradients are those of input, bias and residual: the weight is frozen. Where one is wanted, the
    activation is a pass of its own. On CUDA the weight is dequantised for torch's products.

    Dettmers et al., LLM.int8(), 2022, and QLoRA, 2023; OCP Microscaling Formats (MX), 2023.

    Args:
        input: (..., in_features); float32, bfloat16, float16 or float64 (with scales of float64).
        codes: int32 words (out_features / 16, words, 16), as `onepass.nn.QuantizedLinear` holds
            them; `onepass.reference.quantized_linear.pack` makes them from plain codes, and
            `unpack` gives those back.
        scales: (groups, out_features), any of input's dtypes. A group is in_features / groups
            numbers, a multiple of 8 unless it is all.
        shifts: scales' shape and dtype, or None: 0.
        bias: (out_features,), or None.
        weights: the codes' format: "int8", "int4", "nf4" or "mxfp4".
        activations: "int8" quantises each row of input by its largest magnitude, so that products
            are of whole numbers, with the same bits for any number of rows: for int8 weights in one
            group. Rows of more than 131,072 numbers, and of float64, stay as they are.
        activation, residual: as in `onepass.functional.linear`.
        input_order: (in_features,) int32 or int64, a permutation, or None: the codes' column i is
            multiplied with feature ``input_order[i]`` of input, which is copied in that order. With
            GPTQ's act-order it sorts features by their group: ``g_idx.argsort(stable=True)``.
        outlier_columns: (count,) int32 or int64, or None: features of input that are multiplied
            with `outliers` alone, and not with codes, as in LLM.int8; nor do they count where rows
            of input are quantised.
        outliers: (out_features, count), the weight's columns of these features.

    Returns:
        Tensor of shape (..., out_features) in residual's dtype, or else in input's (under autocast:
        in autocast's).

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or scales require a gradient; the
            message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: weights, activations or activation is none of these.

    Examples:
        >>> codes = torch.randint(-(2**31), 2**31, (16, 8, 16), dtype=torch.int32)  # of 256 x 64
        >>> scales, x = torch.rand(1, 256), torch.randn(8, 64)
        >>> y = onepass.functional.quantized_linear(x, codes, scales, weights="int4")
        >>> y.shape
        torch.Size([8, 256])
    """
    try:
        if weights not in FORMATS:
            names = ", ".join(map(repr, FORMATS))
            raise ValueError(f"quantized_linear: weights must be one of {names}, got {weights!r}")
        if activations not in ACTIVATIONS:
            raise ValueError(
                f"quantized_linear: activations must be None or 'int8', got {activations!r}"
            )
        if activation is not None and activation not in _ACTIVATIONS:
            names = ", ".join(map(repr, _ACTIVATIONS))
            raise ValueError(
                f"quantized_linear: activation must be None or one of {names}, got {activation!r}"
            )
        (input,) = _autocast(input)
        format = Format[weights.upper()]
        quantizes = activations is not None
        compute = _quantized_linear.quantized_linear
        beside = None
        if outlier_columns is not None or outliers is not None:
            _check_outliers(scales, outlier_columns, outliers)
            input, beside = _outliers_apart(input, outlier_columns, outliers)
        if input_order is not None:
            input = _in_order(input, input_order)
        if beside is not None or activation is not None and is_differentiated(input, bias):
            of_weight = codes, scales, shifts, bias, beside, format, Activation.NONE, quantizes
            output = _composed(compute(input, *of_weight), activation, 0.0, residual)
            return output.to((input if residual is None else residual).dtype)
        kind = _ACTIVATIONS.get(activation, Activation.NONE)
        return compute(input, codes, scales, shifts, bias, residual, format, kind, quantizes)
    except Exception:
        check_arguments(quantized_linear, locals())
        raise


def _in_order(input: Tensor, order: Tensor) -> Tensor:
    """
    Raises:
        RuntimeError: order has another shape or dtype.
    """
    _check_indices("input_order", order)
    if order.shape != input.shape[-1:]:
        raise RuntimeError(
            f"quantized_linear: input_order must have shape {tuple(input.shape[-1:])}, "
            f"(in_features,), got {tuple(order.shape)}"
        )
    return input.index_select(-1, order)


def _outliers_apart(input: Tensor, columns: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Input with 0 in some columns, and the product of these, in float32 if input has 16 bits."""
    wide = torch.promote_types(input.dtype, torch.float32)
    apart = input.index_select(-1, columns).to(wide)
    beside = linear(apart, outliers.to(wide), precision="highest")
    return input.index_fill(-1, columns.long(), 0), beside


def _check_outliers(scales: Tensor, columns: Tensor | None, outliers: Tensor | None) -> None:
    """
    Raises:
        RuntimeError: one of both is missing, or has another shape or dtype.
    """
    for name, other, given in (
        ("outlier_columns", "outliers", columns),
        ("outliers", "outlier_columns", outliers),
    ):
        if given is None:
            raise RuntimeError(f"quantized_linear: {name} must be given beside {other}, got None")
    _check_indices("outlier_columns", columns)
    expected = (scales.shape[-1], *columns.shape)
    if outliers.shape != expected:
        raise RuntimeError(
            f"quantized_linear: outliers must have shape {expected}, (out_features, count), got "
            f"{tuple(outliers.shape)}"
        )


def _check_indices(name: str, indices: Tensor) -> None:
    """
    Raises:
        RuntimeError: indices are not a row of whole numbers.
    """
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        dtype = str(indices.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"quantized_linear: {name} must be int32 or int64 of one dimension, got shape "
            f"{tuple(indices.shape)} of {dtype}"
        )
