"""Values and gradients of group norm, against torch's by the numerics rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.emulator.executors import everywhere
from tests.group_norm.cases import (
    BF16,
    F16,
    F32,
    F64,
    NAMES,
    RAW,
    activations,
    check,
    dtypes,
    make,
    orders,
    results,
)
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


@everywhere
@dtypes
@activations
@orders
def test_values_and_gradients(executor, last, activation, dtype):
    # Channels that are no multiple of a vector, a tail of pixels, and draws for pooled errors.
    draws = range(executor.draws)
    check(*(make((2, 12, 5, 13), 3, dtype, activation, last=last, offset=2, seed=s) for s in draws))


@everywhere
@orders
@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
def test_without_weight_or_bias(executor, weight, bias, last):
    draws = range(executor.draws)
    check(*(make((2, 8, 3, 11), 2, last=last, weight=weight, bias=bias, seed=s) for s in draws))


@everywhere
@orders
@pytest.mark.parametrize("groups", [1, 4, 24], ids=["one", "some", "each channel"])
def test_numbers_of_groups(groups, last):
    check(*(make((2, 24, 6, 7), groups, last=last, seed=seed) for seed in range(12)))


@everywhere
@orders
@dtypes
def test_images_of_several_parts(dtype, last):
    """More than one part of a channel, of a group and of a sample."""
    check(make((1, 4, 95, 97), 2, dtype, last=last, offset=1))


@everywhere
@dtypes
@pytest.mark.parametrize("shape", [(7, 24), (3, 24, 1), (3, 24, 1, 1), (3, 24, 9), (2, 8, 2, 3, 5)])
def test_numbers_of_dimensions(shape, dtype):
    check(*(make(shape, 4, dtype, seed=seed) for seed in range(6)))


@everywhere
@orders
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_weights_in_float32(dtype, last):
    check(make((2, 32, 9, 8), 8, dtype, weight_dtype=F32, last=last))


@everywhere
@orders
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_results_are_unbiased(dtype, last):
    check(make((2, 16, 16, 16), 4, dtype, last=last))


@everywhere
@orders
def test_outputs_in_another_dtype(last):
    """As CUDA's autocast asks for: float32 of 16-bit inputs, and gradients of that."""
    case = make((2, 16, 5, 6), 4, BF16, last=last)
    output, mean, rstd = RAW.group_norm_forward(*case.tensors, 4, 1e-5, 2, last, F32, True)
    exact = results(case.torchs, case, double=True)
    wide = make((2, 16, 5, 6), 4, BF16, last=last)
    wide.tensors = [t.float() for t in wide.tensors]
    base = results(wide.torchs, wide)
    numerics.assert_close(output, exact["output"], base["output"])
    doutput = case.doutput.float()
    found = RAW.group_norm_backward(doutput, *case.tensors, mean, rstd, 4, 2, last, 7)
    torchs = results(case.torchs, case)
    for name, gradient in zip(NAMES[1:], found, strict=True):
        numerics.assert_close(gradient, exact[name], torchs[name], name)


@everywhere
@orders
@dtypes
def test_a_backward_for_some_gradients(dtype, last):
    case = make((2, 8, 5, 7), 2, dtype, last=last)
    every = case.raw_backward(7)
    for mask in range(7):
        for bit, (one, other) in enumerate(zip(case.raw_backward(mask), every, strict=True)):
            if mask >> bit & 1:
                assert torch.equal(one, other)
            else:
                assert one.shape == (0,) and one.dtype is dtype
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(case.tensors)]
        given = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(case.ours(*leaves), given, case.doutput))
        for i, expected in enumerate(every):
            assert i == frozen or torch.equal(next(found), expected)


@pytest.mark.parametrize("shape", [(4, 12, 40, 43), (1, 4, 128, 129)], ids=str)
@orders
def test_any_number_of_threads(last, shape):
    """Of many samples, of one; all_families has others."""
    for dtype, threads in ((F32, 2), (BF16, 3)):
        case = make(shape, 2, dtype, last=last)
        torch.set_num_threads(1)
        expected = results(case.ours, case)
        torch.set_num_threads(threads)
        assert_same_bits(results(case.ours, case), expected)


def test_the_reference_is_torchs():
    for last in (False, True):
        case = make((2, 12, 3, 4), 3, F64, last=last)
        of = reference.group_norm.group_norm(case.input, 3, *case.tensors[1:], 1e-5, "silu")
        torch.testing.assert_close(of, case.torchs(*case.tensors))


# ---- as models have them -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
@activations
def test_module(activation, options):
    if options.get("bias") is False and "bias" not in (
        torch.nn.GroupNorm.__init__.__kwdefaults__ or ()
    ):
        pytest.skip("this torch's GroupNorm has always a bias")
    ours = onepass.nn.GroupNorm(3, 12, 1e-3, activation=activation, **options)
    torchs = torch.nn.GroupNorm(3, 12, 1e-3, **options)
    assert isinstance(ours, torch.nn.GroupNorm)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    named = f", activation={activation!r})" if activation else ")"
    assert repr(ours) == repr(torchs).removesuffix(")") + named
    x = torch.randn(2, 12, 5, 5)
    expected = torchs(x)
    torch.testing.assert_close(ours(x), F.silu(expected) if activation else expected)


@orders
def test_resnet_block_of_diffusers(last):
    """norm, silu, convolution, with the first two replaced by one module."""
    resnet = pytest.importorskip(
        "diffusers.models.resnet", reason="compares with its ResnetBlock2D"
    )
    block = resnet.ResnetBlock2D(in_channels=32, temb_channels=None, groups=8)
    x = torch.randn(2, 32, 6, 6)
    x = x.to(memory_format=torch.channels_last) if last else x
    found = functional.group_norm(
        x, 8, block.norm1.weight, block.norm1.bias, block.norm1.eps, activation="silu"
    )
    expected = block.nonlinearity(block.norm1(x))
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_explain_names_the_kernels():
    case = make((2, 8, 5, 6), 2, last=True)
    leaves = [t.requires_grad_() for t in case.tensors]
    text = str(onepass.explain(lambda: case.ours(*leaves).sum().backward()))
    assert "group_norm_forward_kernel" in text and "group_norm_backward_kernel" in text
    assert "2 x 8 x 30, 2 groups, channels last, input float32, weight float32, silu" in text
