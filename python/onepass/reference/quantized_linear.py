"""Quantised weights, and the linear layer that multiplies with them, in plain PyTorch.

A weight (out_features, in_features) is ``scale * value(code) + shift``, with a scale, and perhaps a
shift, for each group of neighbours along in_features. Their layout is that of
csrc/ops/quantized_linear.h.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.reference.linear import ACTIVATIONS
from onepass.reference.products import quantize_rows

PANEL = 16  # rows of the weight whose words lie side by side
_MOST_CODE = 127
_NUMBERS_AT_ONCE = 1 << 17  # numbers of a weight that are quantised together, in a near cache


class Format(enum.IntEnum):
    """Formats of codes, by the numbers of csrc/ops/quantized_linear.h."""

    INT8 = 0
    INT4 = 1
    NF4 = 2
    MXFP4 = 3

    @property
    def bits(self) -> int:
        return 8 if self is Format.INT8 else 4


# The numbers of codes 0 to 15. nf4: quantiles of a normal distribution (Dettmers et al., "QLoRA",
# 2023), as bitsandbytes has them. mxfp4: a sign, two bits of exponent and one of mantissa (OCP
# Microscaling Formats, 2023).
_VALUES = {
    Format.INT4: (*range(8), *range(-8, 0)),
    Format.NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    Format.MXFP4: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    + (-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip


class QuantizedWeight(NamedTuple):
    """A weight's words (panels, words along in_features, 16) in int32, scales and shifts (groups,
    out_features); shifts are None where they are 0."""

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None


def quantize(
    weight: Tensor, format: Format, group_size: int, dtype: torch.dtype
) -> tuple[QuantizedWeight, float]:
    """The weight, with scales and shifts in `dtype`, and the norm of its error as a part of the
    weight's. Each code is the nearest to its number:

    - int8: the group's largest magnitude is code 127;
    - int4: its least and its largest number are codes -8 and 7, so it has a shift;
    - nf4: its largest magnitude is 1;
    - mxfp4: the scale is the power of two with which the largest magnitude is between 4 and 8.
    """
    rows = max(_NUMBERS_AT_ONCE // max(weight.shape[1], 1) // PANEL, 1) * PANEL
    parts = [_quantized(part, format, group_size, dtype) for part in weight.detach().split(rows)]
    codes, scales, shifts, errors, squares = zip(*parts, strict=True)
    whole = QuantizedWeight(
        torch.cat(codes), torch.cat(scales, 1), None if shifts[0] is None else torch.cat(shifts, 1)
    )
    return whole, math.sqrt(sum(errors) / sum(squares)) if sum(squares) else 0.0


def _quantized(weight, format, group_size, dtype):
    groups = weight.float().unflatten(1, (-1, group_size))
    shift = None
    if format is Format.INT4:
        least, most = groups.aminmax(dim=2, keepdim=True)
        scale = ((most - least) / 15).to(dtype).float()
        shift = (least + 8 * scale).to(dtype).float()
        codes = _ratio(groups - shift, scale).round_().clamp_(-8, 7)
        error = codes * scale + shift - groups
        codes = codes.to(torch.int8)
    elif format is Format.INT8:
        scale = (groups.abs().amax(2, keepdim=True) / _MOST_CODE).to(dtype).float()
        codes = _ratio(groups, scale).round_().clamp_(-_MOST_CODE, _MOST_CODE)
        error = codes * scale - groups
        codes = codes.to(torch.int8)
    else:
        largest = groups.abs().amax(2, keepdim=True)
        if format is Format.MXFP4:
            exponent = (
                torch.frexp(largest).exponent - 3
            )  # largest is 0.5 to 1 times 2^(exponent + 3)
            scale = torch.ldexp((largest > 0).float(), exponent)
        else:
            scale = largest.to(dtype).float()
        codes = _nearest(_ratio(groups, scale), format)
        error = torch.take(values_of(format).to(codes.device), codes.long()) * scale - groups
    of_group = [None if x is None else x.squeeze(2).t().to(dtype) for x in (scale, shift)]
    squares = (float(x.square_().sum()) for x in (error, groups.clone()))
    return pack(codes.flatten(1), format), *of_group, *squares


def _ratio(numbers: Tensor, scale: Tensor) -> Tensor:
    return numbers * torch.where(scale == 0, 0.0, 1 / scale)


def _nearest(numbers: Tensor, format: Format) -> Tensor:
    """The codes of the nearest values: how many of the middles between values lie below."""
    values = values_of(format).unique()  # sorted; mxfp4 has two zeros
    if format is Format.MXFP4:
        values = values[values >= 0]
    size = numbers.abs() if format is Format.MXFP4 else numbers
    codes = torch.zeros_like(numbers, dtype=torch.uint8)
    for middle in ((values[1:] + values[:-1]) / 2).tolist():
        codes += (size > middle).view(torch.uint8)
    if format is Format.MXFP4:
        codes += 8 * (numbers < 0).view(torch.uint8)
    return codes


@functools.cache
def values_of(format: Format) -> Tensor:
    """The float32 numbers of codes 0 to 15."""
    return torch.tensor(_VALUES[format], dtype=torch.float32, device="cpu")


def _places(format: Format) -> list[int]:
    """The place along in_features of each code in a word."""
    return list(range(4)) if format is Format.INT8 else [2 * (i % 4) + i // 4 for i in range(8)]


def pack(codes: Tensor, format: Format) -> Tensor:
    """Words of the codes (out_features, in_features), which are int8 or uint8."""
    places = _places(format)
    count = len(places)
    rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % count, 0, -rows % PANEL))
    codes = codes.view(torch.uint8).reshape(-1, PANEL, codes.shape[1] // count, count)
    by_word = codes.transpose(1, 2)[..., places]
    if format is not Format.INT8:
        by_word = (by_word[..., ::2] & 15) | (by_word[..., 1::2] << 4)
    return by_word.contiguous().view(torch.int32).squeeze(-1)


def unpack(words: Tensor, format: Format, out_features: int, in_features: int) -> Tensor:
    """The codes (out_features, in_features) of words: int8, and uint8 of nf4 and mxfp4."""
    places = _places(format)
    bits = format.bits
    shifts = [32 - bits - bits * places.index(k) for k in range(len(places))]
    by_code = torch.stack([(words << shift) >> (32 - bits) for shift in shifts], -1)
    codes = by_code.transpose(1, 2).flatten(0, 1).flatten(1)[:out_features, :in_features]
    if format in (Format.NF4, Format.MXFP4):
        return (codes & 15).to(torch.uint8)
    return codes.to(torch.int8)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    shifts: Tensor | None,
    format: Format,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight (out_features, in_features) in `dtype`."""
    numbers = unpack(codes, format, scales.shape[1], in_features)
    if format in (Format.NF4, Format.MXFP4):
        numbers = values_of(format).to(numbers.device)[numbers.int()]
    by_group = numbers.to(dtype).unflatten(1, (scales.shape[0], -1))
    weight = by_group * scales.t()[..., None].to(dtype)
    if shifts is not None:
        weight = weight + shifts.t()[..., None].to(dtype)
    return weight.flatten(1)


def quantized_linear(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    shifts: Tensor | None,
    bias: Tensor | None,
    format: Format,
    activation: str | None = None,
    residual: Tensor | None = None,
    quantize_input: bool = False,
) -> Tensor:
    """``residual + activation(input weight^T + bias)``; with quantize_input each row of input is
    quantised to 8 bits."""
    weight = dequantize(codes, scales, shifts, format, input.shape[-1], input.dtype)
    if quantize_input:
        input = quantize_rows(input)
    output = F.linear(input, weight, bias)
    if activation is not None:
        output = ACTIVATIONS[activation](output)
    return output if residual is None else residual + output
