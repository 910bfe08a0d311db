"""Layer norm and RMS norm, plain and behind a residual add: values, gradients, layouts, extremes.

Every result is held to the reference in float64 by the numerics rule; `base` is torch's own function.
"""

from __future__ import annotations

import pytest
import torch
from norm_cases import DTYPES, FLOATS, Case, check, make, mixes, outputs_and_gradients

from onepass import functional

# Column counts around every vector width (4, 8, 16 lanes), its fourfold unrolling and the block
# limits, plus one that no width divides. A single column or two say little: several draws pool.
COLUMNS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 768, 1000, 4099)
KINDS = [(rms, residual) for rms in (False, True) for residual in (False, True)]
kinds = pytest.mark.parametrize(
    "rms, residual", KINDS, ids=["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]
)
pytestmark = pytest.mark.isa


# ---- values and gradients -----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLUMNS)
def test_columns(rms, residual, dtype, cols):
    # 5 rows: one block of four and one alone.
    draws = 8 if cols < 16 else 2
    check(*(make(rms, 5, cols, dtype, residual=residual, seed=seed) for seed in range(draws)))


@kinds
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33, 512])
def test_rows(rms, residual, rows):
    # 512 rows are cut into several chunks for the weight gradients, 33 are one chunk and a bit.
    check(*(make(rms, rows, 96, residual=residual, seed=seed) for seed in range(2)))


@kinds
def test_longest_rows(rms, residual):
    check(make(rms, 3, 262_144, residual=residual))


@kinds
def test_mixed_dtypes(rms, residual):
    for input_, weight, stream in mixes(residual):
        check(
            *(
                make(
                    rms,
                    (3, 13),
                    129,
                    input_,
                    weight_dtype=weight,
                    residual=residual,
                    residual_in=stream,
                    seed=seed,
                )
                for seed in range(2)
            )
        )


@kinds
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_16_bit_results_are_unbiased(rms, residual, dtype):
    check(make(rms, 128, 256, dtype, residual=residual))  # above the rule's 4,096 elements


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
def test_residual_dtype(rms, residual_dtype):
    for seed in range(2):
        case = make(rms, 9, 100, torch.bfloat16, residual=True, residual_in=torch.float32, seed=seed)
        case.residual_dtype = residual_dtype
        check(case)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_weight_and_bias(weight, bias):
    for dtype in DTYPES:
        check(*(make(False, 6, 70, dtype, weight=weight, bias=bias, seed=s) for s in range(3)))
        check(*(make(True, 6, 70, dtype, weight=weight, seed=s) for s in range(3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [False, True])
def test_weight_offset(dtype, weight):
    check(*(make(True, 6, 70, dtype, weight=weight, weight_offset=1.0, seed=s) for s in range(3)))


@kinds
def test_many_dimensions_in_normalized_shape(rms, residual):
    case = make(rms, (4, 5), 6 * 7, residual=residual)
    case.shape = (6, 7)
    for name, tensor in case.tensors().items():
        setattr(case, name, tensor.unflatten(-1, (6, 7)))
    check(case)


@kinds
def test_gradients_for_some_arguments_only(rms, residual):
    for wrt in (["input"], ["weight"], ["bias"], ["residual"], ["input", "weight"]):
        case = make(rms, 21, 65, residual=residual)
        if set(wrt) <= set(case.tensors()):
            check(case, wrt=wrt)


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("through", ["y", "residual_out"])
def test_gradients_through_one_output(rms, through):
    case = make(rms, 21, 65, residual=True)
    g = torch.randn_like(case.input)
    case.gradients = (g, None) if through == "y" else (None, g)
    check(case)


@kinds
def test_upstream_gradients_of_any_layout(rms, residual):
    g = torch.randn(65, 21).t()  # columns not dense
    expanded = torch.randn(65).expand(21, 65)  # rows of stride 0
    for gradient in (g, expanded, torch.ones(()).expand(21, 65)):
        case = make(rms, 21, 65, residual=residual)
        case.gradients = (gradient, gradient) if residual else (gradient,)
        check(case)


# ---- layouts ------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout, inside a buffer that is NaN everywhere else."""
    a, b, c = tensor.shape
    buffers = {
        "contiguous": ((a, b, c), lambda t: t),
        "every other": ((a, 2 * b, c), lambda t: t[:, ::2]),
        "wide rows": ((a, b, c + 5), lambda t: t[..., 3 : 3 + c]),
        "transposed": ((b, a, c), lambda t: t.transpose(0, 1)),
        "columns first": ((c, a, b), lambda t: t.permute(1, 2, 0)),
        "odd offset": ((a * b * c + 1,), lambda t: t[1:].view(a, b, c)),
    }
    size, view = buffers[layout]
    buffer = torch.full(size, float("nan"), dtype=tensor.dtype)
    view(buffer).copy_(tensor)
    return view(buffer)


LAYOUTS = ["every other", "wide rows", "transposed", "columns first", "odd offset"]


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(rms, residual, layout, dtype):
    case = make(rms, (6, 5), 40, dtype, residual=residual)
    plain = outputs_and_gradients(case.ours, case)
    case.input = strided(case.input, layout)
    if residual:
        case.residual = strided(case.residual, "wide rows")
    other = outputs_and_gradients(case.ours, case)
    for expected, found in zip(plain, other, strict=True):
        for name in expected:
            assert torch.equal(expected[name], found[name]), f"{layout}: {name}"


@kinds
def test_four_row_dimensions_that_do_not_merge(rms, residual):
    case = make(rms, (3, 4, 5, 6), 24, residual=residual)
    plain = outputs_and_gradients(case.ours, case)
    case.input = case.input.permute(3, 1, 2, 0, 4).contiguous().permute(3, 1, 2, 0, 4)
    other = outputs_and_gradients(case.ours, case)
    for expected, found in zip(plain, other, strict=True):
        for name in expected:
            assert torch.equal(expected[name], found[name]), name


def test_expanded_rows():
    row = torch.randn(1, 64)
    for rms in (False, True):
        check(Case(rms, row.expand(10, 64), weight=torch.randn(64)))


@kinds
@pytest.mark.parametrize("size", [(0, 8), (3, 0, 8), (3, 0), (0, 0)])
def test_empty(rms, residual, size):
    case = make(rms, size[:-1], size[-1], residual=residual)
    outputs, gradients = outputs_and_gradients(case.ours, case)
    assert outputs["y"].shape == size
    for name, gradient in gradients.items():
        assert gradient.shape == getattr(case, name).shape
        assert not gradient.any()


# ---- contracts ----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_equal_for_any_number_of_threads(rms, residual, dtype):
    case = make(rms, 301, 513, dtype, residual=residual)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(outputs_and_gradients(case.ours, case))
    for other in results[1:]:
        for part in range(2):
            for name, expected in results[0][part].items():
                assert torch.equal(expected, other[part][name]), name


@kinds
@pytest.mark.parametrize("cols", [40, 8192])
def test_a_row_does_not_depend_on_its_batch(rms, residual, cols):
    case = make(rms, 7, cols, residual=residual)
    outputs, _ = outputs_and_gradients(case.ours, case)
    for row in range(7):
        alone = make(rms, 7, cols, residual=residual)
        alone.input = alone.input[row : row + 1]
        if residual:
            alone.residual = alone.residual[row : row + 1]
        for name, value in outputs_and_gradients(alone.ours, alone)[0].items():
            assert torch.equal(value[0], outputs[name][row]), f"{row=} {name}"


# ---- extremes -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mean", [100.0, 1e4])
def test_mean_far_above_the_deviation(dtype, mean):
    for seed in range(3):
        case = make(False, 9, 1000, dtype, seed=seed)
        case.input = case.input + mean
        check(case)


def test_one_outlier():
    # The outlier's own gradient is a difference of nearly equal terms: a few draws say little.
    cases = [make(False, 33, 1000, seed=seed) for seed in range(6)]
    for case in cases:
        case.input[:, 0] = 1e6
    check(*cases)


def test_constant_rows():
    case = make(False, 4, 64)
    case.input = torch.full_like(case.input, 3.7)
    y = functional.layer_norm(case.input, (64,), case.weight, case.bias)
    assert torch.allclose(y, case.bias.expand_as(y), atol=1e-3)  # 3.7 has no exact mean
    assert torch.equal(functional.layer_norm(torch.zeros(4, 64), 64), torch.zeros(4, 64))


@kinds
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_rows(rms, residual, value):
    case = make(rms, 6, 50, residual=residual)
    clean, _ = outputs_and_gradients(case.ours, case)
    case.input[3, 17] = value
    spoilt, _ = outputs_and_gradients(case.ours, case)
    stock, _ = outputs_and_gradients(case.stock, case)
    assert torch.equal(spoilt["y"][3].isnan(), stock["y"][3].isnan())
    others = [0, 1, 2, 4, 5]
    assert torch.equal(spoilt["y"][others], clean["y"][others])


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0, -1e-5])
def test_eps_as_in_torch(eps):
    check(make(False, 5, 33, eps=eps), make(False, 5, 33, eps=eps, seed=1))
    check(make(True, 5, 33, eps=eps), make(True, 5, 33, eps=eps, seed=1))


def test_negative_eps_beyond_the_variance_is_nan_as_in_torch():
    x = torch.randn(3, 8)
    assert functional.layer_norm(x, (8,), eps=-100.0).isnan().all()
    assert torch.nn.functional.layer_norm(x, (8,), eps=-100.0).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_eps_of_rms_norm(dtype):
    x = (torch.randn(5, 16) * 1e-4).to(dtype)
    torch.testing.assert_close(
        functional.rms_norm(x, (16,)), torch.nn.functional.rms_norm(x, (16,))
    )
