"""The linear layer whose weight is quantised and frozen."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import quantized_linear as _quantized_linear
from onepass._ops.differentiation import is_differentiated
from onepass._ops.linear import Activation
from onepass.functional.attention import _autocast
from onepass.functional.linear import _ACTIVATIONS, _composed
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
        if activation is not None and is_differentiated(input, bias):
            of_weight = codes, scales, shifts, bias, None, format, Activation.NONE, quantizes
            return _composed(compute(input, *of_weight), activation, 0.0, residual)
        kind = _ACTIVATIONS.get(activation, Activation.NONE)
        return compute(input, codes, scales, shifts, bias, residual, format, kind, quantizes)
    except Exception:
        check_arguments(quantized_linear, locals())
        raise
