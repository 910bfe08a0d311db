"""Every layout of every tensor: read in place or copied once, and the order of the output's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onepass import functional
from tests.emulator.executors import everywhere
from tests.group_norm.cases import (
    BF16,
    F32,
    RAW,
    channels_last,
    check,
    dtypes,
    make,
    orders,
    results,
)
from tests.support.allocations import allocated
from tests.support.draws import equally_hard
from tests.support.results import assert_same_bits

pytestmark = pytest.mark.isa

# Views of the same values in other layouts than channels first and last.
COPIED = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every other column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "cropped": lambda t: F.pad(t, (1, 2))[..., 1:-2],
}


def spread_samples(t: torch.Tensor) -> torch.Tensor:
    """Samples with a gap after each, in t's own order."""
    gap = torch.empty(2 * t.numel(), dtype=t.dtype)
    return gap.as_strided(t.shape, (2 * t.stride(0), *t.stride()[1:])).copy_(t)


VIEWS = {
    "samples apart": lambda t, last: spread_samples(channels_last(t) if last else t),
    "channels of more": lambda t, last: (channels_last if last else torch.clone)(
        torch.cat([t, t], 1)
    )[:, : t.shape[1]],
}


@everywhere
@dtypes
@orders
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["input", "doutput"])
def test_views_in_place(which, view, last, dtype):
    case = make((3, 8, 5, 6), 2, dtype, last=last)
    expected = results(case.ours, case)
    if which == "input":
        case.tensors[0] = VIEWS[view](case.input, last)
    else:
        case.doutput = VIEWS[view](case.doutput, last)
    found = results(case.ours, case)
    assert_same_bits(found, expected, view)
    for name in ("output", "dinput"):
        assert found[name].stride() == expected[name].stride()


@everywhere
@dtypes
@pytest.mark.parametrize("layout", COPIED)
@pytest.mark.parametrize("which", ["input", "doutput"])
def test_layouts_that_are_copied(which, layout, dtype):
    case = make((3, 8, 5, 6), 2, dtype)
    expected = results(case.ours, case)
    if which == "input":
        case.tensors[0] = COPIED[layout](case.input)
    else:
        case.doutput = COPIED[layout](case.doutput)
    assert_same_bits(results(case.ours, case), expected, layout)


@everywhere
@orders
def test_an_upstream_gradient_in_the_other_order(last):
    case = make((3, 8, 5, 6), 2, last=last)
    expected = results(case.ours, case)
    case.doutput = case.doutput.contiguous() if last else channels_last(case.doutput)
    assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("view", [None, *VIEWS])
def test_nothing_is_copied(view, last):
    """Nothing is allocated beside the output and scratch."""
    case = make((2, 32, 32, 32), 4, last=last)
    x = case.input if view is None else VIEWS[view](case.input, last)
    taken = allocated(RAW.group_norm_forward, x, None, None, 4, 1e-5, 2, last, None, False)
    assert case.doutput.nbytes <= taken < 1.1 * case.doutput.nbytes


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
@pytest.mark.parametrize("part", ["all", "channels", "crop", "samples"])
def test_the_order_of_the_output_is_torchs(dims, part):
    x = torch.randn(2, 8, *(4, 5, 6)[: dims - 2])
    orders = [x] if dims < 4 else [x, channels_last(x)]
    for order in orders:
        if part == "crop" and dims == 2:
            continue  # of channels
        cut = {"all": ..., "channels": (slice(None), slice(4)), "samples": slice(None, None, 2)}
        view = order[cut[part]] if part != "crop" else order[..., 1:]
        found, expected = functional.group_norm(view, 2), F.group_norm(view, 2)
        assert found.stride() == expected.stride(), (view.shape, view.stride())
        torch.testing.assert_close(found, expected)


@everywhere
@dtypes
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_expanded_gradients(dim, dtype):
    """Of stride 0, as the gradient of a sum is."""
    case = make((3, 8, 5, 6), 2, dtype)
    one = case.doutput.narrow(dim, 0, 1).expand_as(case.doutput)
    case.doutput = one.contiguous()
    expected = results(case.ours, case)
    case.doutput = one
    assert_same_bits(results(case.ours, case), expected)


@everywhere
@dtypes
@orders
@pytest.mark.parametrize(
    "shape, groups",
    [((1, 2, 1, 1), 1), ((3, 5, 1, 3), 5), ((2, 7, 3, 5), 1), ((1, 34, 2, 9), 17)],
    ids=str,
)
def test_odd_sizes(executor, shape, groups, last, dtype):
    """Few elements need more draws."""
    draws = 1 + 100 * executor.draws // (shape[0] * shape[1] * shape[2] * shape[3])
    cases = [make(shape, groups, dtype, last=last, seed=seed) for seed in range(draws)]
    for case in cases:
        grouped = case.input.reshape(shape[0], groups, -1)
        if grouped.shape[-1] < 4:
            case.input.copy_(equally_hard(grouped, -1).view(shape))
    check(*cases)


@everywhere
@dtypes
def test_groups_of_one_element(dtype):
    """torch refuses a single sample of them: the output depends on the bias alone."""
    case = make((1, 6), 6, dtype)
    found = results(case.ours, case)
    bias = case.tensors[2]
    torch.testing.assert_close(found["output"][0], F.silu(bias.double()).to(dtype))
    assert not found["dweight"].any() and found["dbias"].all()
    # A rounding of dz, times rstd.
    largest = case.eps**-0.5 * torch.finfo(torch.promote_types(dtype, F32)).eps
    assert found["dinput"].abs().max() < 4 * largest


@everywhere
@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3), (2, 0, 3), (0, 8)], ids=str)
def test_empty(shape):
    case = make(shape, 2)
    found, expected = results(case.ours, case), results(case.torchs, case)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape and not tensor.any(), name


@everywhere
@orders
def test_strided_weights(last):
    case = make((2, 8, 3, 5), 2, last=last)
    expected = results(case.ours, case)
    case.tensors[1:] = [t.repeat_interleave(2)[::2] for t in case.tensors[1:]]
    assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize(
    "size, stride",
    [
        ((1, 4, 1, 16), (999, 16, 777, 1)),  # strides of single elements mean nothing
        ((2, 8, 1, 1), (8, 1, 55, 7)),
        ((2, 4, 3, 3), (1, 1, 3, 1)),  # overlapping
        ((2, 4, 2, 2), (0, 1, 8, 4)),
    ],
)
def test_odd_strides(size, stride):
    x = torch.randn(1024).as_strided(size, stride)
    dense = x.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(functional.group_norm(x, 2), functional.group_norm(dense, 2))


@pytest.mark.parametrize("last", [False, True])
def test_offsets_beyond_32_bits(last):
    """Samples 2^31 + 5 elements apart; the memory between them is never touched."""
    try:
        buffer = torch.empty(2**31 + 5 + 512, dtype=BF16)
    except RuntimeError:
        pytest.skip("the system refuses to reserve 4 GiB, of which two samples are touched")
    case = make((2, 8, 5, 6), 2, BF16, last=last)
    expected = results(case.ours, case)
    strides = (2**31 + 5, *case.input.stride()[1:])
    case.tensors[0] = buffer.as_strided((2, 8, 5, 6), strides).copy_(case.input)
    assert_same_bits(results(case.ours, case), expected)
