"""Logits that are not finite, large, masked; rows without a target."""

import math

import pytest
import torch

from tests.emulator.executors import everywhere
from tests.loss.cases import IGNORED, OPTIONS, check, dtypes, make, results, small
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import assert_same_bits, kinds

pytestmark = pytest.mark.isa
INF, NAN = math.inf, math.nan


@everywhere
@dtypes
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cols", [5, 2500])
def test_not_finite_logits(cols, label_smoothing, dtype):
    """Results are not finite where torch's are, at the target and elsewhere."""
    options = {"reduction": "none", "label_smoothing": label_smoothing}
    case = make(9, cols, dtype, ignored=False, **options)
    case.target[:] = torch.tensor([0, 3] * 4 + [0])
    case.dloss = torch.ones(9, dtype=dtype)
    for row, value in enumerate((NAN, NAN, INF, INF, -INF, -INF)):
        case.input[row, 3] = value
    case.input[6] = -INF  # nothing is left
    case.input[7, : cols - 1] = -INF  # whole packs and tiles of it
    case.input[8] = INF
    found, expected = results(case.ours, case), results(case.torchs, case, double=True)
    for name, tensor in found.items():
        assert torch.equal(kinds(tensor), kinds(expected[name])), name


@everywhere
@dtypes
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ignored_rows_are_not_read(reduction, dtype):
    case = make(6, 1030, dtype, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
    case.target[[0, 3]] = IGNORED
    expected = results(case.ours, case)
    for value in (NAN, INF, -INF):
        case.input[case.target == IGNORED] = value
        assert_same_bits(results(case.ours, case), expected)
    assert not expected["dinput"][case.target == IGNORED].any()


@everywhere
@dtypes
@small
def test_nothing_but_ignored_rows(small, dtype):
    """The mean of nothing is NaN as in torch, and gradients are 0."""
    for reduction, of_torch in (("mean", NAN), ("sum", 0.0), ("none", 0.0)):
        case = small(dtype=dtype, reduction=reduction)
        case.target[:] = IGNORED
        found = results(case.ours, case)
        loss = found.pop("loss")
        torch.testing.assert_close(loss, torch.full_like(loss, of_torch), equal_nan=True)
        assert not any(tensor.any() for tensor in found.values())


@everywhere
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("offset", [-3e4, 300.0, 3e4])
@pytest.mark.parametrize("option", ["mean", "smoothed", "weighted, smoothed"])
def test_large_logits(executor, dtype, offset, option):
    """Sums are of differences, so adding a number to a whole row changes little."""
    draws = range(2 * executor.draws)
    cases = [make(6, 1500, dtype, seed=seed, **OPTIONS[option]) for seed in draws]
    for case in cases:
        case.input = case.input + offset
    check(*cases)


CERTAIN = {
    "plain": {},
    "z_loss": {"z_loss": 1e-4},
    "large z_loss": {"z_loss": 0.1},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, z_loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "weighted, z_loss": {"weighted": True, "z_loss": 1e-3},
    "softcap, z_loss": {"softcap": 30.0, "z_loss": 1e-3},
}


@everywhere
@dtypes
@pytest.mark.parametrize("option", CERTAIN)
@pytest.mark.parametrize("cols", [2, 3, 60, 1200])
@pytest.mark.grid(2)
def test_certain_rows_of_each_option(executor, cols, option, dtype):
    """Loss and gradient are near 0: neither may be lost beside a larger number. What an option adds
    to the gradient is not rounded as p is, beside 1: of two classes it is all there is."""
    logits = (5.0, 9.0) if dtype is F64 else (5.0, 14.0, 25.0)  # float64 has no base
    for logit in logits:
        draws = range(4 * executor.draws)
        cases = [make(8, cols, dtype, seed=s, **CERTAIN[option]) for s in draws]
        for case in cases:
            case.input[torch.arange(8), case.target.clamp(min=0)] = logit
        check(*cases)


@everywhere
@dtypes
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_one_class_has_no_gradient_but_of_z_loss(executor, dtype, label_smoothing):
    case = make(6, 1, dtype, label_smoothing=label_smoothing)
    found = results(case.ours, case)
    assert not found["loss"].any() and not found["dinput"].any()
    options = {"label_smoothing": label_smoothing, "z_loss": 1e-3}
    check(*(make(6, 1, dtype, seed=seed, **options) for seed in range(4 * executor.draws)))


@everywhere
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_growing_and_falling_rows(executor, dtype):
    """The maximum grows with each tile, or is the first one."""
    ahead = torch.linspace(-40, 40, 5000).expand(3, -1)
    cases = []
    for x in (ahead, ahead.flip(-1)):
        case = make(3, 5000, dtype)
        case.input = (x + case.input / 10).to(dtype)
        cases.append(case)
    check(*cases)


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_saturated_softcap(dtype):
    """Far beyond the cap a logit has no gradient."""
    case = make(4, 300, dtype, softcap=2.0)
    case.input[:, ::2] = case.input[:, ::2].sign() * 1000
    check(case)
    assert not results(case.ours, case)["dinput"][:, ::2].any()


@small
def test_weights_of_zero(small):
    """Their mean is NaN as in torch."""
    case = small(weighted=True, ignored=False)
    case.weight[:] = 0
    found, torchs = results(case.ours, case), results(case.torchs, case)
    assert all(torch.equal(kinds(tensor), kinds(torchs[name])) for name, tensor in found.items())
    assert found["loss"].isnan()
