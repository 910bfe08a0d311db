"""Every layout of every tensor: the same bits as dense ones, read in place or copied once."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from onepass import functional
from tests.linear.cases import NAMES, Case, backward, check, dtypes, layer_gradients, make, results
from tests.support.dtypes import F32
from tests.support.layouts import strided
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


@dtypes
def test_the_gradient_lies_as_the_weight_does(dtype):
    """Autograd would copy it otherwise."""
    case = make(26, 40, 33, dtype)
    expected = layer_gradients(case)
    case.weight = case.weight.t().contiguous().t()
    found = layer_gradients(case)
    assert_same_bits(found, expected)
    assert found["dweight"].stride() == case.weight.stride() == (1, 33)
    _, alone, _ = backward(case.doutput, case.input, case.weight, weight_dtype=dtype)
    assert torch.equal(alone, expected["dweight"]) and alone.stride() == (1, 33)


def test_one_tensor_as_input_and_weight():
    x = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(f(x, x).pow(2).sum(), x)[0] for f in (functional.linear, F.linear)
    ]
    torch.testing.assert_close(*gradients)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.grid(4)
@dtypes
@pytest.mark.parametrize("rows", [1, 2, 7, 17])
@pytest.mark.parametrize("in_features", [1, 2, 5, 33])
@pytest.mark.parametrize("out_features", [1, 3, 16, 31])
def test_odd_sizes(rows, in_features, out_features, dtype):
    """Single elements say little: the fewer there are, the more draws."""
    least = min(rows * out_features, rows * in_features, out_features, in_features * out_features)
    check(*(make(rows, in_features, out_features, dtype, seed=s) for s in range(12 + 48 // least)))


EMPTY = [(rows, 8, 5) for rows in ((0,), (3, 0), (0, 3), (2, 0, 3))]
EMPTY += [
    (rows, *features) for rows in ((0,), (1,), (30,), (2, 3)) for features in ((0, 5), (8, 0))
]


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, in_features, out_features", EMPTY)
def test_empty(rows, in_features, out_features, bias, dtype):
    """Without in_features the output is the bias, whose gradient is a sum of rows as ever."""
    sizes = rows, in_features, out_features
    draws = 8 if in_features == 0 and bias else 1  # only such sums have errors
    check(*(make(*sizes, dtype, bias=bias, seed=seed) for seed in range(draws)))


def test_a_vector():
    case = make((), 33, 17)
    assert functional.linear(**case.tensors()).shape == (17,)
    found = results(functional.linear, case)
    stacked = Case(case.input[None], case.weight, case.bias, case.doutput[None])
    expected = results(functional.linear, stacked)
    assert_same_bits(
        found, {n: v[0] if n in ("output", "input") else v for n, v in expected.items()}
    )


def test_any_combination_of_layouts():
    """Rows of doutput, input and weight, each by itself: read in place, or copied."""
    plain = make((6, 5), 24, 30)
    asked = dict.fromkeys((f"{name}_dtype" for name in NAMES), F32)
    expected = backward(plain.doutput, plain.input, plain.weight, **asked)
    layouts = ("wide rows", "columns first", "transposed rows")
    for of_doutput, of_input in itertools.product(layouts, layouts):
        for weight in (plain.weight, plain.weight.t().contiguous().t()):
            doutput, input = strided(plain.doutput, of_doutput), strided(plain.input, of_input)
            found = backward(doutput, input, weight, **asked)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (of_doutput, of_input)
