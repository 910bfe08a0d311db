"""The gate family's CUDA kernels under the emulator: traffic, addresses, races.

Their values are those of test_values.py.
"""

import pytest
import torch

from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.gate.cases import ACTIVATIONS, DTYPES, check, forms, make, results
from tests.support.dtypes import BF16, F32
from tests.support.results import assert_same_bits


@forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, cols", [(3, 4096), (5, 129), (40, 24), (1, 16384)])
def test_one_pass(cuda, rows, cols, dtype, form):
    """Every byte once: gate, up and output; backward doutput, gate, up, dgate and dup."""
    case = make(rows, cols, dtype, form=form)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("gate_forward"), cuda.of("gate_backward")
    tensor = rows * cols * dtype.itemsize
    assert (ahead["read"], ahead["written"]) == (2 * tensor, tensor)
    assert (back["read"], back["written"]) == (3 * tensor, 2 * tensor)


def test_one_pass_of_mixed_dtypes_and_one_gradient(cuda):
    case = make(4, 1000, BF16, up_dtype=F32)
    results(case.ours, case)
    (ahead,), (back,) = cuda.of("gate_forward"), cuda.of("gate_backward")
    assert (ahead["read"], ahead["written"]) == (6 * 4000, 4 * 4000)
    assert (back["read"], back["written"]) == ((4 + 2 + 4) * 4000, (2 + 4) * 4000)
    for mask, written in ((1, 2), (2, 4)):
        torch.ops.onepass.gate_backward(case.doutput, *case.factors, 2, False, mask)
        assert cuda.of("gate_backward")[-1]["written"] == written * 4000


def test_which_accesses(cuda):
    def aligned(case):
        results(case.ours, case)
        return ["true>" in call["launched"][0].kernel for call in cuda.done[-2:]]

    assert aligned(make(3, 1001)) == [True] * 2  # one row of them all
    assert aligned(make(3, 1000, BF16, form="halves")) == [True] * 2
    assert aligned(make(3, 1001, form="halves")) == [False] * 2
    cuda.set(shift=4)
    assert aligned(make(3, 1000)) == [False] * 2


def test_short_rows_share_a_block_and_long_ones_have_several(cuda):
    for rows, cols, blocks in ((1000, 64, 1000 * 8 // 256 + 1), (3, 9000, 3 * 2), (2, 8, 1)):
        check(make(rows, cols, form="halves"))
        assert [call["launched"][0].blocks for call in cuda.done[-2:]] == [blocks] * 2


@pytest.mark.parametrize("tensor", range(5))  # of those that a struct points to
def test_one_tensor_that_is_not_aligned(cuda, tensor):
    cuda.set(shift=4, misaligned=tensor)
    with cuda.sanitized("address", "gate.cu"):
        for cols in (72, 2056):
            check(make(3, cols))


@pytest.mark.parametrize("form", ["two", "halves"])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, form):
    case = make(40, 300, form=form)
    expected = results(case.ours, case)
    for seed in range(1, 3):
        cuda.set(seed=seed)
        assert_same_bits(results(case.ours, case), expected)


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, "gate.cu"):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in DTYPES[:: 4 if build == "thread" else 1]:
            for cols, form in ((1000, "halves"), (1001, "halves"), (1001, "two")):
                results(make(3, cols, dtype, form=form).ours, make(3, cols, dtype, form=form))
        for activation in ACTIVATIONS:
            case = make(3, 40, F32, activation)
            results(case.ours, case)
        for shift in (0, 4):
            cuda.set(shift=shift)
            case = make(3, 40, BF16, up_dtype=F32)
            results(case.ours, case)


@pytest.mark.parametrize("build", emulated.SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    gates = {name for name in all_instances() if "gate_" in name}
    assert gates == cuda.instances or build == "thread"
