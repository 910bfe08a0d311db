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
    most, least = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    largest, shift = torch.maximum(most, -least), None
    if format is Format.INT4:
        scale = ((most - least) / 15).to(dtype).float()
        shift = (least + 8 * scale).to(dtype).float()
        codes = numbers = _ratio(groups - shift, scale).round_().clamp_(-8, 7)
    elif format is Format.INT8:
        scale = (largest / _MOST_CODE).to(dtype).float()
        codes = numbers = _ratio(groups, scale).round_().clamp_(-_MOST_CODE, _MOST_CODE)
    else:
        if format is Format.MXFP4:
            # largest is 0.5 to 1 times 2^(exponent + 3)
            exponent = torch.frexp(largest).exponent - 3
            scale = torch.ldexp((largest > 0).float(), exponent)
        else:
            scale = largest.to(dtype).float()
        codes, numbers = _nearest(_ratio(groups, scale), format)
    codes = codes.to(torch.int8)
    error = (numbers.mul_(scale) if shift is None else numbers.mul_(scale).add_(shift)).sub_(groups)
    of_group = [None if x is None else x.squeeze(2).t().to(dtype) for x in (scale, shift)]
    squares = (float(torch.dot(x.flatten(), x.flatten())) for x in (error, groups))
    return pack(codes.flatten(1), format), *of_group, *squares


def _ratio(numbers: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return numbers * inverse.clamp_(max=torch.finfo(torch.float32).max)


class _Steps(NamedTuple):
    """Numbers by the nearest code's: `codes` and their `values` in the order of numbers, and cells
    of equal width, with at most one step from a code to the next in each. Cell i has the number
    of steps `below` it, and the last number before its own step, `until`, or Inf."""

    cells_of_one: float
    first: float  # cell of 0
    below: Tensor
    until: Tensor
    values: Tensor
    codes: Tensor


@functools.cache
def _steps_of(format: Format) -> _Steps:
    """Steps are in the middle between two values, which has the code nearer to 0 of mxfp4, and the
    lower one of nf4."""
    values = values_of(format)
    if format is Format.NF4:
        cells_of_one, first, codes = 16.0, 16.0, list(range(16))
        until = (values[1:] + values[:-1]) / 2
    else:
        cells_of_one, first, codes = 4.0, 32.5, [*range(15, 7, -1), *range(8)]
        middles = (values[1:8] + values[:7]) / 2
        until = torch.cat([-middles.flip(0), values[:1], middles])
        until[:8] = torch.nextafter(until[:8], values.new_tensor(-math.inf))
    cell = (until * cells_of_one + first).long()
    untils = values.new_full((int(2 * first) + 1,), math.inf)
    untils[cell] = until
    below = torch.zeros_like(untils, dtype=torch.int32)
    below[1:] = untils.isfinite().cumsum(0)[:-1]
    codes = values.new_tensor(codes, dtype=torch.int8)
    return _Steps(cells_of_one, first, below, untils, values[codes.int()], codes)


def _nearest(numbers: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The codes of the nearest values, and these."""
    steps, device = _steps_of(format), numbers.device
    below, until, values, codes = (table.to(device) for table in steps[2:])
    most = len(below) - 1
    cell = numbers.mul(steps.cells_of_one).add_(steps.first).clamp_(0, most).int().flatten()
    is_above = until.index_select(0, cell).view_as(numbers).sub_(numbers)
    is_above = is_above.view(torch.int32).flatten()
    is_above >>= 31  # -1 where the difference is negative
    rank = below.index_select(0, cell).sub_(is_above)
    found, near = (table.index_select(0, rank).view_as(numbers) for table in (codes, values))
    return found, near


@functools.cache
def values_of(format: Format) -> Tensor:
    """The float32 numbers of codes 0 to 15."""
    return torch.tensor(_VALUES[format], dtype=torch.float32, device="cpu")


def _places(format: Format) -> list[int]:
    """The place along in_features of each code in a word."""
    return list(range(4)) if format is Format.INT8 else [2 * (i % 4) + i // 4 for i in range(8)]


def pack(codes: Tensor, format: Format) -> Tensor:
    """Words of the codes (out_features, in_features), which are int8 or uint8."""
    rows, columns = codes.shape
    padding = (0, -columns % (32 // format.bits), 0, -rows % PANEL)
    if any(padding):
        codes = F.pad(codes, padding)
    if format is Format.INT8:
        words = codes.contiguous().view(torch.int32)
    else:
        words = _words_of_nibbles(codes.contiguous().view(torch.int64))
    return words.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _words_of_nibbles(codes: Tensor) -> Tensor:
    """int32 words of 8 codes, which are bytes of an int64, so that all move at once."""
    pairs = codes & 0x0F0F0F0F0F0F0F0F
    pairs |= pairs >> 12  # bytes 0, 1, 4 and 5: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7
    even, odd = pairs & 0x000000FF000000FF, pairs & 0x0000FF000000FF00
    even |= even >> 24
    even &= 0xFFFF
    even |= ((odd << 8) | (odd >> 16)) & 0xFFFF0000
    return even.view(torch.int32)[..., ::2]


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


def in_features_order(
    weight: Tensor,
    input_order: Tensor | None = None,
    outlier_columns: Tensor | None = None,
    outliers: Tensor | None = None,
) -> Tensor:
    """The weight by features of the input, from one whose column i is feature input_order[i], and
    whose `outlier_columns` are given."""
    if input_order is not None:
        weight = torch.empty_like(weight).index_copy_(1, input_order.long(), weight)
    if outlier_columns is not None:
        weight = weight.index_copy(1, outlier_columns.long(), outliers.to(weight.dtype))
    return weight


def scales_of_codes(
    codes: Tensor, codebook: Tensor, scales: Tensor, offset: Tensor | float, block: int = 256
) -> Tensor:
    """The float32 scales of doubly quantised ones (QLoRA): ``codebook[code] * scale + offset``.

    Args:
        codes: uint8, of any shape; bitsandbytes: `quant_state.absmax`.
        codebook: (256,); `quant_state.state2.code`.
        scales: one for each `block` codes that follow each other; `quant_state.state2.absmax`.
        offset: `quant_state.offset`.

    Returns:
        Tensor of codes' shape. bitsandbytes' are those of groups in the order of the weight's
        elements: ``scales.view(out_features, -1).t()`` are (groups, out_features).
    """
    numbers = codebook.float()[codes.flatten().int()]
    of_each = scales.float().repeat_interleave(block)[: numbers.numel()]
    return (numbers * of_each + offset).view(codes.shape)


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
