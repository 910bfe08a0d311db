"""The loss family's CUDA kernels under the emulator: traffic, addresses, races.

Their values are those of test_values.py.
"""

import pytest
import torch

from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.loss.cases import OPTIONS, check, dtypes, make, results
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import assert_same_bits


@pytest.mark.parametrize("option", ["mean", "none", "weighted, smoothed"])
@dtypes
@pytest.mark.parametrize("rows, cols", [(3, 4096), (5, 129), (9, 1031)])
def test_one_pass(cuda, rows, cols, dtype, option):
    """Every logit once, and every gradient; the forward reads each row's target once more."""
    case = make(rows, cols, dtype, **OPTIONS[option], ignored=False)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("loss_forward"), cuda.of("loss_backward")
    number, size = 8 if dtype is F64 else 4, dtype.itemsize
    tensor, is_mean = rows * cols * size, option != "none"
    weights = rows * cols * number if case.weight is not None else 0
    of_targets = rows * number if case.weight is not None else 0
    scratch = rows * number * (2 if is_mean else 1)  # losses, and the weights of the mean
    assert ahead["read"] == tensor + rows * (8 + size) + weights + of_targets + scratch
    written = rows * 5 * number + (size + number if is_mean else rows * size)
    assert ahead["written"] == tensor * 0 + written
    assert back["read"] == tensor + rows * (8 + size + 3 * number + is_mean * number) + weights
    assert back["written"] == tensor


def test_ignored_rows_are_written_alone(cuda):
    case = make(6, 500)
    case.target[:] = -100
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("loss_forward"), cuda.of("loss_backward")
    assert ahead["read"] == 6 * (8 + 2 * 4) and back["read"] == 6 * 8
    assert back["written"] == 6 * 500 * 4


def test_which_accesses(cuda):
    def kernels(case, function=None):
        results(function or case.ours, case)
        return ["true>" in call["launched"][0].kernel for call in cuda.of("loss_backward")[-1:]]

    assert kernels(make(3, 1001)) == kernels(make(3, 1000, BF16)) == [True]
    case = make(3, 1001)
    case.input = torch.cat([case.input, case.input[:, :5]], 1)[:, :1001]
    assert kernels(case) == [False]
    case = make(1, 1001)
    case.input = torch.cat([case.input, case.input], 1)[:, 1:1002]
    assert kernels(case) == [False]


def test_short_rows_share_a_block_and_long_ones_have_one(cuda):
    for rows, cols, blocks, threads in ((10, 64, 3, 128), (3, 1025, 3, 160), (2, 9000, 2, 512)):
        case = make(rows, cols)
        results(case.ours, case)
        for op in ("loss_forward", "loss_backward"):
            launched = cuda.of(op)[-1]["launched"][0]
            assert (launched.blocks, launched.threads) == (blocks, threads)


@pytest.mark.parametrize("tensor", range(3))  # of those that a struct points to
@pytest.mark.parametrize("build", ["plain", "address"])
def test_one_tensor_that_is_not_aligned(cuda, build, tensor):
    cuda.set(shift=8, misaligned=tensor)
    with cuda.sanitized(build, "loss.cu"):
        for cols in (72, 2056):
            check(*(make(3, cols, seed=seed) for seed in range(3)))


@pytest.mark.parametrize("cols", [300, 1300])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, cols):
    case = make(40, cols, **OPTIONS["weighted, smoothed"])
    expected = results(case.ours, case)
    for seed in range(1, 3):
        cuda.set(seed=seed)
        assert_same_bits(results(case.ours, case), expected)


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, "loss.cu"):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in (F32,) if build == "thread" else (F32, BF16, F16, F64):
            for cols, option in ((100, "mean"), (1301, "all"), (1301, "sum")):
                case = make(5, cols, dtype, **OPTIONS[option])
                results(case.ours, case)
                results(case.inplace, case)
            case.input = torch.cat([case.input, case.input[:, :5]], 1)[:, :1301]
            results(case.ours, case)


@pytest.mark.parametrize("build", emulated.BUILDS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    losses = {name for name in all_instances() if "loss_" in name}
    assert losses == cuda.instances or build == "thread"
