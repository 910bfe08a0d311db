"""Every layout of every tensor: read in place or copied once, and the order of the output's."""

import pytest
import torch
import torch.nn.functional as F

from onepass import functional
from tests.emulator.executors import everywhere
from tests.group_norm.cases import RAW, channels_last, check, dtypes, make, orders, results
from tests.support.allocations import allocated
from tests.support.draws import equally_hard

pytestmark = pytest.mark.isa


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
@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3), (2, 0, 3), (0, 8)], ids=str)
def test_empty(shape):
    case = make(shape, 2)
    found, expected = results(case.ours, case), results(case.torchs, case)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape and not tensor.any(), name
