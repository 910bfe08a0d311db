"""The norm family's CUDA kernels under the emulator: values, gradients, layouts, traffic, races."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.emulator.executors import all_instances
from tests.norm.cases import (
    ALIGNED,
    KINDS,
    LONG,
    UNALIGNED,
    Case,
    check,
    kinds,
    make,
    outputs_and_gradients,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KERNELS = ("norm/forward.cu", "norm/backward.cu")
SANITIZERS = ("address", "thread")


# ---- values and gradients ------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_columns(cuda, rms, residual, dtype):
    for cols in ALIGNED + UNALIGNED:
        seeds = range(6 if cols < 16 else 1)
        check(*(make(rms, 5, cols, dtype, residual=residual, seed=seed) for seed in seeds))
    kernels = {call["kernel"] for call in cuda.done}
    assert kernels >= {"norm_forward_kernel", "norm_backward_kernel"}


@kinds
@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_rows_too_long_for_registers(cuda, rms, residual, dtype):
    for cols in (LONG[dtype], LONG[dtype] + 3):
        check(make(rms, 3, cols, dtype, residual=residual))
    kernels = {call["kernel"] for call in cuda.done}
    assert kernels == {"norm_forward_long_kernel", "norm_backward_columns_kernel"}


@kinds
@pytest.mark.parametrize("rows", [1, 4, 33, 300])
def test_rows(cuda, rms, residual, rows):
    check(make(rms, rows, 72, residual=residual))


@kinds
def test_mixed_dtypes(cuda, rms, residual):
    for input, weight in [(BF16, F32), (F32, BF16), (F16, F32)]:
        for cols in (72, 33, 2056):
            case = make(rms, 9, cols, input, residual=residual)
            case.weight = case.weight.to(weight)
            if case.bias is not None:
                case.bias = case.bias.to(weight)
            if residual:
                case.residual = case.residual.to(F32)
            check(case)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_dropout_before_the_add(cuda, rms, dtype):
    for cols in (72, 33, 2056):
        check(make(rms, 9, cols, dtype, residual=True, dropout_p=0.25))


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("cols", [72, 33, 2056, 16392])
def test_optional_weight_and_offset(cuda, weight, cols):
    for rms in (False, True):
        case = make(rms, 5, cols, weight_offset=1.0 if rms and weight else 0.0)
        if not weight:
            case.weight = case.bias = None
        check(case)


@pytest.mark.parametrize("wrt", ["input", "weight", "bias", "residual"])
@pytest.mark.parametrize("cols", [72, 2056, 16392])
def test_one_gradient_alone(cuda, wrt, cols):
    check(make(False, 5, cols, residual=True, dropout_p=0.25), wrt=(wrt,))


def test_no_rows(cuda):
    for residual in (False, True):
        case = make(False, 0, 72, residual=residual)
        outputs, gradients = outputs_and_gradients(case.ours, case)
        assert outputs["y"].shape == (0, 72)
        for name in ("weight", "bias"):
            assert torch.equal(gradients[name], torch.zeros(72))


def test_extremes(cuda):
    case = make(False, 9, 1000)
    case.input = case.input + 1e4
    check(case)
    for cols in (72, 33, 16392):
        constant = make(False, 4, cols)
        constant.input = torch.full_like(constant.input, 3.7)
        outputs, _ = outputs_and_gradients(constant.ours, constant)
        assert torch.equal(outputs["y"], constant.bias.expand(4, cols)), "x - mean is exactly 0"


# ---- layouts -------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("apart", [80, 77])  # rows that stay aligned, and rows that do not
def test_strided_rows(cuda, rms, residual, apart):
    case = make(rms, 6, 72, residual=residual)
    case.input = torch.randn(6, apart)[:, :72]
    check(case)


@kinds
def test_rows_in_three_dimensions(cuda, rms, residual):
    """Every tensor with strides of its own, and columns for each way a row is divided out."""
    for cols, rows in (
        (72, (3, 4, 5)),
        (8, (49, 7, 11)),
        (33, (3, 4, 5)),
        (1000, (2, 3, 2)),
        (LONG[F32], (2, 1, 3)),
    ):
        case = make(rms, rows, cols, residual=residual)
        case.input = torch.randn(rows[1], rows[0], rows[2], cols + 8)[..., :cols].transpose(0, 1)
        if residual:
            case.residual = torch.randn(rows[2], rows[1], rows[0], cols).transpose(0, 2)
        check(case)


@kinds
def test_addresses_that_are_not_aligned(cuda, rms, residual):
    cuda.set(shift=4)
    check(make(rms, 6, 72, residual=residual))
    check(make(rms, 3, 2048, residual=residual))


@pytest.mark.parametrize("build", ["plain", "address"])
@pytest.mark.parametrize("tensor", range(10))  # of those that a struct points to
def test_one_tensor_that_is_not_aligned(cuda, build, tensor):
    cuda.set(shift=4, misaligned=tensor)
    with cuda.sanitized(build, *KERNELS):
        for cols in (72, 2056):
            check(make(False, 3, cols, residual=True))


# ---- contracts -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("cols", [72, 33, 2056])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, rms, residual, cols):
    results = []
    for seed in range(3):
        cuda.set(seed=seed)
        case = make(rms, 100, cols, residual=residual)
        results.append([v for of in outputs_and_gradients(case.ours, case) for v in of.values()])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


def test_a_row_does_not_depend_on_its_batch(cuda):
    case = make(False, 9, 2056)
    whole, _ = outputs_and_gradients(case.ours, case)
    one = Case(False, case.input[4:5].clone(), weight=case.weight, bias=case.bias)
    alone, _ = outputs_and_gradients(one.ours, one)
    assert torch.equal(whole["y"][4:5], alone["y"])


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
        for cols in (256, 1024, 4096, 8192, 6145, 8191, 16384, 12289, 16383)
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
    """Of lengths that 16-byte accesses could take."""
    case = make(False, 16, cols, dtype)
    if apart == "stride":
        case.input = torch.randn(16, cols + 1).to(dtype)[:, :cols]
    else:
        case.input = torch.randn(16 * cols + 1).to(dtype)[1:].view(16, cols)
    check_one_pass(cuda, case, forward, backward)
    assert cuda.instances and not any("true" in name for name in cuda.instances)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_shared_memory_fits_every_device(cuda, dtype):
    """A block's limit is 99 KiB on sm_86, sm_89 and sm_120, and more elsewhere."""
    for cols in (1024, 4096, 8192, 16383, 16384, 16392):
        case = make(False, 3, cols, dtype)
        outputs_and_gradients(case.ours, case)
    assert 0 < max(call["shared"] for call in cuda.done) <= 99 * 1024


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


@pytest.mark.parametrize("cols", [8, 2056])
def test_partials_are_few(cuda, cols):
    """At least 32 rows to each, or no more than keep a device busy."""
    for rows in (1, 64, 1000, 20_000 if cols == 8 else 2000):
        case = make(False, rows, cols, BF16)
        outputs_and_gradients(case.ours, case)
        parts = cuda.of("norm_backward")[-1]["splits"]
        assert 1 <= parts <= max(1, min(rows // 2, 256), rows // 32)


# ---- every instance, in every build --------------------------------------------------------------

# One, two and four packs per thread, few and many single elements of few and of many threads, rows
# too long for registers.
EACH = [72, 264, 1000, 33, 1001, 12289, 16392, 16395]
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32)]


# A minute under the thread sanitizer; test_sanitizers_are_silent has the branches.
@pytest.mark.parametrize(
    "build", ["plain", *(pytest.param(build, marks=pytest.mark.slow) for build in SANITIZERS)]
)
def test_each_instance(cuda, build):
    """Values by the numerics rule, without races or bad accesses; none is left out."""
    cuda.set(seed=1)
    with cuda.sanitized(build, *KERNELS, seed=1):
        for dtype, residual_dtype in DTYPES:
            for cols in EACH:
                rows = 3 if cols > 2000 else 6
                case = make(cols % 2 > 0, rows, cols, dtype, residual=True, dropout_p=0.25)
                case.residual = case.residual.to(residual_dtype)
                check(case)
    left_out = {name for name in all_instances() - cuda.instances if "::norm_" in name}
    assert not left_out


# Seconds each under the thread sanitizer: norms differ in no barrier.
QUICK = [("address", *kind) for kind in KINDS] + [("thread", False, True)]


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
