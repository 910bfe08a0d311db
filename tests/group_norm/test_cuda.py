"""The group norm family's CUDA kernels under the emulator: traffic, addresses, races.

Their values are those of test_values.py.
"""

from math import ceil

import pytest
import torch

from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.group_norm.cases import BF16, DTYPES, F16, F32, F64, RAW, check, dtypes, make, orders
from tests.group_norm.cases import results as both
from tests.support.results import assert_same_bits

THREADS, PACK, LANES = 256, 8, 32
SOURCES = ("group_norm/forward.cu", "group_norm/backward.cu")


def cut(shape, last: bool) -> tuple[int, int, int]:
    """(parts, threads of a row, turns), as the kernels divide the work."""
    channels, pixels = shape[1], shape[2] * shape[3]
    last = last or pixels == 1
    parts = min(max(pixels // (32 if last else 1024), 1), 64)
    step = ceil(ceil(pixels / parts) / PACK) * PACK
    parts = -(-pixels // step)
    if not last:
        return parts, LANES if step <= LANES * PACK else THREADS, 1
    packs, threads = -(-channels // PACK), 1
    while threads < THREADS and threads < packs:
        threads *= 2
    return parts, threads, -(-packs // threads)


def moved(shape, groups: int, dtype, last: bool) -> tuple[int, int, int, int]:
    """Bytes: read and written by the forward, then by the backward.

    Forward: input twice, output, two sums of each channel's part written and read, statistics;
    and the numbers of a channel, by every warp of a row, or by every thread that has the channel.
    Where results are written, a row of up to two parts of the least length has one warp.
    Backward: doutput and input twice, dinput, the sums written once and read twice, once with the
    weight; two means of a group beside the numbers of a channel.
    """
    batch, channels = shape[:2]
    size, wide = dtype.itemsize, 8 if dtype is F64 else 4
    tensor = batch * channels * shape[2] * shape[3] * size
    parts, threads, _ = cut(shape, last)
    sums = 2 * batch * parts * channels * wide
    statistics = 2 * batch * groups * wide
    rows = batch * parts * channels
    readers = rows * (THREADS // threads if last else threads // LANES)
    writers = rows if not last and shape[2] * shape[3] < 2048 * parts else readers
    channel = 2 * wide + 2 * size
    ahead = 2 * tensor + sums + writers * channel, tensor + sums + statistics
    back = 4 * tensor + 2 * sums + rows * size
    back += readers * channel + writers * (channel + 2 * wide)
    return *ahead, back, tensor + sums + statistics + 2 * channels * size


@dtypes
@orders
@pytest.mark.parametrize(
    "shape, groups",
    [((2, 8, 4, 8), 2), ((2, 24, 40, 64), 3), ((1, 6, 5, 7), 3), ((3, 16, 33, 1), 16)],
    ids=str,
)
def test_traffic(cuda, shape, groups, last, dtype):
    case = make(shape, groups, dtype, last=last)
    both(case.ours, case)
    (ahead,), (back,) = cuda.of("group_norm_forward"), cuda.of("group_norm_backward")
    found = ahead["read"], ahead["written"], back["read"], back["written"]
    assert found == moved(shape, groups, dtype, last)


def test_which_kernels(cuda):
    case = make((2, 8, 4, 8), 2)
    both(case.ours, case)
    assert [call["launches"] for call in cuda.done] == [3, 4]
    for mask, launches in ((1, 3), (2, 2), (4, 2), (6, 2)):
        case.raw_backward(mask)
        assert cuda.of("group_norm_backward")[-1]["launches"] == launches


def test_which_accesses(cuda):
    def aligned(case):
        both(case.ours, case)
        kernels = [launch.kernel for call in cuda.done[-2:] for launch in call["launched"]]
        packed = {"true>" in name for name in kernels if "true>" in name or "false>" in name}
        assert len(packed) == 1
        return packed.pop()

    assert aligned(make((2, 6, 4, 8), 2))
    assert not aligned(make((2, 6, 5, 7), 2))
    assert aligned(make((2, 8, 5, 7), 2, BF16, last=True))
    assert not aligned(make((2, 6, 4, 8), 2, BF16, last=True))
    cuda.set(shift=4)
    assert not aligned(make((2, 6, 4, 8), 2))


@pytest.mark.parametrize("tensor", range(4))  # of those that a struct points to
@orders
def test_one_tensor_that_is_not_aligned(cuda, last, tensor):
    cuda.set(shift=4, misaligned=tensor)
    with cuda.sanitized("address", *SOURCES):
        check(*(make((2, 8, 4, 8), 2, last=last, seed=seed) for seed in range(6)))


@orders
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, last):
    case = make((2, 24, 40, 41), 3, last=last)
    expected = both(case.ours, case)
    for seed in range(1, 3):
        cuda.set(seed=seed)
        assert_same_bits(both(case.ours, case), expected)


@orders
def test_more_channels_than_a_block_has(cuda, last):
    check(make((1, 2304, 2, 3), 32, last=last))
    check(make((1, 2052, 2, 3), 27, BF16, last=last))


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, *SOURCES):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in DTYPES[:: 4 if build == "thread" else 1]:
            for last in (False, True):
                for shape in ((2, 8, 4, 8), (1, 6, 5, 7), (1, 8, 32, 72)):
                    case = make(shape, 2, dtype, last=last)
                    both(case.ours, case)
        for last in (False, True):
            for shape in ((2, 8, 4, 8), (1, 6, 5, 7)):
                case = make(shape, 2, BF16, last=last)
                rest = 2, 1e-5, 0, last, F32 if last else F16, True
                _, mean, rstd = RAW.group_norm_forward(*case.tensors, *rest)
                wide = case.doutput.float()
                RAW.group_norm_backward(wide, *case.tensors, mean, rstd, 2, 0, last, 7)
                assert torch.isfinite(mean).all()


@pytest.mark.parametrize("build", emulated.SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    found = {name for name in all_instances() if "group_norm_" in name}
    assert found == {name for name in cuda.instances if "group_norm_" in name} or build == "thread"
