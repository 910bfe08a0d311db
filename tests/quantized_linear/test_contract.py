"""What quantised linear layers promise beside values: bits, layouts, errors."""

import pytest
import torch

import onepass
from onepass import functional
from onepass.reference.quantized_linear import Format
from tests.quantized_linear.cases import BF16, F32, F64, LAYOUTS, layout_id, quantized
from tests.support.refused import assert_refused

OPS = torch.ops.onepass
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)


def ours(x, own, layout, bias=None, **options):
    return functional.quantized_linear(x, *own, bias, weights=layout[0].name.lower(), **options)


@layouts
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype, layout):
    """Within the few rows, and within the many; nor on the threads."""
    own = quantized(*layout, 200, 384)
    x, threads = torch.randn(64, 384).to(dtype), torch.get_num_threads()
    try:
        for few, counts in ((ours(x[:1], own, layout), (2, 3, 5, 8, 12)), (None, (17, 33, 64))):
            alone = few if few is not None else ours(x[:20], own, layout)[:1]
            for count in counts:
                for torch_threads in (1, 3):
                    torch.set_num_threads(torch_threads)
                    assert torch.equal(ours(x[:count], own, layout)[:1], alone), count
    finally:
        torch.set_num_threads(threads)


def test_whole_numbers_have_the_same_bits_in_any_call():
    """With input of 8 bits, also across the boundary between few rows and many."""
    own, x = quantized(Format.INT8, None, 200, 384), torch.randn(64, 384)
    whole, threads = ours(x, own, (Format.INT8, None), activations="int8"), torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            for rows in (1, 2, 5, 13, 40):
                found = ours(x[:rows], own, (Format.INT8, None), activations="int8")
                assert torch.equal(found, whole[:rows])
    finally:
        torch.set_num_threads(threads)


@layouts
def test_input_in_any_layout(layout):
    own = quantized(*layout, 40, 192)
    whole = torch.randn(2, 192, 9, 3)
    for x in (whole.transpose(1, 3), whole[..., 0].mT, whole[:1, :, :, 1].mT, whole[0, :, 0, 0]):
        expected = ours(x.contiguous(), own, layout)
        assert torch.equal(ours(x, own, layout), expected)


def test_empty():
    for rows, out_features, in_features in ((0, 8, 64), (3, 0, 64), (3, 8, 0)):
        layer = onepass.nn.QuantizedLinear(in_features, out_features)
        x = torch.randn(rows, in_features, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == (rows, out_features) and not y.any() and x.grad.shape == x.shape


def test_autocast_decides_the_dtype():
    layer = onepass.nn.QuantizedLinear(64, 32, weights="nf4")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 64)).dtype is BF16


def test_gradients_are_of_input_bias_and_residual_alone():
    own = quantized(Format.INT4, 64, 32, 64)
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="^quantized_linear: scales must not require a gradient"):
        ours(x, own._replace(scales=own.scales.requires_grad_()), (Format.INT4, 64))
    op = OPS.quantized_linear
    message = "activation_kind must be 0 where a gradient is wanted, got 2"
    with pytest.raises(RuntimeError, match=f"^quantized_linear: {message}"):
        op(x, *quantized(Format.INT4, 64, 32, 64), None, None, Format.INT4, 2, False)


X, (C, S, T) = torch.randn(3, 64), quantized(Format.INT4, 32, 20, 64)
WRONG = {
    "input must have at least one dimension, got ()": dict(input=torch.tensor(1.0)),
    "scales must have shape (groups, out_features), got (20,)": dict(scales=S[0], shifts=None),
    "scales must have one group, or groups of a multiple of 8 of the in_features, 64, got "
    "(3, 20)": dict(scales=torch.ones(3, 20), shifts=None),
    "scales must have dtype float32, bfloat16 or float16 beside input, got float64": (
        dict(scales=S.double())
    ),
    "shifts must have shape (2, 20), got (1, 20)": dict(shifts=T[:1]),
    "shifts must have dtype float32 like scales, got bfloat16": dict(shifts=T.bfloat16()),
    "codes must be an int32 tensor of shape (2, 8, 16) for int4, got (1, 8, 16) of int32": (
        dict(codes=C[:1])
    ),
    "codes must be an int32 tensor of shape (2, 8, 16) for int4, got (2, 8, 16) of float32": (
        dict(codes=C.float())
    ),
    "codes must be an int32 tensor of shape (2, 16, 16) for int8, got (2, 8, 16) of int32": (
        dict(weights="int8")
    ),
    "bias must have shape (20,), got (19,)": dict(bias=torch.ones(19)),
    "residual must have shape (3, 20), got (2, 20)": dict(residual=torch.ones(2, 20)),
    "quantize_input must be False unless int8 codes have one scale for each row, got int4 in "
    "groups of 32": dict(activations="int8"),
}
NO_CHOICE = {
    "weights must be one of 'int8', 'int4', 'nf4', 'mxfp4', got 'int3'": dict(weights="int3"),
    "activations must be None or 'int8', got 'int4'": dict(activations="int4"),
    "activation must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh', got 'tanh'": (
        dict(activation="tanh")
    ),
}


def test_messages():
    right = dict(input=X, codes=C, scales=S, shifts=T, weights="int4")
    assert_refused(functional.quantized_linear, "quantized_linear", right, WRONG)
    for message, given in NO_CHOICE.items():
        with pytest.raises(ValueError) as error:
            functional.quantized_linear(**right | given)
        assert str(error.value) == f"quantized_linear: {message}"
    right = dict(codes=C, scales=S, shifts=T, bias=None, residual=None)
    right |= dict(format_kind=1, activation_kind=0, quantize_input=False, input=X)
    wrong = {"format_kind must be one of 0 to 3, got 4": dict(format_kind=4)}
    wrong |= {"activation_kind must be one of 0 to 4, got 5": dict(activation_kind=5)}
    assert_refused(OPS.quantized_linear_forward, "quantized_linear", right, wrong)
    right = dict(codes=C, scales=S, shifts=T, in_features=64, format_kind=1)
    right |= dict(input_dtype=F32, bias_dtype=F32, doutput=torch.ones(3, 20))
    wrong = {
        "doutput must have a last dimension of 20, the scales' out_features, got shape (3, 19)": (
            dict(doutput=torch.ones(3, 19))
        ),
        "in_features must not be negative, got -1": dict(in_features=-1),
        "input_dtype must have dtype float32, bfloat16 or float16 beside doutput, got float64": (
            dict(input_dtype=F64)
        ),
    }
    assert_refused(OPS.quantized_linear_backward, "quantized_linear_backward", right, wrong)
