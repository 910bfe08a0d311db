"""Layouts of every tensor, read in place or copied once, and numbers that are extreme."""

from __future__ import annotations

import math

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.linear.test_layouts import LAYOUTS, strided
from tests.modulated_norm.cases import (
    BF16,
    F32,
    INPUTS,
    check,
    dtypes,
    make,
    results,
)
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa


@everywhere
@pytest.mark.emulator_grid(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*INPUTS, "dy", "dh"])
def test_strides(executor, name, layout):
    """The bits of dense tensors; on CUDA rows off 16 bytes are summed in another order."""
    case = make(False, 6, 5, 40, per="row", form="gated")
    expected = results(case.ours, case)
    if name in INPUTS:
        case.tensors[name] = strided(case.tensors[name], layout)
    else:
        which = name == "dh"
        case.gradients = tuple(
            strided(g, layout) if i == which else g for i, g in enumerate(case.gradients)
        )
    if executor.is_cuda:
        return check(case, *(make(False, 6, 5, 40, per="row", form="gated", seed=1),))
    assert_same_bits(results(case.ours, case), expected, layout)


@everywhere
@dtypes
@pytest.mark.parametrize("per", ["sample", "ones", "row"])
def test_chunks_of_one_projection(dtype, per):
    """As in models: six rows side by side in one tensor, read in place."""
    case = make(False, 3, 7, 64, dtype, per, "gated")
    expected = results(case.ours, case)
    names = ("scale", "shift", "gate")
    parts = torch.cat([case.tensors[n] for n in names], -1).chunk(3, -1)
    case.tensors |= dict(zip(names, parts, strict=True))
    found = results(case.ours, case)
    assert_same_bits(found, expected)
    assert all(t.is_contiguous() for t in found.values())


@everywhere
@pytest.mark.parametrize("which", ["scale", "shift", "gate"])
def test_expanded_modulation(which):
    """Of stride 0: one for all samples, whose gradient autograd sums."""
    case = make(False, 3, 5, 72, per="ones", form="gated")
    case.tensors[which] = case.tensors[which][:1].expand(3, 1, 72).contiguous()
    expected = results(case.ours, case)
    case.tensors[which] = case.tensors[which][:1].expand(3, 1, 72)
    assert_same_bits(results(case.ours, case), expected)


@everywhere
@dtypes
def test_many_dimensions(dtype):
    """Images and video: (batch, frames, height, width, channels), none of which merge."""
    case = make(True, 2, (3, 2, 2), 24, dtype, "ones", "gated")
    expected = results(case.ours, case)
    order = (0, 3, 2, 1, 4)  # its own inverse
    case.tensors["input"] = case.tensors["input"].permute(order).contiguous().permute(order)
    assert_same_bits(results(case.ours, case), expected)


@everywhere
def test_rows_of_several_dimensions():
    case = make(False, 2, 5, 6 * 8, form="gated")
    expected = results(case.ours, case)
    case.tensors = {name: tensor.unflatten(-1, (6, 8)) for name, tensor in case.tensors.items()}
    case.gradients = tuple(gradient.unflatten(-1, (6, 8)) for gradient in case.gradients)
    case.row_dims = 2
    found = {name: tensor.flatten(-2) for name, tensor in results(case.ours, case).items()}
    assert_same_bits(found, expected)


@everywhere
@pytest.mark.parametrize("size", [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("per", ["sample", "row"])
def test_empty(per, size):
    batch, tokens, cols = size
    case = make(False, batch, tokens, cols, per=per, form="gated")
    found = results(case.ours, case)
    assert found["y"].shape == found["h"].shape == size
    for name in ("scale", "shift", "gate"):
        assert found[f"d{name}"].shape == case.tensors[name].shape
        assert not found[f"d{name}"].any()


@everywhere
def test_one_row_without_a_batch():
    x, scale = torch.randn(40), torch.randn(40)
    found = functional.modulated_layer_norm(x, 40, scale)
    assert torch.equal(found, functional.modulated_layer_norm(x[None], 40, scale[None])[0])


@everywhere
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_borders_stay_untouched(dtype):
    case = make(False, 3, 4, 34, dtype, "row", "gated")
    buffers = {n: torch.full((5, 6, 40), math.nan, dtype=dtype) for n in case.tensors}
    for name, buffer in buffers.items():
        view = buffer[1:4, 1:5, 3:37]
        case.tensors[name] = view.copy_(case.tensors[name])
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, found in results(case.ours, case).items():
        assert not found.isnan().any(), name
    for name, buffer in buffers.items():
        assert torch.equal(buffer.nan_to_num(-1), before[name].nan_to_num(-1))


# ---- extremes ------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", INPUTS)
def test_not_finite_elements_stay_in_their_sample(name, value):
    """Results are not finite exactly where torch's are not."""
    case = make(False, 3, 4, 40, form="gated")
    case.tensors[name][1].view(-1)[7] = value
    found, expected = results(case.ours, case), results(case.torchs, case, double=True)
    for output, tensor in found.items():
        assert torch.equal(tensor.isfinite(), expected[output].isfinite()), output


@everywhere
@pytest.mark.parametrize("factor", [1e-15, 1e-4, 1e4, 1e15])
def test_magnitudes_of_the_input(factor):
    cases = [make(False, 2, 5, 200, form="gated", seed=seed) for seed in range(2)]
    for case in cases:
        for name in ("input", "residual"):
            case.tensors[name] = case.tensors[name] * factor
    check(*cases)


@everywhere
def test_large_scales_of_small_shifts():
    cases = [make(False, 2, 5, 200, seed=seed) for seed in range(2)]
    for case in cases:
        case.tensors["scale"] = case.tensors["scale"] * 1e6
        case.tensors["shift"] = case.tensors["shift"] * 1e-6
    check(*cases)


@everywhere
@pytest.mark.parametrize("per", ["sample", "row"])
def test_a_scale_of_minus_one_leaves_the_shift(per):
    case = make(False, 2, 5, 64, per=per)
    case.tensors["scale"].fill_(-1.0)
    shift = case.tensors["shift"]
    expected = shift[:, None].expand(2, 5, 64) if per == "sample" else shift
    found = results(case.ours, case)
    assert torch.equal(found["y"], expected)
    assert not found["dinput"].any() and found["dscale"].any()


@everywhere
def test_a_gate_of_zero_leaves_the_residual():
    case = make(False, 2, 5, 64, BF16, form="gated")
    case.tensors["gate"].zero_()
    found = results(case.ours, case)
    assert torch.equal(found["h"], case.tensors["residual"])
    assert not found["dinput"].any() and found["dgate"].any()
