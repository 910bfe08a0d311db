"""The linear layer's output and gradients, held to F.linear's in float64 by the numerics rule."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from onepass import functional, numerics, reference
from tests.linear.cases import (
    FLOATS,
    GRADIENTS,
    NAMES,
    RAW,
    Case,
    backward,
    check,
    dtypes,
    layer_gradients,
    make,
    results,
    subsets,
)
from tests.support.dtypes import F32, F64
from tests.support.results import assert_same_bits

# Around every vector width and around the cuts of sums over features, and far from both.
FEATURES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 191, 192, 193, 383, 385, 768, 3001)
pytestmark = pytest.mark.isa


# ---- values and gradients ------------------------------------------------------------------------


SIZES = [(11, features, 37) for features in FEATURES] + [(11, 37, n) for n in FEATURES[1:]]
SIZES += [(n, 70, 45) for n in (5, 11, 12, 13, 23, 24, 25, 36, 37, 100, 959, 960, 961)]


@dtypes
@pytest.mark.parametrize("rows, in_features, out_features", SIZES)
@pytest.mark.grid(2)
def test_sizes(rows, in_features, out_features, dtype):
    draws = range(3 if rows == 11 else 2)
    check(*(make(rows, in_features, out_features, dtype, seed=seed) for seed in draws))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [2048, 5003])
def test_gradients_over_many_rows(rows, dtype):
    """The weight's and the bias's are sums over the rows."""
    case = make(rows, 40, 24, dtype)
    case.doutput = case.doutput + 0.25  # sums that do not cancel
    check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [7, 193, 3000])
def test_the_gradient_of_a_bias_alone(rows, dtype):
    draws = []
    for seed in range(8):
        doutput = make(rows, 1, 70, dtype, seed=seed).doutput
        *others, dbias = backward(doutput, bias_dtype=dtype)
        assert all(other.numel() == 0 for other in others)
        draws.append((dbias, doutput.double().sum(0), doutput.sum(0)))
    numerics.assert_close(*zip(*draws, strict=True), f"{rows} x 70 {dtype}")


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_mixed_dtypes(dtypes):
    """Any mix; the bias has the third dtype where there are two."""
    of_input, of_weight = dtypes
    of_bias = next(dtype for dtype in FLOATS if dtype not in dtypes or len({*dtypes}) == 1)
    check(
        *(
            make((3, 9), 129, 66, of_input, weight_dtype=of_weight, bias_dtype=of_bias, seed=seed)
            for seed in range(2)
        )
    )


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS, FLOATS)), ids=str)
def test_mixed_dtypes_of_the_operators(dtypes):
    """The dtype of a result does not depend on the other dtypes."""
    of_left, of_right, of_result = dtypes
    case = make(30, 70, 50, of_left, weight_dtype=of_right)
    wide = {name: tensor.float() for name, tensor in case.tensors().items()}
    expected = F.linear(**{name: tensor.double() for name, tensor in wide.items()})
    output = RAW.linear_forward(*case.tensors().values(), of_result)
    assert output.dtype is of_result
    numerics.assert_close(output, expected, F.linear(**wide).to(of_result), "output")
    asked = dict.fromkeys((f"{name}_dtype" for name in NAMES), of_result)
    found = backward(case.doutput, case.input.to(of_right), case.weight, **asked)
    g, x = case.doutput.double(), case.input.to(of_right).double()
    ref = reference.linear.linear_backward(g, x, case.weight.double())
    base = reference.linear.linear_backward(g.float(), x.float(), case.weight.float())
    for ours, exact, torchs in zip(found, ref, base, strict=True):
        assert ours.dtype is of_result
        numerics.assert_close(ours, exact, torchs.to(of_result))


@subsets
@dtypes
def test_gradients_for_some_tensors_only(dtype, wrt):
    case = make(21, 65, 33, dtype)
    check(case, wrt=wrt)
    found, every = (results(functional.linear, case, wrt=names) for names in (wrt, NAMES))
    assert_same_bits(found, {name: every[name] for name in found})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("features", [64, 200, 768])
def test_a_row_or_a_column_alone(features, dtype):
    """Products of a matrix and a vector, which torch sums lane by lane: ours has no long chains."""
    rows = [make(1, features, 64, dtype, seed=seed) for seed in range(30)]
    check(*rows, wrt=())
    columns = [make(64, 1, features, dtype, seed=seed) for seed in range(30)]
    check(*columns, wrt=("input",))


# ---- epilogues -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu"])
def test_dropout_is_the_functions_own(activation):
    case = make(60, 20, 1030)
    products = functional.linear(**case.tensors(), activation=activation)

    def seeded(function, *tensors, **options):
        torch.manual_seed(3)
        return function(*tensors, **options)

    for p in (0.1, 0.5, 1.0):
        options = case.tensors() | {"activation": activation, "dropout_p": p}
        expected = seeded(functional.dropout, products, p=p)
        assert torch.equal(seeded(functional.linear, **options), expected)
        expected = seeded(functional.add_dropout, products, products, p=p)
        assert torch.equal(seeded(functional.linear, **options, residual=products), expected)


def test_nothing_is_drawn_when_nothing_is_dropped():
    case = make(4, 6, 8)
    residual, state = torch.randn(4, 8), torch.get_rng_state()
    products = functional.linear(**case.tensors())
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0.5, "training": False}):
        assert torch.equal(functional.linear(**case.tensors(), **options), products)
        found = functional.linear(**case.tensors(), **options, residual=residual)
        assert torch.equal(found, residual + products)
    assert torch.equal(state, torch.get_rng_state())


# ---- the operators -------------------------------------------------------------------------------


@subsets
def test_what_is_not_asked_for_has_no_elements(wrt):
    """Nor is what it alone would need."""
    case = make(3, 4, 5)
    asked, every = {f"{name}_dtype": F32 for name in wrt}, layer_gradients(case)
    needed = {"input": case.input} if "weight" in wrt else {}
    needed |= {"weight": case.weight} if "input" in wrt else {}
    found = dict(zip(GRADIENTS, backward(case.doutput, **needed, **asked), strict=True))
    for name in NAMES:
        gradient = found[f"d{name}"]
        assert gradient.dtype is F32
        assert torch.equal(gradient, every[f"d{name}"]) if name in wrt else gradient.shape == (0,)


def test_the_reference_is_torchs_formula():
    case = make((2, 3), 4, 5, F64)
    assert isinstance(case, Case)
    tensors = [t.requires_grad_() for t in case.tensors().values()]
    expected = F.linear(*tensors)
    torch.testing.assert_close(reference.linear.linear(*tensors), expected)
    gradients = torch.autograd.grad(expected, tensors, case.doutput)
    detached = [t.detach() for t in tensors[:2]]
    found = reference.linear.linear_backward(case.doutput, *detached)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)
