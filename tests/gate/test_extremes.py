"""Numbers that are not finite, large, small: torch's results."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.emulator.executors import everywhere
from tests.gate.cases import ACTIVATIONS, Case, activations, check, dtypes, make, results
from tests.support.dtypes import BF16, F16, F32
from tests.support.results import kinds

pytestmark = pytest.mark.isa
INF, NAN = math.inf, math.nan


def torchs_quick_gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """By torch's silu: the formula's derivative by autograd is inf - inf where upstream is inf."""
    return F.silu(1.702 * gate) / 1.702 * up


@everywhere
@activations
@dtypes
def test_not_finite_elements(dtype, activation):
    """Results are not finite exactly where torch's are in float64, whichever tensor causes it.
    (In float32 torch's gelu, which is oneDNN's, makes NaN of Inf.)"""
    gates, ups, doutputs = torch.meshgrid(
        *[torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5])] * 3, indexing="ij"
    )
    case = Case([gates.to(dtype), ups.to(dtype)], doutputs.to(dtype), activation)
    torchs = torchs_quick_gelu if activation == "quick_gelu" else case.torchs
    found, expected = results(case.ours, case), results(torchs, case, double=True)
    for name, tensor in found.items():
        wrong = kinds(tensor) != kinds(expected[name])
        assert not wrong.any(), (name, gates[wrong], ups[wrong], doutputs[wrong])


@everywhere
@activations
def test_every_bfloat16(activation):
    """NaNs of every payload stay NaNs, and no number below 1e9 becomes one: beyond, derivatives
    overflow."""
    numbers = torch.arange(-32768, 32768).to(torch.int16).view(BF16)
    numbers = numbers[~(numbers.abs() > 1e9)]
    ones = torch.ones_like(numbers)
    for factors in ([numbers, ones], [ones, numbers]):
        case = Case(factors, ones, activation)
        expected = results(case.torchs, case, double=True)
        for name, tensor in results(case.ours, case).items():
            wrong = tensor.isnan() != expected[name].isnan()
            assert not wrong.any(), (name, numbers[wrong])


@everywhere
@activations
@dtypes
def test_gates_of_every_size(dtype, activation):
    """From gates that overflow float32's exp to gates whose activation is 0."""
    sizes = torch.cat([torch.linspace(0, 100, 801), torch.logspace(-8, 4, 97)])
    gate = torch.cat([sizes, -sizes]).to(dtype)
    check(Case([gate, torch.ones_like(gate)], torch.ones_like(gate), activation))


@everywhere
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid"])
def test_digits_of_large_negative_gates(activation):
    """In its tail an activation keeps its relative precision, which a bound by the largest value
    does not test."""
    gate = -torch.linspace(0.5, 9.0, 200)
    case = Case([gate, torch.ones(200)], torch.ones(200), activation)
    found, x = results(case.ours, case)["output"].double(), gate.double()
    exact = {  # torch's second and third cancel, in float64 too
        "silu": x * x.sigmoid(),
        "gelu": x * torch.special.erfc(-x / math.sqrt(2)) / 2,
        "gelu_tanh": x * (math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)).sigmoid(),
        "quick_gelu": x * (1.702 * x).sigmoid(),
        "sigmoid": x.sigmoid(),
    }[activation]
    # The logarithm of exp(-z) is off by z's rounding, and z is at most 68 here.
    assert ((found - exact) / exact).abs().max() < 68 * 2**-23


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e15])
def test_magnitudes_of_the_other_factor(magnitude, dtype):
    cases = [make(20, 200, dtype, seed=seed) for seed in range(2)]
    for case in cases:
        case.factors[1] = case.factors[1] * magnitude
        case.doutput = case.doutput * magnitude
    check(*cases)


@everywhere
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_overflow_as_in_torch(activation):
    """The square in gelu's tanh form, and the square of relu2, are infinite before the gate is."""
    gate = torch.tensor([1e18, -1e18, 1e19, -1e19, 1e20, -1e20, 3e38, -3e38])
    case = Case([gate, torch.ones(8)], torch.ones(8), activation)
    found, torchs = results(case.ours, case), results(case.torchs, case)
    exact = results(case.torchs, case, double=True)  # torch's gelu in float32 makes Inf of 3e38
    for name in ("output", "dup"):
        assert torch.equal(found[name], exact[name].float()), name
    assert torch.equal(kinds(found["dgate"]), kinds(torchs["dgate"]))


@everywhere
def test_16_bit_products_are_rounded_once():
    """silu(6) is 5.985, and 6 in bfloat16: 85 times that is 508, or 510."""
    gate, up = torch.full((64,), 6.0, dtype=BF16), torch.full((64,), 85.0, dtype=BF16)
    case = Case([gate, up], up)
    found = results(case.ours, case)["output"]
    exact = (F.silu(gate.double()) * up.double()).to(BF16)
    assert torch.equal(found, exact)
    assert not torch.equal(found, results(case.torchs, case)["output"])


@everywhere
def test_beyond_float16_is_infinite():
    gate, up = torch.full((8,), 200.0, dtype=F16), torch.full((8,), 400.0, dtype=F16)
    case = Case([gate, up], torch.ones(8, dtype=F16))
    found = results(case.ours, case)
    assert found["output"].isposinf().all() and found["dgate"].isfinite().all()
    assert torch.equal(found["output"], results(case.torchs, case)["output"])
