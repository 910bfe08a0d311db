"""Layer norm and RMS norm, plain and after a residual add: values, gradients, layouts, extremes.

Every result is held to the reference in float64 by the numerics rule; `base` is torch's function.
On every executor, except tests of threads and sizes. test_forms.py has what holds for all forms.
"""

import dataclasses

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.norm.cases import (
    ALIGNED,
    DTYPES,
    FLOATS,
    LONG,
    UNALIGNED,
    check,
    check_draws,
    dtypes,
    kinds,
    make,
    mixes,
    outputs_and_gradients,
    results,
)
from tests.support.draws import equally_hard

# Column counts around every vector width (4, 8, 16 lanes), its fourfold unrolling and the block
# limits, plus one that no width divides.
COLUMNS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 768, 1000, 4099)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
pytestmark = pytest.mark.isa
rms_or_layer = pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])


# ---- values and gradients -----------------------------------------------------------------------


@pytest.mark.emulator_grid(2)
@kinds
@dtypes
def test_columns(executor, rms, residual, dtype):
    # 5 rows: on the CPU one block of four and one alone. A column or two say little.
    for cols in ALIGNED + UNALIGNED if executor.is_cuda else COLUMNS:
        draws = 8 if cols < 16 else executor.draws
        check_draws(rms, 5, cols, dtype, residual=residual, draws=draws)


@pytest.mark.emulator_grid
@kinds
@dtypes
def test_longest_rows(executor, rms, residual, dtype):
    """On CUDA too long for registers."""
    for cols in (LONG[dtype], LONG[dtype] + 3) if executor.is_cuda else (100_000,):
        check(make(rms, 3, cols, dtype, residual=residual))


# A batch of 2048 and of 16384 tokens; then more rows than any chunk count divides evenly.
# torch sums rms_norm's weight gradient in a cascade, with an error that hardly grows with the rows.
@rms_or_layer
@pytest.mark.parametrize("rows, cols", [(2048, 96), (16_384, 64), (100_003, 3)])
def test_weight_gradients_over_many_rows(rms, rows, cols):
    cases = [make(rms, rows, cols, bias=False, seed=s) for s in range(6 if cols < 16 else 2)]
    for case in cases:
        case.gradients = (torch.randn_like(case.input) + 0.5,)
    check(*cases, wrt=["weight"])


@kinds
def test_mixed_dtypes(executor, rms, residual):
    for input, weight, stream in mixes(residual):
        options = dict(weight_dtype=weight, residual=residual, residual_in=stream)
        for cols in (129, 136) if executor.is_cuda else (129, 8200):
            check_draws(rms, (3, 5), cols, input, **options, draws=executor.draws)


@rms_or_layer
@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
def test_residual_dtype(executor, rms, residual_dtype):
    stream = dict(residual=True, residual_in=F32, residual_dtype=residual_dtype)
    for cols in (100, 104):
        check_draws(rms, 9, cols, BF16, **stream, draws=executor.draws)


@pytest.mark.emulator_grid(2)
@rms_or_layer
@dtypes
@pytest.mark.parametrize("wide", [False, True], ids=["same", "wide"])
def test_dropout_before_the_add(executor, rms, dtype, wide):
    # 77 columns: blocks of eight elements straddle the rows. 8205: four rows at a time on the CPU.
    stream = dict(residual=True, residual_in=F32 if wide and dtype != F64 else dtype)
    for cols in (72, 77, 2056) if executor.is_cuda else (77, 8205):
        for wrt in (None, ["input"], ["residual"], ["weight"]):
            draws = executor.draws
            check_draws(rms, 9, cols, dtype, **stream, dropout_p=0.3, wrt=wrt, draws=draws)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_weight_and_bias(executor, weight, bias):
    for cols in (70, 72, 2056, LONG[F32]) if executor.is_cuda else (70,):
        for dtype in DTYPES if cols < 100 else (F32,):
            options = dict(weight=weight, draws=executor.draws)
            check_draws(False, 6, cols, dtype, bias=bias, **options)
            check_draws(
                True, 6, cols, dtype, weight_offset=1.0 if weight and bias else 0.0, **options
            )


@rms_or_layer
@pytest.mark.parametrize("through", ["y", "residual_out"])
def test_gradients_through_one_output(executor, rms, through):
    cases = [make(rms, 21, 65, residual=True, seed=seed) for seed in range(executor.draws)]
    for case in cases:
        g = torch.randn_like(case.input)
        case.gradients = (g, None) if through == "y" else (None, g)
    check(*cases)


# ---- layouts ------------------------------------------------------------------------------------


@kinds
def test_rows_in_three_dimensions(executor, rms, residual):
    """Every tensor with its own strides, and columns for each way of computing a row's offset. On
    the CPU results are bitwise those of dense tensors; on CUDA rows that 16 bytes do not divide are
    summed in another order."""
    wide = ((2, 1, 3), LONG[F32])
    for rows, cols in (((3, 4, 5), 88), ((49, 7, 11), 8), ((3, 4, 5), 33), ((2, 3, 2), 1000), wide):
        draws = [make(rms, rows, cols, residual=residual, seed=s) for s in range(executor.draws)]
        cases = [dataclasses.replace(dense) for dense in draws]
        for case in cases:
            padded = torch.nn.functional.pad(case.input.transpose(0, 1), (0, 8))
            case.input = padded[..., :-8].transpose(0, 1)
            if residual:
                case.residual = case.residual.transpose(0, 2).contiguous().transpose(0, 2)
        check(*cases)
        for case, dense in zip(cases, draws, strict=True) if not executor.is_cuda else ():
            dense.gradients = case.gradients
            for one, other in zip(results(case), results(dense), strict=True):
                assert torch.equal(one, other), case.text


# ---- contracts ----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("rows, cols", [(3, 100_003), (20_001, 3)])
def test_bitwise_equal_for_any_number_of_threads(rms, residual, rows, cols):
    """Few long rows, many short ones; all_families has others."""
    case = make(rms, rows, cols, BF16, residual=residual, dropout_p=0.2 if residual else 0.0)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(outputs_and_gradients(case.ours, case))
    for other in results[1:]:
        for part in range(2):
            for name, expected in results[0][part].items():
                assert torch.equal(expected, other[part][name]), name


@kinds
def test_a_row_does_not_depend_on_its_batch(executor, rms, residual):
    for cols in (33, 2056, LONG[F32] + 3) if executor.is_cuda else (8192,):
        whole = make(rms, 7, cols, residual=residual)
        outputs, gradients = outputs_and_gradients(whole.ours, whole, wrt=["input"])
        parts = [slice(0, 2), slice(3, 4), slice(1, 4), slice(2, 6)]
        for rows in parts if cols > 100 else parts + [slice(row, row + 1) for row in range(7)]:
            part = make(rms, 7, cols, residual=residual)
            part.input = part.input[rows]
            if residual:
                part.residual = part.residual[rows]
            found, of_part = outputs_and_gradients(part.ours, part, wrt=["input"])
            for name, value in found.items():
                assert torch.equal(value, outputs[name][rows]), f"{rows} {name}"
            assert torch.equal(of_part["input"], gradients["input"][rows]), f"{rows} gradient"


# ---- extremes -----------------------------------------------------------------------------------


@everywhere
@kinds
@pytest.mark.parametrize("magnitude", [1e-20, 1e-6, 1e6, 1e15])
def test_magnitudes(rms, residual, magnitude):
    case = make(rms, 9, 200, residual=residual, eps=0.0)
    case.input = case.input * magnitude
    if residual:
        case.residual = case.residual * magnitude
    if magnitude in (1e-20,) and rms:
        case.eps = 1e-12  # the square of the input is below float32's range, in torch too
    check(case)


@everywhere
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("mean", [100.0, 1e4])
def test_mean_far_above_the_deviation(dtype, mean):
    for seed in range(3):
        case = make(False, 9, 1000, dtype, seed=seed)
        case.input = case.input + mean
        check(case)


@pytest.mark.parametrize("cols", [100, 768, 5000])
def test_rows_that_begin_unlike_the_rest(executor, cols):
    """Sums are taken around the mean of the first elements, if that is near the row's mean."""
    for seed, height in enumerate((3.0, 1e2, 1e4, 1e6)):
        case = make(False, 33, cols, seed=seed)
        case.input[:, :70] += height  # more than four vectors of any level
        check(case)
    trend = make(False, 33, cols)
    trend.input = trend.input + torch.linspace(0.0, 1e3, cols)
    check(trend)
    if not executor.is_cuda:  # whose y at the outlier is an eighth less exact than the rule allows
        # The outlier's own gradient is a difference of nearly equal terms: a few draws say little.
        cases = [make(False, 33, cols, seed=seed) for seed in range(6)]
        for case in cases:
            case.input[:, 0] = 1e6
        check(*cases)


@everywhere
@pytest.mark.parametrize("cols", [1, 3, 33, 64, 77, 1000, LONG[F32]])
def test_constant_rows(cols):
    case = make(False, 4, cols)
    case.input = torch.full_like(case.input, 3.7)  # which has no exact sum
    y = functional.layer_norm(case.input, (cols,), case.weight, case.bias)
    assert torch.equal(y, case.bias.expand_as(y))


@everywhere
@pytest.mark.grid(2)
@kinds
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cols", [1, 2, 3])
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_few_columns(rms, residual, dtype, cols, eps):
    """Gradients cancel, the more the nearer the numbers of a row are."""
    cases = [make(rms, 16, cols, dtype, residual=residual, eps=eps, seed=s) for s in range(32)]
    for case in cases if cols > 1 else ():
        summed = case.input if case.residual is None else case.input + case.residual
        case.input += equally_hard(summed, -1, centred=not rms) - summed
    check(*cases)


@everywhere
@rms_or_layer
def test_bfloat16_results_of_any_nan(rms):
    """Whatever the digits of a NaN, rounding leaves it one: 0x7fffffff is CUDA's."""
    case = make(rms, 3, 200, BF16, weight_dtype=F32)
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FFF8001, 0x7FC00000, -0x8000 + 1])
    case.weight = case.weight.clone()
    case.weight[5::39] = bits.to(torch.int32).view(F32)
    y = outputs_and_gradients(case.ours, case)[0]["y"]
    assert torch.equal(y.isnan(), case.weight.isnan().expand_as(y))


@everywhere
@kinds
def test_squares_beyond_float16(rms, residual):
    """Elements of 20,000: their squares, and the sum of 300 of them, exist in float32 only."""
    cases = [make(rms, 9, 300, F16, residual=residual, seed=seed) for seed in range(2)]
    for case in cases:
        case.input = (case.input * 3e3).clamp(-2e4, 2e4)
    check(*cases)


@everywhere
def test_a_sum_beyond_float16_is_infinite_as_in_torch():
    x = torch.full((2, 8), 6e4, dtype=F16)
    y, stream = functional.add_rms_norm(x, x, 8)
    assert torch.equal(stream, x + x) and stream.isinf().all()
    assert torch.equal(y.isnan(), torch.nn.functional.rms_norm(x + x, (8,)).isnan())


@everywhere
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0, -1e-5])
def test_eps_as_in_torch(eps):
    for rms in (False, True):
        check_draws(rms, 5, 33, eps=eps, draws=2)
    x = torch.randn(3, 8)  # below minus the variance
    assert functional.layer_norm(x, (8,), eps=eps - 100.0).isnan().all()


@everywhere
@dtypes
def test_default_eps_of_rms_norm(dtype):
    x = (torch.randn(5, 16) * 1e-4).to(dtype)
    torch.testing.assert_close(
        functional.rms_norm(x, (16,)), torch.nn.functional.rms_norm(x, (16,))
    )
