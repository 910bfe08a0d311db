"""Values and gradients of group norm, against torch's by the numerics rule."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import numerics, reference
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
@pytest.mark.parametrize("groups", [1, 4, 24], ids=["one", "some", "each channel"])
@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
@pytest.mark.grid
def test_numbers_of_groups_without_weight_or_bias(weight, bias, groups, last):
    options = {"last": last, "weight": weight, "bias": bias}
    check(*(make((2, 24, 6, 7), groups, **options, seed=seed) for seed in range(6)))


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
            assert one.dtype is dtype
            assert torch.equal(one, other) if mask >> bit & 1 else one.shape == (0,)


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


def test_module():
    """all_families/test_modules.py has what is torch's."""
    ours, x = onepass.nn.GroupNorm(3, 12, 1e-3, activation="silu"), torch.randn(2, 12, 5, 5)
    torchs = torch.nn.GroupNorm(3, 12, 1e-3)
    assert repr(ours) == repr(torchs).removesuffix(")") + ", activation='silu')"
    torch.testing.assert_close(ours(x), F.silu(torchs(x)))
