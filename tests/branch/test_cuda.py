"""The CUDA kernels of scaled branches under the emulator: traffic, addresses, order, races.

Their values are those of test_values.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from onepass import functional
from tests.branch.cases import BF16, DTYPES, F16, F32, F64, LONG, check, dtypes, make, results
from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.support.results import assert_same_bits

NORM = ("norm/forward.cu", "norm/backward.cu")


@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_which_kernel(cuda, dtype):
    for cols, forward, backward in (
        (33, "norm_forward_kernel", "norm_backward_kernel"),
        (LONG[dtype], "norm_forward_", "norm_backward_columns_kernel"),
    ):
        results((case := make("layer", (3, 1, cols), dtype)).ours, case)
        kernels = [call["kernel"] for call in cuda.done[-2:]]
        assert kernels[0].startswith(forward) and kernels[1] == backward
        results((case := make("add", (3, 1, cols), dtype)).ours, case)
        kernels = [call["kernel"] for call in cuda.done[-2:]]
        assert kernels == ["branch_forward_kernel", "branch_backward_kernel"]


# ---- traffic -------------------------------------------------------------------------------------


def shares_of(cols: int) -> tuple[int, int]:
    """(tiles of columns, warps of a tile) of a row; each warp reads the row's factor."""
    packs = math.ceil(cols / 8)
    warps = min(math.ceil(packs / 32), 8)
    return math.ceil(packs / (32 * warps)), warps


@pytest.mark.parametrize("form", ["add", "alone"])
@pytest.mark.parametrize("scale", ["columns", "rows", "both"])
@pytest.mark.parametrize(
    "dtype, cols", [*itertools.product((F32, BF16), (64, 1000, 4096))], ids=str
)
def test_one_pass(cuda, dtype, cols, scale, form):
    """To the byte: each row once, dropped rows never; the scale once per block."""
    batch, tokens = 3, 6
    case = make(form, (batch, tokens, cols), dtype, scale)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("branch_forward"), cuda.of("branch_backward")
    rows, vector = batch * tokens, cols * dtype.itemsize
    columns, factors = scale != "rows", scale != "columns"
    kept = rows - (tokens if factors else 0)  # one sample of three is dropped
    adds = form == "add"
    # Without a scale of columns a row is a sample.
    tiles, warps = shares_of(cols if columns else cols * tokens)
    of_rows = factors * 4 * tiles * warps * (rows if columns else batch)
    assert ahead["read"] == (kept + adds * rows) * vector + of_rows + (
        columns * vector * ahead["splits"] // tiles
    )
    assert ahead["written"] == rows * vector
    parts = back["splits"]
    sums = columns * 4 * cols * parts if parts > 1 else 0
    assert back["read"] == (1 + columns) * kept * vector + of_rows + (
        columns * parts * vector + sums
    )
    assert back["written"] == rows * vector + columns * vector + sums


@pytest.mark.parametrize("scale", ["columns", "rows", "both"])
@pytest.mark.parametrize(
    "dtype, cols", [*itertools.product((F32, BF16), (256, 1000, 4096))], ids=str
)
def test_a_norm_reads_no_more_than_its_branch(cuda, dtype, cols, scale):
    """To the byte: a gate once per row and part, a factor once per warp or row, dropped rows not
    at all."""
    batch, tokens = 3, 8
    case = make("layer", (batch, tokens, cols), dtype, scale)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("modulated_norm_forward"), cuda.of("modulated_norm_backward")
    rows, vector = batch * tokens, cols * dtype.itemsize
    columns, factors, statistics = scale != "rows", scale != "columns", 8 * rows
    kept = rows - (tokens if factors else 0)
    warps = 1 if cols <= 1024 else cols // 1024
    assert ahead["read"] == (kept + rows) * vector + 2 * vector * ahead["splits"] + (
        columns * kept * vector + factors * 4 * rows * warps
    )
    assert ahead["written"] == 2 * rows * vector + statistics
    parts = back["splits"]
    arrays = 2 + columns
    sums = arrays * 4 * cols * parts if parts > 1 else 0
    # doutput, x, the sum's gradient, the branch.
    expected = 3 * rows * vector + columns * kept * vector + statistics + sums
    assert back["read"] == expected + (1 + columns) * vector * parts + factors * 4 * rows
    # dinput, dresidual.
    assert back["written"] == 2 * rows * vector + arrays * vector + sums


def test_parts_are_few(cuda):
    """Each has at least 32 rows, or there are no more than keep a device busy."""
    for rows in (1, 3, 40, 2000, 20000):
        results((case := make("add", (rows, 8), BF16)).ours, case)
        parts = cuda.done[-1]["splits"]
        assert 1 <= parts <= max(1, min(rows // 2, 128), rows // 32)


@dtypes
def test_shared_memory_fits_every_device(cuda, dtype):
    """A block's limit is 99 KiB on sm_86, sm_89 and sm_120, and more elsewhere."""
    for cols, form in itertools.product((256, 1024, 4096, 8192), ("layer", "add")):
        results((case := make(form, (2, 4, cols), dtype)).ours, case)
    assert 0 < max(call["shared"] for call in cuda.done) <= 99 * 1024


# ---- addresses and order -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["layer", "add"])
@pytest.mark.parametrize("tensor", range(14))  # of those that a struct points to
def test_one_tensor_that_is_not_aligned(cuda, tensor, form):
    cuda.set(shift=4, misaligned=tensor)
    check(make(form, (3, 4, 72), p=0.2))


@pytest.mark.parametrize("form", ["rms", "add"])
@pytest.mark.parametrize("cols", [72, 33, 2056])
@pytest.mark.parametrize("batch, tokens", [(1, 100), (3, 9)])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, batch, tokens, cols, form):
    case = make(form, (batch, tokens, cols), p=0.1)
    expected = results(case.ours, case)
    for seed in range(1, 3):
        cuda.set(seed=seed)
        assert_same_bits(results(case.ours, case), expected)


@pytest.mark.parametrize("far", range(1, 4))
def test_dimensions_that_32_bits_do_not_reach(cuda, far):
    cuda.set(far_new=far)
    for form in ("layer", "add"):
        check(make(form, (3, 2, 72), p=0.1))


# ---- every instance, in every build --------------------------------------------------------------

SLOW = [pytest.param(build, marks=pytest.mark.slow) for build in emulated.BUILDS[1:]]


@pytest.mark.parametrize("build", [emulated.BUILDS[0], *SLOW])
def test_each_instance(cuda, build):
    """Values by the numerics rule, without races or bad accesses; none is left out."""
    cuda.set(seed=1)
    with cuda.sanitized(build, "dropout.cu", seed=1):
        for (dtype, residual), cols in itertools.product(
            [*((dtype, dtype) for dtype in DTYPES), (BF16, F32)], (72, 33)
        ):
            check(make("add", (3, 4, cols), dtype, residual_dtype=residual, p=0.2))
        for dtype in (F32, F64):  # sums of several parts
            check(make("add", (2, 40, 72), dtype))
    left_out = {name for name in all_instances() - cuda.instances if "::branch_" in name}
    assert not left_out


@pytest.mark.parametrize("build", ["address", "thread"])
def test_sanitizers_are_silent(cuda, build):
    """On the branches within a norm's instances that a modulated norm's tests do not take."""
    with cuda.sanitized(build, *NORM, seed=3):
        for scale, tokens, cols in (("both", 9, 72), ("rows", 4, 33), ("both", 3, 1032)):
            results((case := make("layer", (3, tokens, cols), F16, scale, p=0.2)).ours, case)


def test_a_seed_is_one_stream_on_both(cuda):
    """DropPath's factors, drawn under the emulator, are the CPU's."""
    x = torch.ones(100, 4)
    torch.manual_seed(2)
    found = functional.drop_path_scale(x, 0.5)
    torch.manual_seed(2)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    assert torch.equal(found, CPUS(torch.ones(100), None, seed, 0.5, None))


CPUS = torch.ops.onepass.dropout_forward.default
