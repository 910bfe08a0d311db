"""The norm family's CUDA kernels under the emulator: traffic and races.

Their values are those of test_values.py; test_forms_cuda.py has addresses and order.
"""

import itertools

import pytest
import torch

from tests.emulator.executors import all_instances
from tests.norm.cases import LONG, check, make, outputs_and_gradients

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KERNELS = ("norm/forward.cu", "norm/backward.cu")
SANITIZERS = ("address", "thread")


# ---- traffic -------------------------------------------------------------------------------------


def bytes_of(call: dict) -> int:
    return call["read"] + call["written"]


# Bytes per element, forward and backward; the most columns that are read once.
ONE_PASS = [
    ("bf16", BF16, None, 4, 6, 16384),
    ("f16", F16, None, 4, 6, 16384),
    ("f32", F32, None, 8, 12, 8192),
    ("bf16+residual", BF16, BF16, 8, 8, 16384),
    ("bf16+f32 residual", BF16, F32, 12, 16, 8192),
]


def check_one_pass(calls, case, forward, backward):
    """To the byte: rows once, weight and bias once per block, statistics, and the sums of parts."""
    rows, cols = case.input.shape
    outputs_and_gradients(case.ours, case)
    (ahead,), (back,) = calls.of("norm_forward"), calls.of("norm_backward")
    vector, statistics = cols * case.input.element_size(), 8 * rows
    assert bytes_of(ahead) == forward * rows * cols + ahead["splits"] * 2 * vector + statistics
    partials = 2 * 4 * cols  # written once, and read once by the last kernel
    assert bytes_of(back) == (
        backward * rows * cols + back["splits"] * (vector + 2 * partials) + 2 * vector + statistics
    )


@pytest.mark.parametrize(
    "dtype, residual, forward, backward, cols",
    [
        pytest.param(*case, cols, id=f"{name}-{cols}")
        for name, *case, most in ONE_PASS
        for cols in (256, 1024, 8192, 6145, 16384, 12289, 16383)
        if cols <= most
    ],
)
def test_one_pass(cuda, dtype, residual, forward, backward, cols):
    case = make(False, 16, cols, dtype, residual=residual is not None)
    if residual is not None:
        case.residual = case.residual.to(residual)
    check_one_pass(cuda, case, forward, backward)


@pytest.mark.parametrize("apart", ["stride", "address"])
@pytest.mark.parametrize(
    "dtype, forward, backward, cols",
    [
        pytest.param(dtype, *read_and_written, most, id=name)
        for name, dtype, residual, *read_and_written, most in ONE_PASS
        if residual is None
    ],
)
def test_one_pass_over_rows_off_16_bytes(cuda, apart, dtype, forward, backward, cols):
    """Rows whose length allows 16-byte accesses, but whose address does not."""
    case = make(False, 16, cols, dtype)
    if apart == "stride":
        case.input = torch.randn(16, cols + 1).to(dtype)[:, :cols]
    else:
        case.input = torch.randn(16 * cols + 1).to(dtype)[1:].view(16, cols)
    check_one_pass(cuda, case, forward, backward)
    assert cuda.instances and not any("true" in name for name in cuda.instances)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_long_rows_are_read_twice_at_most(cuda, dtype, residual):
    rows, cols = 3, LONG[dtype]
    case = make(False, rows, cols, dtype, residual=residual)
    outputs_and_gradients(case.ours, case)
    (ahead,), (back,) = cuda.of("norm_forward"), cuda.of("norm_backward")
    once, vector = rows * cols * dtype.itemsize, cols * dtype.itemsize
    # With a residual, input and residual are read once and their sum again. A block has a row.
    assert ahead["read"] <= (3 if residual else 2) * once + rows * 2 * vector
    assert ahead["written"] <= (2 if residual else 1) * once + 8 * rows
    warps = 16 * -(-cols // 4096)  # of the blocks that share a row
    statistics = 8 * rows * 16 + 16 * rows * warps  # read by each of them, in both kernels
    partials = 2 * 4 * cols * back["splits"]
    assert back["read"] <= (
        (5 if residual else 4) * once + (rows + back["splits"]) * vector + partials + statistics
    )
    assert back["written"] <= once + partials + 2 * vector + 8 * rows


# ---- every instance, in every build --------------------------------------------------------------

# One, two and four packs per thread, few and many single elements of few and of many threads, rows
# too long for registers.
EACH = [72, 264, 1000, 33, 1001, 12289, 16392, 16395]
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32)]


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    cuda.set(seed=1)
    with cuda.sanitized(build, *KERNELS, seed=1):
        for dtype, residual_dtype in DTYPES:
            for cols in EACH:
                rows = 3 if cols > 2000 else 6
                case = make(cols % 2 > 0, rows, cols, dtype, residual=True, dropout_p=0.25)
                case.residual = case.residual.to(residual_dtype)
                check(case)


# A minute under the thread sanitizer; test_sanitizers_are_silent has the branches.
@pytest.mark.parametrize(
    "build", ["plain", *(pytest.param(build, marks=pytest.mark.slow) for build in SANITIZERS)]
)
def test_each_instance(cuda, build):
    """Values by the numerics rule, without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    left_out = all_instances() - cuda.instances
    left_out = {name for name in left_out if "::norm_" in name and "Modulated" not in name}
    assert not left_out


# Seconds each under the thread sanitizer: norms differ in no barrier.
QUICK = [("address", False, True), ("address", True, False), ("thread", False, True)]


@pytest.mark.parametrize(
    "build, rms, residual",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(SANITIZERS, (False, True), (False, True))
    ],
)
def test_sanitizers_are_silent(cuda, build, rms, residual):
    """On the branches within an instance that the test above does not take."""
    for cols in (72, 33, 2056):
        with cuda.sanitized(build, *KERNELS, seed=cols):
            case = make(rms, 9 if cols < 2000 else 3, cols, residual=residual)
            outputs_and_gradients(case.ours, case)
