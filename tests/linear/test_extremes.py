"""Numbers that are not finite, large, small or alike."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics
from tests.linear.cases import DTYPES, FLOATS, check, dtypes, make, results, stock
from tests.support.results import kinds

pytestmark = pytest.mark.isa


@dtypes
# In the first and the last row and column, and in between.
@pytest.mark.parametrize(
    "value, row, column",
    [(float("nan"), 0, 0), (float("inf"), 3, 17), (-float("inf"), -1, -1), (float("nan"), 5, -1)],
)
@pytest.mark.parametrize("rows", [9, 26])
@pytest.mark.parametrize("name", ["input", "weight", "bias", "doutput"])
def test_not_finite_elements(name, rows, value, row, column, dtype):
    """They are where torch's float64 has them (its bfloat16, where oneDNN imitates it, has NaN for
    some infinities); all other elements keep their bits."""
    case = make(rows, 37, 21, dtype)
    clean = results(functional.linear, case)
    getattr(case, name)[column if name == "bias" else (row, column)] = value
    spoilt, stocks = results(functional.linear, case), results(stock, case, double=True)
    for result, found in spoilt.items():
        assert torch.equal(kinds(found), kinds(stocks[result])), result
        same = kinds(found) == 0
        assert torch.equal(found[same], clean[result][same]), result
    assert any((kinds(found) != 0).any() for found in spoilt.values())


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e15])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_magnitudes(magnitude, dtype):
    if dtype is torch.float16 and magnitude != 1e-6:
        return  # which has none of the others
    cases = [make(20, 200, 30, dtype, seed=seed) for seed in range(2)]
    for case in cases:
        case.input = case.input * magnitude
        case.doutput = case.doutput * magnitude
    check(*cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_cancel(dtype):
    cases = [make(20, 200, 30, dtype, seed=seed) for seed in range(3)]
    for case in cases:
        case.input[:, 100:] = -case.input[:, :100]
        case.weight[:, 100:] = case.weight[:, :100]
        case.weight[:, 7] += 1
    check(*cases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_sums_are_float32(dtype):
    """A 16-bit sum of 5,000 ones would stop at 256 or 2,048, and one of 60,000s would overflow."""
    x, w = torch.ones(3, 5000, dtype=dtype), torch.ones(4, 5000, dtype=dtype)
    x[:, ::2] = 60000
    w[:, 2::4] = -1
    w[:, ::4] = 1
    expected = F.linear(x.double(), w.double()).to(dtype)
    assert torch.equal(functional.linear(x, w), expected)
    ones = torch.ones(5000, 3, dtype=dtype, requires_grad=True)
    weight = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    bias = torch.zeros(2, dtype=dtype, requires_grad=True)
    output = functional.linear(ones, weight, bias)
    for gradient in torch.autograd.grad(output, (weight, bias), torch.ones_like(output)):
        assert (gradient == torch.tensor(5000.0).to(dtype)).all()


def test_a_bias_is_added_before_the_rounding():
    """256.5 + 1 is 258 in bfloat16; the sum rounded first would be 256, and 256 with the bias."""
    w, bias = torch.tensor([[256.0, 0.5]]).bfloat16(), torch.tensor([1.0])
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    for given in (bias, bias.bfloat16(), bias.half()):
        assert torch.equal(functional.linear(x, w, given), torch.full((2, 1), 258.0).bfloat16())
        found = torch.ops.onepass.linear_forward(x, w, given, torch.float32)
        assert torch.equal(found, torch.full((2, 1), 257.5))


def test_beyond_float16_is_infinite_as_in_torch():
    x = torch.full((3, 8), 200.0, dtype=torch.float16)
    w = torch.full((5, 8), 200.0, dtype=torch.float16)
    w[2] = -200
    w[3] = 1
    ours, stocks = functional.linear(x, w), F.linear(x, w)
    assert torch.equal(ours, stocks) and ours[:, 0].isposinf().all() and ours[:, 2].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_numbers_are_exact(dtype):
    """Sums that float32 holds: each result is right to the last bit, whatever the order."""
    for shape in ((1, 700, 33), (30, 193, 65), (400, 50, 20)):
        case = make(*shape, dtype)
        for name in ("input", "weight", "bias", "doutput"):
            setattr(case, name, (4 * getattr(case, name)).round().clamp(-16, 16))
        found = results(functional.linear, case)
        for name, expected in results(F.linear, case, double=True).items():
            assert torch.equal(found[name].double(), expected), name


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64])
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_subnormal_bfloat16(weight_dtype, rows):
    """AVX-512's dot instructions, which multiply bfloat16 by bfloat16, take subnormal numbers as 0
    (docs/limits.md): for any number of rows, and nowhere else."""
    has_dots = onepass._C.cpu_level() == "avx512_bf16"
    input = torch.full((rows, 32), 1e-40, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((16, 32), 6e4, dtype=weight_dtype, requires_grad=True)
    doutput = torch.full((rows, 16), 6e4, dtype=torch.bfloat16)
    output = functional.linear(input, weight)
    (dweight,) = torch.autograd.grad(output, weight, doutput, retain_graph=True)
    (dinput,) = torch.autograd.grad(output, input, torch.full_like(doutput, 1e-40))
    x, w, d = (t.detach().double() for t in (input, weight, doutput))
    of_weight = has_dots and weight_dtype is torch.bfloat16
    for found, exact, is_zero in (
        (output, x @ w.t(), of_weight),
        (dinput, torch.full_like(d, x[0, 0]) @ w, of_weight),
        (dweight, d.t() @ x, has_dots or weight_dtype is torch.float16),  # which has none so small
    ):
        expected = torch.zeros_like(exact) if is_zero else exact
        numerics.assert_close(found, expected, expected.to(found.dtype))
    infinite = functional.linear(input, torch.full_like(weight, torch.inf))
    assert (infinite.isnan() if of_weight else infinite.isposinf()).all()
