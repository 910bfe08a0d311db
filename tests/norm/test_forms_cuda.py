"""The CUDA kernels of modulated norms and scaled branches under the emulator: traffic, races; and
addresses, order and parts of all norms. Their values are those of test_forms.py.
"""

import itertools
import math

import pytest

from tests.emulator.executors import all_instances
from tests.norm import cases
from tests.norm.forms import (
    BF16,
    F16,
    F32,
    F64,
    LONG,
    MODULATED,
    NORMS,
    SCALES,
    check,
    dtypes,
    make,
    results,
)
from tests.support.results import assert_same_bits

NORM = ("norm/forward.cu", "norm/backward.cu")


def run(*arguments, **options):
    """A call, forward and backward."""
    case = make(*arguments, **options)
    return results(case.ours, case)


@pytest.mark.parametrize("dtype", LONG, ids=str)
@pytest.mark.parametrize("form", ["layer_norm", "gated", "layer", "add"])
def test_which_kernel(cuda, form, dtype):
    long = cases.LONG[dtype] if form in NORMS else LONG[dtype]
    for cols, forward, backward in (
        (33, "norm_forward_kernel", "norm_backward_kernel"),
        (long, "norm_forward_", "norm_backward_columns_kernel"),
    ):
        run(form, (3, 1, cols), dtype)
        ahead, back = (call["kernel"] for call in cuda.done[-2:])
        if form == "add":
            assert (ahead, back) == ("branch_forward_kernel", "branch_backward_kernel")
        else:
            assert ahead.startswith(forward) and back == backward
            assert all(("Modulated" in name) == (form not in NORMS) for name in cuda.instances)
    assert form not in NORMS or ahead == "norm_forward_long_kernel"


# ---- traffic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MODULATED)
@pytest.mark.parametrize(
    "dtype, cols",
    [*itertools.product((BF16, F32), (256, 1000, 4096, 1001)), (BF16, 8192)],  # of registers
    ids=str,
)
@pytest.mark.parametrize("batch, tokens", [(2, 8), (2, 3), (5, 1)])
@pytest.mark.grid(2)
def test_one_pass_of_a_modulated_norm(cuda, batch, tokens, dtype, cols, form):
    """To the byte: rows once, scale, shift and gate once per block, statistics, partial sums."""
    run(form, (batch, tokens, cols), dtype)
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


@pytest.mark.parametrize("form", MODULATED)
def test_a_scale_for_each_row_is_read_with_it(cuda, form):
    """Its gradient is written with the row's: there are no sums."""
    rows, cols = 12, 1000
    run(form, (3, 4, cols), BF16, "row", scale_dtype=F32)
    (ahead,), (back,) = cuda.of("modulated_norm_forward"), cuda.of("modulated_norm_backward")
    adds, gates, elements = form != "plain", form == "gated", rows * cols
    of_rows = 2 * (1 + adds) + 4 * (2 + gates)
    assert ahead["read"] == of_rows * elements
    assert ahead["written"] == 2 * (1 + adds) * elements + 8 * rows
    assert back["read"] == (2 * (2 + adds + gates) + 4 * (1 + gates)) * elements + 8 * rows
    assert back["written"] == (2 * (1 + gates) + 4 * (2 + gates)) * elements


def shares_of(cols: int) -> tuple[int, int]:
    """(tiles of columns, warps of a tile) of a row; each warp reads the row's factor."""
    packs = math.ceil(cols / 8)
    warps = min(math.ceil(packs / 32), 8)
    return math.ceil(packs / (32 * warps)), warps


@pytest.mark.parametrize("form", ["add", "alone"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "dtype, cols", [*itertools.product((F32, BF16), (64, 1000, 4096))], ids=str
)
def test_one_pass_of_a_branch(cuda, dtype, cols, scale, form):
    """To the byte: each row once, dropped rows never; the scale once per block."""
    batch, tokens = 3, 6
    run(form, (batch, tokens, cols), dtype, scale)
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


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "dtype, cols", [*itertools.product((F32, BF16), (256, 1000, 4096))], ids=str
)
def test_a_norm_reads_no_more_than_its_branch(cuda, dtype, cols, scale):
    """To the byte: a gate once per row and part, a factor once per warp or row, dropped rows not
    at all."""
    batch, tokens = 3, 8
    run("layer", (batch, tokens, cols), dtype, scale)
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


@pytest.mark.parametrize(
    "form, cols, shapes",
    [
        ("layer_norm", 8, [(1, 1), (1, 64), (1, 1000), (1, 20_000)]),
        ("layer_norm", 2056, [(1, 1), (1, 2000)]),
        ("plain", 8, [(1, 2000), (4, 500), (300, 40), (2, 3)]),
        ("add", 8, [(1, 1), (1, 3), (1, 40), (1, 2000), (1, 20_000)]),
    ],
)
def test_parts_are_few(cuda, form, cols, shapes):
    """Each has at least 32 rows, or there are no more than keep a device busy. A sample's scale has
    parts of its own."""
    for batch, tokens in shapes:
        run(form, (batch, tokens, cols), BF16)
        parts, rows = cuda.done[-1]["splits"], batch * tokens
        least, busy = batch if form == "plain" else 1, 128 if form == "add" else 256
        assert parts % least == 0
        assert least <= parts <= max(least, min(rows // 2, busy), rows // 32)


@pytest.mark.parametrize("form", ["layer_norm", "gated", "layer", "add"])
@dtypes
def test_shared_memory_fits_every_device(cuda, dtype, form):
    """A block's limit is 99 KiB on sm_86, sm_89 and sm_120, and more elsewhere."""
    for cols in (256, 1024, 4096, 8192, *((16383, 16384, 16392) if form in NORMS else ())):
        run(form, (1, 4, cols), dtype)
    assert 0 < max(call["shared"] for call in cuda.done) <= 99 * 1024


# ---- addresses and order -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["add_layer_norm", "gated", "layer", "add"])
@pytest.mark.parametrize("tensor", range(-1, 14))  # all, and each that a struct points to
def test_one_tensor_that_is_not_aligned(cuda, tensor, form):
    cuda.set(shift=4, misaligned=tensor)
    is_branch = form in ("layer", "add")
    with cuda.sanitized("plain" if is_branch else "address", *NORM):
        for cols in (72, 2056) if form in NORMS else (72,):
            check(make(form, (1, 3, cols) if form in NORMS else (3, 4, cols), p=0.2 * is_branch))


@pytest.mark.parametrize("form", [*NORMS, "gated", "rms", "add"])
@pytest.mark.parametrize("cols", [72, 33, 2056])
def test_bitwise_equal_in_any_order_of_blocks_and_threads(cuda, cols, form):
    case = make(form, (3, 33, cols), p=0.1 if form in ("rms", "add") else 0.0)
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

# One, two and four packs per thread, aligned and not; rows too long for registers, forward too.
EACH = [72, 264, 1000, 33, 1001, 8200, 8201, 16392, 16395]
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32)]
SLOW = [pytest.param(build, marks=pytest.mark.slow) for build in ("address", "thread")]


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    cuda.set(seed=1)
    with cuda.sanitized(build, *NORM, seed=1):
        for (dtype, residual_dtype), cols in itertools.product(DTYPES, EACH):
            size = (1, 2 if cols > 2000 else 4, cols)
            check(make("gated", size, dtype, rms=cols % 2 > 0, residual_dtype=residual_dtype))
        for dtype in (F32, F64):  # sums of several parts
            check(make("gated", (1, 80, 72), dtype))


def each_branch(cuda, build: str) -> None:
    cuda.set(seed=1)
    with cuda.sanitized(build, "dropout.cu", seed=1):
        for (dtype, residual), cols in itertools.product(DTYPES, (72, 33)):
            check(make("add", (3, 4, cols), dtype, residual_dtype=residual, p=0.2))
        for dtype in (F32, F64):
            check(make("add", (2, 40, 72), dtype))


@pytest.mark.parametrize("build", ["plain", *SLOW])
@pytest.mark.parametrize("calls, name", [(each_instance, "Modulated"), (each_branch, "::branch_")])
def test_each_instance(cuda, build, calls, name):
    """Values by the numerics rule, without races or bad accesses; none is left out."""
    calls(cuda, build)
    assert not {instance for instance in all_instances() - cuda.instances if name in instance}


@pytest.mark.parametrize("build", ["address", "thread"])
def test_sanitizers_are_silent(cuda, build):
    """On the paths within an instance that the test above does not take."""
    with cuda.sanitized(build, *NORM, seed=3):
        for per, tokens, cols in (("sample", 9, 72), ("row", 4, 72), ("sample", 64, 264)):
            run("gated", (2, tokens, cols), scale=per)
        for scale, tokens, cols in (("both", 9, 72), ("rows", 4, 33), ("both", 3, 1032)):
            run("layer", (3, tokens, cols), F16, scale, p=0.2)
