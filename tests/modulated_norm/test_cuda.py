"""The modulated norms' CUDA kernels under the emulator: traffic, addresses, order, races.

Their values are those of test_values.py.
"""

from __future__ import annotations

import itertools

import pytest

from tests.emulator.executors import all_instances
from tests.modulated_norm.cases import (
    BF16,
    F16,
    F32,
    F64,
    LONG,
    check,
    dtypes,
    make,
    results,
)
from tests.support.results import assert_same_bits

KERNELS = ("norm/forward.cu", "norm/backward.cu")
FORMS = ("plain", "add", "gated")


@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_which_kernel(cuda, dtype):
    for cols, forward, backward in (
        (33, "norm_forward_kernel", "norm_backward_kernel"),
        (LONG[dtype], "norm_forward_", "norm_backward_columns_kernel"),
    ):
        case = make(False, 1, 3, cols, dtype, form="gated")
        results(case.ours, case)
        kernels = [call["kernel"] for call in cuda.done[-2:]]
        assert kernels[0].startswith(forward) and kernels[1] == backward
        assert all("Modulated" in name for name in cuda.instances)


# ---- traffic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "dtype, cols",
    [*itertools.product((BF16, F32), (256, 1000, 1024, 4096, 1001)), (BF16, 8192)],  # of registers
    ids=str,
)
@pytest.mark.parametrize("batch, tokens", [(2, 8), (2, 3), (5, 1)])
def test_one_pass(cuda, batch, tokens, dtype, cols, form):
    """To the byte: rows once, scale, shift and gate once per block, statistics, partial sums."""
    case = make(False, batch, tokens, cols, dtype, form=form)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("modulated_norm_forward"), cuda.of("modulated_norm_backward")
    rows, vector = batch * tokens, cols * dtype.itemsize
    adds, gates = form != "plain", form == "gated"
    modulators, statistics = 3 if gates else 2, 8 * rows
    # input and output; residual and the sum. A warp loads the gate with its row.
    in_gates = rows - ahead["splits"] if gates else 0
    assert ahead["read"] == (2 if adds else 1) * rows * vector + vector * (
        ahead["splits"] * modulators + in_gates
    )
    assert ahead["written"] == (2 if adds else 1) * rows * vector + statistics
    # doutput, x and dx; the sum's upstream gradient; branch and its gradient.
    parts = back["splits"]
    sums = modulators * 4 * cols * parts if parts > batch else 0
    assert (
        back["read"]
        == (2 + adds + gates) * rows * vector + parts * vector * (1 + gates) + statistics + sums
    )
    assert back["written"] == (1 + gates) * rows * vector + batch * modulators * vector + sums


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_for_each_row_is_read_with_it(cuda, form):
    """Its gradient is written with the row's: there are no sums."""
    rows, cols = 12, 1000
    case = make(False, 3, 4, cols, BF16, "row", form, scale_dtype=F32)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("modulated_norm_forward"), cuda.of("modulated_norm_backward")
    adds, gates, elements = form != "plain", form == "gated", rows * cols
    of_rows = 2 * (1 + adds) + 4 * (2 + gates)
    assert ahead["read"] == of_rows * elements
    assert ahead["written"] == 2 * (1 + adds) * elements + 8 * rows
    assert back["read"] == (2 * (2 + adds + gates) + 4 * (1 + gates)) * elements + 8 * rows
    assert back["written"] == (2 * (1 + gates) + 4 * (2 + gates)) * elements


def test_parts_are_few(cuda):
    """Each has at least 32 rows, or there are no more than keep a device busy."""
    for batch, tokens in ((1, 2000), (4, 500), (300, 40), (2, 3)):
        case = make(False, batch, tokens, 8, BF16)
        results(case.ours, case)
        parts = cuda.done[-1]["splits"]
        assert parts % batch == 0
        assert batch <= parts <= max(batch, min(batch * tokens // 2, 256), batch * tokens // 32)


@dtypes
def test_shared_memory_fits_every_device(cuda, dtype):
    """A block's limit is 99 KiB on sm_86, sm_89 and sm_120, and more elsewhere."""
    for cols in (256, 1024, 4096, 8192):
        case = make(False, 2, 4, cols, dtype, form="gated")
        results(case.ours, case)
    assert 0 < max(call["shared"] for call in cuda.done) <= 99 * 1024


# ---- addresses and order -------------------------------------------------------------------------


@pytest.mark.parametrize("build", ["plain", "address"])
@pytest.mark.parametrize("tensor", range(13))  # of those that a struct points to
def test_one_tensor_that_is_not_aligned(cuda, build, tensor):
    cuda.set(shift=4, misaligned=tensor)
    with cuda.sanitized(build, *KERNELS):
        check(make(False, 2, 4, 72, form="gated"))


@pytest.mark.parametrize("cols", [72, 33, 2056])
@pytest.mark.parametrize("batch, tokens", [(1, 100), (3, 9)])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, batch, tokens, cols):
    case = make(False, batch, tokens, cols, form="gated")
    expected = results(case.ours, case)
    for seed in range(1, 3):
        cuda.set(seed=seed)
        assert_same_bits(results(case.ours, case), expected)


# ---- every instance, in every build --------------------------------------------------------------

# One, two and four packs per thread, aligned and not; rows too long for registers, forward too.
EACH = [72, 264, 1000, 33, 1001, 8200, 8201, 16392, 16395]
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32)]
SLOW = [pytest.param(build, marks=pytest.mark.slow) for build in ("address", "thread")]


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    cuda.set(seed=1)
    with cuda.sanitized(build, *KERNELS, seed=1):
        for (dtype, residual_dtype), cols in itertools.product(DTYPES, EACH):
            tokens = 2 if cols > 2000 else 4
            rest = dict(form="gated", residual_dtype=residual_dtype)
            check(make(cols % 2 > 0, 1, tokens, cols, dtype, **rest))
        for dtype in (F32, F64):  # sums of several parts
            check(make(False, 1, 80, 72, dtype, form="gated"))


@pytest.mark.parametrize("build", ["plain", *SLOW])
def test_each_instance(cuda, build):
    """Values by the numerics rule, without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    left_out = {name for name in all_instances() - cuda.instances if "Modulated" in name}
    assert not left_out


@pytest.mark.parametrize("build", ["address", "thread"])
def test_sanitizers_are_silent(cuda, build):
    """On the branches within an instance that the test above does not take."""
    with cuda.sanitized(build, *KERNELS, seed=3):
        for per, tokens, cols in (("sample", 9, 72), ("row", 4, 72), ("sample", 64, 264)):
            case = make(False, 2, tokens, cols, per=per, form="gated")
            results(case.ours, case)
