"""Every layout of every tensor: the same bits as dense ones, read in place or copied once."""

import pytest
import torch

from tests.linear.cases import backward, check, dtypes, layer_gradients, make
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


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.grid(2)
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
