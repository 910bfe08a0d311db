"""Values and gradients of modulated norms and of scaled branches, against torch's compositions; and
what all forms of norms promise alike."""

import math

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.norm.forms import (
    BF16,
    BRANCHES,
    F16,
    F32,
    LONG,
    MODULATED,
    NORMS,
    RAW,
    check,
    check_draws,
    dtypes,
    each_form,
    every,
    make,
    results,
)
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa
normed = pytest.mark.parametrize("form", ["layer", "rms"])


@pytest.mark.grid(2)
@pytest.mark.emulator_grid
@every
@dtypes
def test_values_and_gradients(executor, dtype, form, scale, options):
    # Blocks of four rows and single rows, a tail; on CUDA rows of a warp, aligned and not.
    for cols in (72, 1001) if executor.is_cuda else (7, 1030):
        draws = 8 if cols < 16 else max(executor.draws, 2 * ("p" in options))
        check_draws(form, (3, 5, cols), dtype, scale, **options, draws=draws)


@pytest.mark.emulator_grid
@pytest.mark.parametrize(
    "form, rms", [*((form, rms) for form in ("plain", "gated") for rms in (False, True)),
                  *((form, False) for form in BRANCHES)]
)  # fmt: skip
@dtypes
def test_long_rows(executor, dtype, form, rms):
    """On CUDA longer than the rows that a norm keeps in registers, and several tiles of columns."""
    p = 0.25 if form in BRANCHES else 0.0
    for cols in (LONG[dtype], LONG[dtype] + 3):
        check(make(form, (3, 2, cols), dtype, rms=rms, p=p))


@everywhere
@each_form
@pytest.mark.parametrize("batch, tokens", [(1, 300), (3, 128), (4, 64), (300, 1), (1, 1)])
def test_rows(batch, tokens, form):
    """Sums of one run of rows, of several, of several chunks."""
    check(*(make(form, (batch, tokens, 136), seed=seed) for seed in range(2)))


@everywhere
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@each_form
def test_16_bit_results_are_unbiased(dtype, form):
    check(make(form, (2, 32, 256), dtype, "columns"))


@everywhere
@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "dtype, scale_dtype, residual_dtype",
    [(BF16, F32, BF16), (BF16, F32, F32), (F16, F32, F16), (F32, BF16, F32), (BF16, F16, BF16)],
    ids=str,
)
@pytest.mark.parametrize("form", ["gated-sample", "gated-ones", "gated-row", "layer", "rms", "add"])
def test_mixed_dtypes(executor, form, dtype, scale_dtype, residual_dtype):
    """As of a timestep in float32; the output has the input's dtype."""
    form, _, per = form.partition("-")
    options = {"scale_dtype": scale_dtype, "residual_dtype": residual_dtype}
    for cols in (129, 136):
        check_draws(form, (3, 5, cols), dtype, per, **options, draws=executor.draws)


@everywhere
@pytest.mark.parametrize(
    "form, options",
    [
        *((f, {"shift": shift, "rms": rms})
          for f in ("plain", "added") for shift in (False, True) for rms in (False, True)),
        ("layer", {"affine": False}), ("rms", {"affine": False}), ("rms", {"offset": 1.0}),
        *((f, {"residual": False, "p": p, "dtype": dtype})
          for f in NORMS[2:] for p in (0.0, 0.4) for dtype in (F32, BF16)),
    ],
    ids=str,
)  # fmt: skip
def test_without_some_tensors(executor, form, options):
    check_draws(form, (3, 6, 72), **options, draws=executor.draws)


@everywhere
@pytest.mark.emulator_grid
@each_form
@pytest.mark.parametrize("cols", [65, 2056])
def test_gradients_for_some_arguments_only(cols, form):
    case = make(form, (2, 40, cols), p=0.2 if form in BRANCHES or form.startswith("add_") else 0.0)
    expected = results(case.ours, case)
    pairs = [("weight", "column_scale"), ("input", "gate"), ("input", "weight")]
    for names in (*((name,) for name in case.tensors), *pairs):
        if set(names) <= case.tensors.keys() and names != ("bias",):
            found = results(case.ours, case, wrt=names)
            assert_same_bits(found, {name: expected[name] for name in found}, str(names))
            assert {f"d{name}" for name in names} <= found.keys()


@everywhere
def test_an_upstream_gradient_of_another_dtype():
    """A dtype that autograd never passes."""
    case = make("gated", (2, 5, 64), BF16, scale_dtype=F32)
    t, (doutput, dh) = case.tensors, case.gradients
    rest = {"normalized_shape": [64], "kind": 0}
    forward = {"eps": 1e-5, "out_dtype": None, "save_statistics": True}
    _, h, mean, rstd = RAW.modulated_norm_forward(**t, **rest, **forward)
    rest |= {"input_dtype": None, "residual_dtype": None}
    given = {"x": h, "branch": t["input"], "mean": mean, "rstd": rstd, "dresidual_out": dh}
    given |= {name: t[name] for name in ("scale", "shift", "gate")} | rest | {"grad_mask": 31}
    narrow, wide = (
        RAW.modulated_norm_backward(**given, doutput=upstream)
        for upstream in (doutput, doutput.float())
    )
    assert all(map(torch.equal, narrow, wide))


# ---- shapes --------------------------------------------------------------------------------------


@everywhere
@dtypes
@pytest.mark.parametrize("form", ["gated", "rms", "add"])
def test_many_dimensions(dtype, form):
    """Images and video: (batch, frames, height, width, channels), none of which merge."""
    case = make(form, (3, 3, 2, 2, 24), dtype, "ones", rms=True)
    expected = results(case.ours, case)
    order = (0, 3, 2, 1, 4)  # its own inverse
    case.tensors["input"] = case.tensors["input"].permute(order).contiguous().permute(order)
    assert_same_bits(results(case.ours, case), expected)


@everywhere
@pytest.mark.parametrize("form", [*NORMS, "gated", "layer", "rms"])
def test_rows_of_several_dimensions(form):
    case = make(form, (3, 5, 6 * 8))
    expected = results(case.ours, case)
    case.tensors = {name: tensor.unflatten(-1, (6, 8)) for name, tensor in case.tensors.items()}
    case.gradients = tuple(gradient.unflatten(-1, (6, 8)) for gradient in case.gradients)
    case.row_dims = 2
    found = {name: tensor.flatten(-2) for name, tensor in results(case.ours, case).items()}
    assert_same_bits(found, expected)


@everywhere
@each_form
def test_samples_of_one_row(form):
    case, flat = make(form, (5, 72)), make(form, (5, 72))
    rows = {n: t[:, None] for n, t in case.tensors.items() if n in ("input", "residual")}
    flat.tensors, flat.gradients = flat.tensors | rows, tuple(g[:, None] for g in case.gradients)
    found = {n: t.squeeze(1) if t.dim() == 3 else t for n, t in results(flat.ours, flat).items()}
    assert_same_bits(found, results(case.ours, case))


@everywhere
def test_one_row_without_a_batch():
    x, c, one = torch.randn(40), torch.randn(40), torch.tensor(2.0)
    for function in (
        lambda x, c, r: functional.layer_norm(x, 40, c.view(40)),
        lambda x, c, r: functional.add_rms_norm(x, x, 40, c.view(40))[0],
        lambda x, c, r: functional.modulated_layer_norm(x, 40, c),
        lambda x, c, r: functional.add_layer_norm(x, x, 40, column_scale=c.view(40), row_scale=r)[
            1
        ],
        lambda x, c, r: functional.add_dropout(x, x, 0.0, column_scale=c.view(40), row_scale=r),
    ):
        assert torch.equal(function(x, c, one), function(x[None], c[None], one[None])[0])


@everywhere
@each_form
@pytest.mark.parametrize("size", [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("scale", ["sample", "row", "rows"])
def test_empty(scale, size, form):
    if form in NORMS and scale != "row":
        return  # which have none
    case = make(form, size, scale=scale)
    found = results(case.ours, case)
    assert all(found[name].shape == size for name in case.outputs)
    for name in case.tensors.keys() - {"input", "residual"}:
        gradient = found[f"d{name}"]
        assert gradient.shape == case.tensors[name].shape and not gradient.any()


# ---- extremes ------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "form, name",
    [*(("gated", name) for name in ("input", "residual", "scale", "shift", "gate")),
     *((f, name) for f in ("layer", "add") for name in ("input", "residual", "column_scale")),
     *((f, "input") for f in NORMS), ("add_rms_norm", "residual")],
)  # fmt: skip
def test_not_finite_elements_stay_where_torchs_do(form, name, value):
    """All others keep their bits."""
    case = make(form, (3, 4, 40))
    case.row_scale = torch.tensor([1.25, 2.0, 0.5]) if form in BRANCHES else None
    clean = results(case.ours, case)
    case.tensors[name].view(-1)[7] = value
    found, expected = results(case.ours, case), results(case.torchs, case, double=True)
    for output, tensor in found.items():
        assert torch.equal(tensor.isfinite(), expected[output].isfinite()), output
        if form in NORMS and output in ("y", "h", "dinput", "dresidual"):
            others = tensor.flatten(0, 1)[1:]
            assert torch.equal(others, clean[output].flatten(0, 1)[1:]), output


@everywhere
@pytest.mark.parametrize("form", ["gated", *BRANCHES])
@pytest.mark.parametrize("factor", [1e-15, 1e-4, 1e4, 1e15])
def test_magnitudes(factor, form):
    cases = [make(form, (3, 5, 200), seed=seed) for seed in range(2)]
    for case in cases:
        for name in {"input", "residual"} & case.tensors.keys():
            case.tensors[name] = case.tensors[name] * factor
    check(*cases)


@everywhere
@pytest.mark.parametrize(
    "form, factors", [("plain", {"scale": 1e6, "shift": 1e-6}), ("layer", {"column_scale": 1e-5})]
)
def test_magnitudes_of_scales(form, factors):
    """Large scales of small shifts; gamma as it begins, where the branch hardly shows."""
    cases = [make(form, (3, 50, 200), seed=seed) for seed in range(2)]
    for case in cases:
        for name, factor in factors.items():
            case.tensors[name] = case.tensors[name] * factor
    check(*cases)


@everywhere
@dtypes
@pytest.mark.parametrize("form", [*MODULATED, "layer_norm", "add_layer_norm"])
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-30])
def test_one_column_has_no_gradient(form, dtype, eps):
    """A large factor, 1 / sqrt(eps), of a difference that must be 0."""
    case = make(form, (3, 16, 1), dtype)
    case.eps = eps
    found, t = results(case.ours, case), case.tensors
    offset = t["shift"][:, None] if form in MODULATED else t["bias"]
    assert torch.equal(found["y"], offset.expand(3, 16, 1))
    assert not found["dscale" if form in MODULATED else "dweight"].any()
    through = torch.zeros_like(case.gradients[0])
    if "residual" in t:
        through = case.gradients[1]
        assert torch.equal(found["dresidual"], through)
    if form == "gated":
        through = through * t["gate"][:, None]
    assert torch.equal(found["dinput"], through)


# ---- dropped samples -----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("form", BRANCHES)
@dtypes
def test_dropped_samples_are_not_read(dtype, form):
    """NaN in them has no effect: the stream passes, their gradient is 0, gamma's has no NaN; nor
    has a scale that is infinite."""
    case = make(form, (4, 5, 72), dtype, p=0.2)
    dropped = case.row_scale == 0
    expected = results(case.ours, case)
    case.tensors["input"][dropped] = float("nan")
    assert_same_bits(results(case.ours, case), expected)
    assert not expected["dinput"][dropped].any() and expected["dinput"][~dropped].any()
    if form != "alone":
        assert torch.equal(expected["h"][dropped], case.tensors["residual"][dropped])
    case.tensors["column_scale"].fill_(float("inf"))
    found = results(case.ours, case)
    assert found["h"][dropped].isfinite().all() and not found["dinput"][dropped].any()


@everywhere
def test_without_a_residual():
    """The first block: residual_out is the scaled branch, in residual_dtype."""
    x, gamma, factors = torch.randn(3, 4, 2, 8), torch.randn(2, 8), torch.tensor([0.0, 2.0, 1.0])
    y, stream = functional.add_layer_norm(
        x.to(BF16), None, (2, 8), residual_dtype=F32, column_scale=gamma, row_scale=factors
    )
    expected = x.to(BF16).float() * gamma * factors.view(3, 1, 1, 1)
    assert y.dtype == BF16 and stream.dtype == F32
    torch.testing.assert_close(stream, expected)
    assert torch.equal(y, functional.layer_norm(stream, (2, 8)).to(BF16))
