"""Numbers that are not finite, large, small, far from zero: torch's results."""

import math

import pytest
import torch

from onepass import reference
from tests.emulator.executors import everywhere
from tests.group_norm.cases import (
    BF16,
    F16,
    F32,
    F64,
    activations,
    check,
    dtypes,
    make,
    orders,
    results,
)

pytestmark = pytest.mark.isa
INF, NAN = math.inf, math.nan


@everywhere
@orders
@dtypes
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_not_finite_elements_make_nan_of_their_group(number, dtype, last):
    case = make((2, 8, 5, 7), 2, dtype, last=last)
    expected = results(case.ours, case)
    case.input[1, 5, 2, 3] = number
    found = results(case.ours, case)
    for name in ("output", "dinput"):
        assert found[name][1, 4:].isnan().all()
        assert torch.equal(found[name][0], expected[name][0])
        assert torch.equal(found[name][1, :4], expected[name][1, :4])
    for name in ("dweight", "dbias"):
        # Without the activation dbias does not depend on input.
        assert found[name][4:].isnan().all() and found[name][:4].isfinite().all()


@everywhere
@orders
@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["weight", "bias", "doutput"])
def test_not_finite_weights_and_gradients(which, number, last):
    case = make((2, 8, 5, 7), 2, last=last)
    if which == "doutput":
        case.doutput[1, 5, 2, 3] = number
    else:
        case.tensors[1 if which == "weight" else 2][5] = number

    def plain(*tensors):  # torch's scales and shifts input, and finds Inf - Inf
        return reference.group_norm.group_norm(
            input=tensors[0], num_groups=2, weight=tensors[1], bias=tensors[2], activation="silu"
        )

    found, expected = results(case.ours, case), results(plain, case, double=True)
    assert torch.equal(found["output"].isnan(), expected["output"].isnan())
    assert torch.equal(found["output"].isinf(), expected["output"].isinf())
    if which == "doutput":
        for name, tensor in found.items():
            assert torch.equal(tensor.isfinite(), expected[name].isfinite()), name


@everywhere
@orders
@activations
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("offset", [30.0, -3e3])
def test_means_far_from_zero(offset, dtype, activation, last):
    check(*(make((2, 8, 9, 11), 2, dtype, activation, last=last, offset=offset) for _ in range(2)))


def far_apart(case):
    """Channels of a group far from one another."""
    case.tensors[0] = case.input * torch.logspace(-2, 2, 8)[:, None, None]
    case.tensors[0] += torch.tensor([1e3, 0, -50, 2, 0, 0, 1e2, 0])[:, None, None]


def outlier(case):
    """Among the first elements, around which sums are taken."""
    case.input[:, :, 0, 0] = 1e4


def scaled_by(magnitude):
    def change(case):
        case.tensors[0] = case.input * magnitude

    return change


def with_eps(eps):
    def change(case):
        case.eps = eps

    return change


HARD = {"far apart": far_apart, "outlier": outlier}
HARD |= {f"magnitude {m}": scaled_by(m) for m in (1e-20, 1e-3, 1e3, 1e15)}
HARD |= {f"eps {eps}": with_eps(eps) for eps in (0.0, 1e-12, 1.0)}


@everywhere
@orders
@pytest.mark.parametrize("name", HARD)
def test_hard_numbers(name, last):
    case = make((2, 8, 17, 33), 2, last=last)
    HARD[name](case)
    check(case)


@everywhere
@orders
@dtypes
def test_constant_groups(dtype, last):
    """Nothing to divide by but eps."""
    case = make((2, 8, 9, 11), 2, dtype, last=last)
    case.tensors[0] = torch.full_like(case.input, 3.0)
    found = results(case.ours, case)
    bias = case.tensors[2].double()
    exact = (bias * bias.sigmoid())[None, :, None, None].expand(2, 8, 9, 11)
    few = torch.finfo(dtype).eps  # to 16 bits it is rounded once
    few *= 4 if dtype in (F32, F64) else 1
    torch.testing.assert_close(found["output"].double(), exact, rtol=few, atol=few)
    assert found["dinput"].isfinite().all()


@everywhere
@orders
@activations
@dtypes
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("samples", [1, 16])
def test_groups_of_one_element_have_no_gradient(samples, dtype, activation, last, eps):
    """A large factor, 1 / sqrt(eps), of a difference that must be 0; torch refuses one sample of
    them."""
    case = make((samples, 8, 1, 1), 8, dtype, activation, last=last)
    case.eps = eps
    found, bias = results(case.ours, case), case.tensors[2].double()
    exact = torch.nn.functional.silu(bias) if activation else bias
    torch.testing.assert_close(found["output"][0, :, 0, 0], exact.to(dtype))
    assert not found["dinput"].any() and not found["dweight"].any()


@everywhere
@orders
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_silu_keeps_its_digits(dtype, last):
    """Also of large negative numbers, where an exponent rounded once has |x| times the error: in
    float32 most of the error is the exponential's; a 16-bit result is rounded once, and its error
    is half a unit of its last digit, and a fiftieth of that."""
    case = make((1, 256, 3, 3), 2, dtype, "silu", last=last)
    case.tensors[1] = torch.zeros_like(case.tensors[1])
    case.tensors[2] = torch.linspace(-85.0, 10.0, 256).to(dtype)
    found, exact = results(case.ours, case), results(case.torchs, case, double=True)
    few = torch.finfo(dtype).eps * (8 if dtype is F32 else 0.51)
    least = 0.0 if dtype is F32 else few * torch.finfo(dtype).smallest_normal
    close = {"rtol": few, "atol": least}
    torch.testing.assert_close(found["output"].double(), exact["output"], **close)


@everywhere
@pytest.mark.grid(3)
@orders
@pytest.mark.parametrize("dtype, most", [(F32, 1e-5), (F64, 1e-9), (BF16, 0.02)], ids=str)
@pytest.mark.parametrize("bias", [-1e3, -100.0, -95.0, -88.5, -80.0, -20.0, 20.0, 90.0, 1e3])
def test_silu_of_every_size(bias, dtype, most, last):
    """From numbers whose exponential is infinite to numbers whose silu is 0.

    The relative error of exp(x) is |x| times that of x: 95 * 6e-8 at -95 in float32.
    """
    case = make((2, 8, 9, 11), 2, dtype, last=last)
    case.tensors[2] = torch.full_like(case.tensors[2], bias)
    found, exact = results(case.ours, case), results(case.torchs, case, double=True)
    least = 1e-30 if dtype is not F64 else 1e-250
    for name, tensor in found.items():
        largest = exact[name].abs().max()
        close = (tensor.double() - exact[name]).abs().max() <= most * largest
        assert tensor.isfinite().all() and (close or largest < least), name


@everywhere
@orders
def test_beyond_float16_is_infinite(last):
    case = make((2, 8, 5, 7), 2, F16, None, last=last)
    case.tensors[1] = torch.full_like(case.tensors[1], 6e4)
    found, torchs = results(case.ours, case), results(case.torchs, case)
    assert found["output"].isinf().any()
    assert torch.equal(found["output"].isinf(), torchs["output"].isinf())
