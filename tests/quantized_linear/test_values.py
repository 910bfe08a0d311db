"""Values and gradients of quantised linear layers, by the numerics rule; packing and codes."""

import math

import pytest
import torch

from onepass import functional
from onepass.reference import quantized_linear as reference
from onepass.reference.quantized_linear import Format
from tests.quantized_linear.cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    check,
    layout_id,
    quantized,
)

pytestmark = pytest.mark.isa

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
FEW = (1, 2, 3, 4, 6, 8, 12, 16)


@layouts
@dtypes
@pytest.mark.parametrize("rows", [*FEW, 17, 40])
@pytest.mark.grid(2)
def test_values_and_gradients(rows, dtype, layout):
    """Rows that are few and rows that are many, with a tail of columns in the last panel."""
    check(layout, (rows, 201, 192), dtype, scales=F64 if dtype is F64 else F32)


@layouts
@pytest.mark.parametrize("out_features", [1, 5, 16, 17, 31, 64, 100])
@pytest.mark.grid
def test_tails_of_columns(out_features, layout):
    for rows in (1, 5, 20):
        check(layout, (rows, out_features, 384), draws=24 // min(out_features, 8))


@pytest.mark.parametrize("in_features", [1, 2, 3, 5, 8, 63, 65, 100, 250, 1001])
@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
@pytest.mark.grid
def test_rows_of_any_length_in_one_group(format, in_features):
    for rows in (1, 7, 30):
        check((format, None), (rows, 64, in_features), draws=6)


@pytest.mark.parametrize("group", [8, 24, 40, 64, 120])
@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
@pytest.mark.grid
def test_groups(format, group):
    for rows in (1, 4, 30):
        check((format, group), (rows, 64, 4 * group), draws=6)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_shifts(format, shifts):
    for rows in (1, 6, 30):
        check((format, 64), (rows, 96, 256), shifts=shifts)


@layouts
@pytest.mark.parametrize("scales", [BF16, F16], ids=str)
def test_scales_of_16_bits(scales, layout):
    for rows in (2, 30):
        check(layout, (rows, 96, 256), scales=scales)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.grid
def test_epilogue(dtype, activation):
    for rows in (2, 40):
        check((Format.INT4, 64), (rows, 96, 256), dtype, activation, residual=True)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("in_features", [4, 37, 768, 1030])
@pytest.mark.grid
def test_input_of_8_bits(in_features, dtype):
    """torch's product of quantised rows in float32: what is compared is the sums."""
    torch.manual_seed(0)
    own = quantized(Format.INT8, None, 77, in_features)
    for rows in (1, 13, 100):
        x, bias = torch.randn(rows, in_features).to(dtype), torch.randn(77)
        found = functional.quantized_linear(x, *own, bias, weights="int8", activations="int8")
        given = (x.double(), *own, bias.double(), Format.INT8)
        expected = reference.quantized_linear(*given, quantize_input=True)
        # Sums of codes are exact; four factors and a sum are rounded, and then the result.
        size = (x.float().abs().amax(-1, keepdim=True) * own.scales * 127 * in_features).double()
        bound = 4 * torch.finfo(F32).eps * size + torch.finfo(dtype).eps * expected.abs()
        assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_rows_that_are_not_finite(value):
    """Such a row is not quantised; others have the bits that they have without it."""
    own = quantized(Format.INT8, None, 40, 64)
    x = torch.randn(30, 64)
    clean = functional.quantized_linear(x, *own, weights="int8", activations="int8")
    x[7, 5] = value
    found = functional.quantized_linear(x, *own, weights="int8", activations="int8")
    weight = reference.dequantize(*own, Format.INT8, 64)
    assert torch.equal(found[torch.arange(30) != 7], clean[torch.arange(30) != 7])
    expected = (x[7].double() @ weight.t().double()).float()
    torch.testing.assert_close(found[7], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_input_that_is_not_finite(value):
    """As torch's product with the dequantised weight, also where a code or a shift is 0."""
    for layout, shifts in (((Format.INT4, 32), None), ((Format.NF4, 32), True)):
        own = quantized(*layout, 40, 64, shifts=shifts)
        weight = reference.dequantize(*own, layout[0], 64)
        for rows in (3, 30):
            x = torch.randn(rows, 64)
            x[1, 5] = value
            found = functional.quantized_linear(x, *own, weights=layout[0].name.lower())
            torch.testing.assert_close(found, x @ weight.t(), equal_nan=True)


@pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
def test_codes_come_back_from_words(format):
    least, most = {Format.INT8: (-127, 128), Format.INT4: (-8, 8)}.get(format, (0, 16))
    kind = torch.uint8 if format in (Format.NF4, Format.MXFP4) else torch.int8
    for shape in ((1, 1), (16, 8), (17, 9), (37, 250)):
        codes = torch.randint(least, most, shape, dtype=kind)
        words = reference.pack(codes, format)
        assert torch.equal(reference.unpack(words, format, *shape), codes)


@layouts
def test_each_code_is_the_nearest(layout):
    """No other code would be nearer to its number."""
    format, group = layout
    torch.manual_seed(0)
    weight = torch.randn(24, 192)
    own, error = reference.quantize(weight, format, group or 192, F32)
    near = reference.dequantize(*own, format, 192, F64)
    codes = reference.unpack(own.codes, format, 24, 192)
    candidates = range(-127, 128) if format is Format.INT8 else range(*codes_of(format))
    distance = (near - weight).abs()
    for code in candidates:
        words = reference.pack(torch.full_like(codes, code), format)
        other = reference.dequantize(words, *own[1:], format, 192, F64)
        assert (distance <= (other - weight).abs() + 1e-6).all()
    expected = float((near - weight).norm() / weight.norm())
    assert abs(error - expected) <= 1e-4 * expected


@pytest.mark.parametrize("format", [Format.NF4, Format.MXFP4], ids=lambda format: format.name)
def test_codes_of_middles_between_values(format):
    """And of their neighbours: a code is the number of middles below, of mxfp4 by magnitude."""
    values = reference.values_of(format).unique()
    middles = (values[1:] + values[:-1]) / 2
    most = float(values.max())
    numbers = torch.cat([middles, values, torch.linspace(-most, most, 1001)])
    ends = (torch.tensor(math.inf), torch.tensor(-math.inf))
    numbers = torch.cat([numbers, *(torch.nextafter(numbers, end) for end in ends)])
    numbers = numbers[numbers.abs() <= most].split(62)
    weight = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
    weight = torch.nn.functional.pad(weight, (0, 64 - weight.shape[1]))
    weight[:, 62], weight[:, 63] = most, -most  # the scale is 1
    own, _ = reference.quantize(weight, format, 64, F32)
    assert torch.equal(own.scales, torch.ones_like(own.scales))
    if format is Format.NF4:
        expected = (weight[..., None] > middles).sum(-1)
    else:
        expected = (weight[..., None].abs() > middles[middles > 0]).sum(-1) + 8 * (weight < 0)
    codes = reference.unpack(own.codes, format, *weight.shape)
    assert torch.equal(codes.long(), expected)


def codes_of(format):
    return (-8, 8) if format is Format.INT4 else (0, 16)


def test_nf4_is_the_table_of_the_paper():
    """The quantiles of appendix E of QLoRA, to the digits that it prints."""
    printed = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    words = reference.pack(torch.arange(16, dtype=torch.uint8)[None], Format.NF4)
    scales = torch.ones(1, 1)
    found = functional.quantized_linear(torch.eye(16), words, scales, weights="nf4")
    assert found.flatten().tolist() == torch.tensor(printed).tolist()


def test_mxfp4_is_e2m1():
    words = reference.pack(torch.arange(16, dtype=torch.uint8)[None], Format.MXFP4)
    found = functional.quantized_linear(torch.eye(16), words, torch.ones(1, 1), weights="mxfp4")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found.flatten().tolist() == [*values, *(-value for value in values)]


def test_groups_of_zeros_and_of_one_number():
    for format in Format:
        weight = torch.zeros(3, 128)
        weight[1, 64:], weight[2] = 0.25, -0.25
        own, error = reference.quantize(weight, format, 64, F32)
        assert torch.equal(reference.dequantize(*own, format, 128), weight), format
        assert error == 0.0
