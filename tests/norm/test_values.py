"""Layer norm and RMS norm, plain and behind a residual add: values, gradients, layouts, extremes.

Every result is held to the reference in float64 by the numerics rule; `base` is torch's function.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass import functional
from tests.norm.cases import DTYPES, FLOATS, Case, check, kinds, make, mixes, outputs_and_gradients

# Column counts around every vector width (4, 8, 16 lanes), its fourfold unrolling and the block
# limits, plus one that no width divides. A single column or two say little: several draws pool.
COLUMNS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 768, 1000, 4099)
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
        case = make(
            rms, 9, 100, torch.bfloat16, residual=True, residual_in=torch.float32, seed=seed
        )
        case.residual_dtype = residual_dtype
        check(case)


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "wide"])
def test_dropout_before_the_add(rms, dtype, wide):
    # 77 columns: blocks of eight elements straddle the rows.
    stream = torch.float32 if wide and dtype != torch.float64 else dtype
    draws = [
        make(rms, 17, 77, dtype, residual=True, residual_in=stream, dropout_p=0.3, seed=seed)
        for seed in range(2)
    ]
    check(*draws)
    for wrt in (["input"], ["residual"], ["weight"]):
        check(*draws, wrt=wrt)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_weight_and_bias(weight, bias):
    for dtype in DTYPES:
        check(*(make(False, 6, 70, dtype, weight=weight, bias=bias, seed=s) for s in range(3)))
        check(*(make(True, 6, 70, dtype, weight=weight, seed=s) for s in range(3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_offset(dtype):
    check(*(make(True, 6, 70, dtype, weight_offset=1.0, seed=s) for s in range(3)))


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


@kinds
def test_one_dimension(rms, residual):
    cases = [make(rms, (), 33, residual=residual, seed=seed) for seed in range(2)]
    assert cases[0].input.shape == (33,)
    check(*cases)


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


@kinds
def test_expanded_rows(rms, residual):
    for name in ("input", "residual") if residual else ("input",):
        case = make(rms, (10,), 64, residual=residual)
        setattr(case, name, getattr(case, name)[:1].expand(10, 64))
        check(case)


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_and_bias_of_any_layout(rms, dtype):
    plain = make(rms, 11, 45, dtype)
    expected = outputs_and_gradients(plain.ours, plain)
    views = {
        "odd offset": lambda t: torch.full((47,), float("nan"), dtype=dtype)[1:46].copy_(t),
        "every third": lambda t: torch.full((135,), float("nan"), dtype=dtype)[::3].copy_(t),
    }
    for layout, view in views.items():
        case = make(rms, 11, 45, dtype)
        case.weight = view(case.weight)
        case.bias = None if rms else view(case.bias)
        found = outputs_and_gradients(case.ours, case)
        for part in range(2):
            for name in expected[part]:
                assert torch.equal(expected[part][name], found[part][name]), f"{layout}: {name}"


def test_statistics_of_any_layout():
    x, doutput, weight = torch.randn(11, 45), torch.randn(11, 45), torch.randn(45)
    ops = torch.ops.onepass
    options = (x, weight, None, None)
    _, _, *statistics = ops.norm_forward(
        x, None, weight, None, None, (45,), 0, 1e-5, 0.0, 0.0, None, None, True
    )
    apart = [number.repeat_interleave(3)[::3] for number in statistics]
    numbers = ((45,), 0, 0.0, 0.0, None, None, 5)  # of dinput and dweight
    expected = ops.norm_backward(doutput, None, *options, *statistics, *numbers)
    found = ops.norm_backward(doutput, None, *options, *apart, *numbers)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_offsets_beyond_32_bits():
    """Two rows 2^31 + 5 elements apart; the memory between them is never touched."""
    try:
        buffer = torch.empty(2**31 + 5 + 64, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for 4 GiB")
    x = buffer.as_strided((2, 64), (2**31 + 5, 1))
    x.copy_(torch.randn(2, 64))
    for rms in (False, True):
        case = Case(rms, x, weight=torch.randn(64))
        strided_results = outputs_and_gradients(case.ours, case)
        case.input = x.clone(memory_format=torch.contiguous_format)
        dense_results = outputs_and_gradients(case.ours, case)
        for part in range(2):
            for name, value in dense_results[part].items():
                assert torch.equal(value, strided_results[part][name]), name


PERMUTATIONS = list(itertools.permutations(range(3)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_combination(data):
    """What the grids above leave out: mixed layouts, dtypes and options at once.

    In any layout a result is bitwise that of the dense tensors, which the rule judges.
    """
    rms, residual = data.draw(st.booleans()), data.draw(st.booleans())
    arguments = (
        rms,
        (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))),
        data.draw(st.integers(16, 90)),
        data.draw(st.sampled_from(FLOATS)),
    )
    keywords = dict(
        weight=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        residual=residual,
        weight_dtype=data.draw(st.sampled_from(FLOATS)),
        residual_in=data.draw(st.sampled_from(FLOATS)),
        dropout_p=data.draw(st.sampled_from((0.0, 0.5))) if residual else 0.0,
    )
    if rms and keywords["weight"]:
        keywords["weight_offset"] = data.draw(st.sampled_from((0.0, 1.0)))
    draws = [make(*arguments, **keywords, seed=seed) for seed in range(6)]
    check(*draws)
    case = draws[0]
    dense = outputs_and_gradients(case.ours, case)
    for name in ("input", "residual") if residual else ("input",):
        order = data.draw(st.sampled_from(PERMUTATIONS))
        tensor = getattr(case, name).permute(order).contiguous()
        setattr(case, name, tensor.permute([order.index(d) for d in range(3)]))
    other = outputs_and_gradients(case.ours, case)
    for expected, found in zip(dense, other, strict=True):
        for name in expected:
            same = (expected[name] is None and found[name] is None) or torch.equal(
                expected[name], found[name]
            )
            assert same, f"{case.text}: {name}"


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
@pytest.mark.parametrize("rows, cols", [(301, 513), (3, 100_003), (20_001, 3)])
def test_bitwise_equal_for_any_number_of_threads(rms, residual, dtype, rows, cols):
    case = make(rms, rows, cols, dtype, residual=residual, dropout_p=0.2 if residual else 0.0)
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
    for rows in (*(slice(row, row + 1) for row in range(7)), slice(0, 2), slice(1, 4), slice(2, 6)):
        part = make(rms, 7, cols, residual=residual)
        part.input = part.input[rows]
        if residual:
            part.residual = part.residual[rows]
        for name, value in outputs_and_gradients(part.ours, part)[0].items():
            assert torch.equal(value, outputs[name][rows]), f"{rows} {name}"


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


@pytest.mark.parametrize("cols", [1, 3, 64, 77, 1000])
def test_constant_rows(cols):
    case = make(False, 4, cols)
    case.input = torch.full_like(case.input, 3.7)  # which has no exact sum
    y = functional.layer_norm(case.input, (cols,), case.weight, case.bias)
    assert torch.equal(y, case.bias.expand_as(y))


@pytest.mark.parametrize("cols", [100, 768, 5000])
def test_rows_that_begin_unlike_the_rest(cols):
    """The sums are taken around the mean of the first elements, where that is near the row's."""
    cases = [make(False, 33, cols, seed=seed) for seed in range(4)]
    for case, height in zip(cases, (3.0, 1e2, 1e4, 1e6), strict=True):
        case.input[:, :70] += height  # more than four vectors of any level
        check(case)
    trend = make(False, 33, cols)
    trend.input = trend.input + torch.linspace(0.0, 1e3, cols)
    check(trend)


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


@kinds
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_of_a_not_finite_row_stay_in_it(rms, residual, value):
    case = make(rms, 6, 50, residual=residual)
    _, clean = outputs_and_gradients(case.ours, case)
    case.input[3, 17] = value
    _, spoilt = outputs_and_gradients(case.ours, case)
    _, stock = outputs_and_gradients(case.stock, case)
    others = [0, 1, 2, 4, 5]
    for name in ("input", "residual") if residual else ("input",):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
        assert torch.equal(spoilt[name][3].isnan(), stock[name][3].isnan()), name
    # A column sum over all rows holds what the row gives it, the bias's does not see the input.
    assert torch.equal(spoilt["weight"].isnan(), stock["weight"].isnan())
    if not rms:
        assert torch.equal(spoilt["bias"], clean["bias"])


@kinds
def test_squares_beyond_float16(rms, residual):
    """Elements of 20,000: their squares, and the sum of 300 of them, exist in float32 only."""
    cases = [make(rms, 9, 300, torch.float16, residual=residual, seed=seed) for seed in range(2)]
    for case in cases:
        case.input = (case.input * 3e3).clamp(-2e4, 2e4)
    check(*cases)


def test_a_sum_beyond_float16_is_infinite_as_in_torch():
    x = torch.full((2, 8), 6e4, dtype=torch.float16)
    y, stream = functional.add_rms_norm(x, x, 8)
    assert torch.equal(stream, x + x) and stream.isinf().all()
    assert torch.equal(y.isnan(), torch.nn.functional.rms_norm(x + x, (8,)).isnan())


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
