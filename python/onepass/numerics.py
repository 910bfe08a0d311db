"""The rule for when a result is right, used by the tests, swap's probe, verify, doctor and bench.

With `ref` the reference computed in float64 and `base` the same formula computed by stock PyTorch
in the result's own dtype,

    max|ours - ref| <= 2 * max|base - ref| + ulp(dtype, max|ref|)

so an operator may be at most about as wrong as PyTorch is, for every shape and dtype, without a
tolerance to tune. float64 results are held to 1e-11 of max|ref| instead. Half an ulp of bfloat16
hides a scaling error of 0.4 %, so a 16-bit result of many elements must be unbiased too:

    |mean((ours - ref) * sign(ref))| / mean|ref| <= 2 * (the same of base) + 0.02 * eps(dtype)

Many are 2,048, counted as (sum|ref|)^2 / sum(ref^2): where a few large ones are nearly all of the
mean, their rounding errors do not cancel. 4,096 normally distributed elements count as 2,608.

If one draw has too few elements (a single column, say), pass lists of draws: they are pooled. The
order of torch's sums depends on its threads, and with it the error of a sum of a few rows, up to
twofold: swap's probe and the tests compute `base` on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
FLOAT64_RELATIVE = 1e-11
BIAS_MIN_ELEMENTS = 2048
BIAS_ULPS = 0.02

# Operators whose definition differs from torch's, so that `base` cannot be torch's function alone,
# with the reasons.
EXCEPTIONS = {
    "dropout scaling": (
        "kept elements are scaled by 65536 / (65536 - round(65536 p)), the inverse of the "
        "quantised keep probability, not by 1 / (1 - p): the expectation is then exact for 16 "
        "random bits per element"
    ),
    "attention gradients": (
        "they take sum(P dP) from the saved output, rounded to its dtype, as the square is not "
        "kept; autograd of the formula keeps the sum as it was, so that gradients of a row with "
        "one key cancel exactly. On CUDA their P is exp(score - lse) in float32: of thousands of "
        "keys with scores near 0 the difference is off by more than the rule allows"
    ),
    "log-sum-exp of 16 bits on CUDA": (
        "it is float32, but a tensor core cuts off its sums of 16 columns, which the formula in "
        "float32 does not: it is held to the formula with such sums"
    ),
    "attention in TF32": (
        "where torch may take TF32 for matrix products on CUDA, float32 is held to the formula "
        "whose products are of TF32; torch's own fused function may take more exact ones"
    ),
}


@dataclass(frozen=True)
class Comparison:
    """The rule applied to one result: errors, their bounds, and the verdict."""

    max_error: float
    bound: float
    bias: float  # 0 if there are too few elements, or the dtype is too precise
    bias_bound: float
    ok: bool
    text: str

    def __str__(self) -> str:
        return self.text


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """The distance of neighbouring numbers of `dtype` at `magnitude`."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal
    exponent = math.floor(math.log2(max(abs(magnitude), smallest)))
    return 2.0**exponent * info.eps


def compare(
    ours: Tensor | Sequence[Tensor],
    ref: Tensor | Sequence[Tensor],
    base: Tensor | Sequence[Tensor],
) -> Comparison:
    """Compares `ours` with `ref`, by the error of `base`.

    Args:
        ours: the result, in its dtype; or several draws of it.
        ref: the same in float64.
        base: the same by stock PyTorch; its dtype does not matter.

    Returns:
        A Comparison. Infinities and NaNs must be where the reference, rounded to ours' dtype, has
        them.
    """
    ours, ref, base = (_draws(tensors) for tensors in (ours, ref, base))
    dtype = ours[0].dtype
    for mine, definition, stock in zip(ours, ref, base, strict=True):
        if not mine.shape == definition.shape == stock.shape:
            shapes = f"{tuple(mine.shape)}, {tuple(definition.shape)}, {tuple(stock.shape)}"
            return Comparison(math.inf, 0.0, 0.0, 0.0, False, f"shapes differ: {shapes}")
    mine, definition, stock = (
        torch.cat([tensor.detach().double().flatten().to(ours[0].device) for tensor in tensors])
        for tensors in (ours, ref, base)
    )
    rounded = definition.to(dtype)
    # A sum that is finite has no other terms.
    if not all(math.isfinite(tensor.sum(dtype=torch.float64)) for tensor in (mine, rounded, stock)):
        rounded = rounded.double()
        same_kind = (mine == rounded) | (mine.isnan() & rounded.isnan())
        same_kind |= mine.isfinite() & rounded.isfinite()
        if not bool(same_kind.all()):
            count = int((~same_kind).sum())
            return Comparison(
                math.inf, 0.0, 0.0, 0.0, False, f"{count} elements not finite like ref"
            )
        finite = mine.isfinite() & definition.isfinite() & stock.isfinite()
        mine, definition, stock = mine[finite], definition[finite], stock[finite]
    if mine.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, 0.0, True, "nothing finite to compare")

    largest, error = _largest(definition), _largest(mine - definition)
    if dtype is torch.float64:
        bound = FLOAT64_RELATIVE * largest + ulp(dtype, 0.0)
    else:
        bound = FACTOR * _largest(stock - definition) + ulp(dtype, largest)
    bias = bias_bound = 0.0
    if dtype.itemsize == 2 and largest > 0 and _equal_elements(definition) >= BIAS_MIN_ELEMENTS:
        mean = float(definition.abs().mean())
        bias = _bias(mine, definition, mean)
        bias_bound = FACTOR * _bias(stock, definition, mean) + BIAS_ULPS * torch.finfo(dtype).eps
    ok = error <= bound and bias <= bias_bound
    text = f"error {error:.2e} of at most {bound:.2e}"
    if bias_bound:
        text += f", bias {bias:.2e} of at most {bias_bound:.2e}"
    return Comparison(error, bound, bias, bias_bound, ok, text)


def assert_close(
    ours: Tensor | Sequence[Tensor],
    ref: Tensor | Sequence[Tensor],
    base: Tensor | Sequence[Tensor],
    case: str = "",
) -> None:
    """Raises AssertionError with the errors and `case` unless `compare` is ok."""
    result = compare(ours, ref, base)
    if not result.ok:
        raise AssertionError(f"{case + ': ' if case else ''}{result.text}")


def _draws(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _largest(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, math.inf))


def _equal_elements(ref: Tensor) -> float:
    """How many elements of one size would have its sums of |ref| and of ref^2."""
    size = ref.abs()
    return float(size.sum()) ** 2 / float(size.square().sum())


def _bias(result: Tensor, ref: Tensor, mean: float) -> float:
    return abs(float(((result - ref) * ref.sign()).mean())) / mean
