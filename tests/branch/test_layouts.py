"""Layouts of every tensor, read in place or copied once, and numbers that are extreme."""

from __future__ import annotations

import math

import pytest
import torch

from onepass import functional
from tests.branch.cases import BF16, F32, check, dtypes, forms, make, results, scales
from tests.emulator.executors import everywhere
from tests.linear.test_layouts import LAYOUTS, strided
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


@everywhere
@pytest.mark.emulator_grid(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["input", "residual", "gradient"])
@pytest.mark.parametrize("form", ["layer", "add"])
def test_strides(executor, form, name, layout):
    """The bits of dense tensors; on CUDA rows off 16 bytes are summed in another order."""
    case = make(form, (6, 5, 40))
    expected = results(case.ours, case)
    if name == "gradient":
        case.gradients = tuple(strided(g, layout) for g in case.gradients)
    else:
        case.tensors[name] = strided(case.tensors[name], layout)
    if executor.is_cuda:
        return check(case, make(form, (6, 5, 40), seed=1))
    assert_same_bits(results(case.ours, case), expected, layout)


@everywhere
@forms
def test_strided_scales(form):
    """Every third element, and one for all: copied."""
    case = make(form, (6, 5, 40))
    expected = results(case.ours, case)
    plain = dict(case.tensors), case.row_scale
    for name in ("column_scale", "weight", "bias"):
        if name in case.tensors:
            case.tensors[name] = torch.stack([case.tensors[name]] * 3, 1)[:, 1]
    case.row_scale = torch.stack([case.row_scale] * 2, 1)[:, 1]
    assert_same_bits(results(case.ours, case), expected)
    case.tensors, case.row_scale = plain[0], torch.ones(1).expand(6)
    found = results(case.ours, case)
    case.row_scale = torch.ones(6)
    assert_same_bits(found, results(case.ours, case))


@everywhere
@dtypes
@pytest.mark.parametrize("form", ["rms", "add"])
def test_many_dimensions(dtype, form):
    """Images and video: (batch, frames, height, width, channels), none of which merge."""
    case = make(form, (3, 3, 2, 2, 24), dtype)
    expected = results(case.ours, case)
    order = (0, 3, 2, 1, 4)  # its own inverse
    case.tensors["input"] = case.tensors["input"].permute(order).contiguous().permute(order)
    assert_same_bits(results(case.ours, case), expected)


@everywhere
@forms
def test_samples_of_one_row(form):
    case = make(form, (5, 72))
    flat = make(form, (5, 72))
    flat.tensors |= {n: t[:, None] if t.dim() > 1 else t for n, t in case.tensors.items()}
    flat.gradients = tuple(g[:, None] for g in case.gradients)
    found = {n: t[:, 0] if t.dim() > 2 else t for n, t in results(flat.ours, flat).items()}
    assert_same_bits(found, results(case.ours, case))


@everywhere
@pytest.mark.parametrize("form", ["layer", "rms"])
def test_rows_of_several_dimensions(form):
    x, r, c = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8), torch.randn(2, 8)
    factors, norm = torch.tensor([0.0, 2.0, 1.0]), getattr(functional, f"add_{form}_norm")
    found = norm(x, r, (2, 8), column_scale=c, row_scale=factors)
    flat = norm(x.flatten(-2), r.flatten(-2), 16, column_scale=c.flatten(), row_scale=factors)
    for one, other in zip(found, flat, strict=True):
        assert torch.equal(one.flatten(-2), other)


@everywhere
@forms
@scales
@pytest.mark.parametrize("size", [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0)], ids=str)
def test_empty(size, scale, form):
    case = make(form, size, scale=scale)
    found = results(case.ours, case)
    assert found["h"].shape == size
    if scale != "rows":
        assert found["dcolumn_scale"].shape == size[-1:] and not found["dcolumn_scale"].any()


@everywhere
def test_one_row_without_a_batch():
    x, c = torch.randn(40), torch.randn(40)
    one = torch.tensor(2.0)
    for function in (
        lambda x, r: functional.add_layer_norm(x, x, 40, column_scale=c, row_scale=r)[1],
        lambda x, r: functional.add_dropout(x, x, 0.0, column_scale=c, row_scale=r),
    ):
        assert torch.equal(function(x, one), function(x[None], one[None])[0])


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@forms
def test_borders_stay_untouched(dtype, form):
    case = make(form, (3, 4, 34), dtype)
    buffers = {n: torch.full((5, 6, 40), math.nan, dtype=dtype) for n in case.tensors}
    for name, buffer in buffers.items():
        view = buffer[1:4, 1:5, 3:37]
        view = view if case.tensors[name].dim() > 1 else view[0, 0]
        case.tensors[name] = view.copy_(case.tensors[name])
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, found in results(case.ours, case).items():
        assert not found.isnan().any(), name
    for name, buffer in buffers.items():
        assert torch.equal(buffer.nan_to_num(-1), before[name].nan_to_num(-1))


# ---- extremes ------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["input", "residual", "column_scale"])
@pytest.mark.parametrize("form", ["layer", "add"])
def test_not_finite_elements_stay_where_torchs_do(form, name, value):
    case = make(form, (3, 4, 40))
    case.row_scale = torch.tensor([1.25, 2.0, 0.5])
    case.tensors[name].view(-1)[7] = value
    found, expected = results(case.ours, case), results(case.torchs, case, double=True)
    for output, tensor in found.items():
        assert torch.equal(tensor.isfinite(), expected[output].isfinite()), output


@everywhere
@forms
@pytest.mark.parametrize("factor", [1e-15, 1e-4, 1e4, 1e15])
def test_magnitudes(factor, form):
    cases = [make(form, (3, 5, 200), seed=seed) for seed in range(2)]
    for case in cases:
        for name in {"input", "residual"} & set(case.tensors):
            case.tensors[name] = case.tensors[name] * factor
    check(*cases)


@everywhere
def test_gamma_as_it_begins():
    """1e-5: the branch hardly shows, its scale's gradient does."""
    cases = [make("layer", (3, 50, 200), seed=seed) for seed in range(2)]
    for case in cases:
        case.tensors["column_scale"].fill_(1e-5)
    check(*cases)
