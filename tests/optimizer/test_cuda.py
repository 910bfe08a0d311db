"""The optimizer family's CUDA kernels under the emulator: bitwise steps, one pass, no races; values
on a device too.

Norms and clipping are those of test_clipping.py.
"""

import math

import pytest
import torch

from onepass.optim.contract import ALGORITHMS
from tests.emulator.executors import CUDA, Emulated, all_instances
from tests.optimizer import cases
from tests.optimizer.cases import (
    ADAM,
    GROUPS,
    INT8,
    KERNELS,
    LION,
    MOMENTS,
    PIECE,
    SGD,
    Step,
    clip_on_cuda,
    hyper,
    make,
    make_mixes,
    norm_on_cuda,
    on_cpu,
    on_cuda,
    shifted,
)
from tests.support.dtypes import BF16, F16, F32, F64

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
MIXED_SIZES = {False: 300, True: 512}  # a whole row and a tail; two blocks of codes
SIZES = (0, 1, 7, 255, 256, 257, PIECE, PIECE + 1, 2 * PIECE + 300)
INF, NAN = float("inf"), float("nan")


def assert_equal(ones, others, case="") -> None:
    for number, (one, two) in enumerate(zip(ones, others, strict=True)):
        for which, (a, b) in enumerate(zip(one.all(), two.all(), strict=True)):
            assert torch.equal(a, b), f"{case} tensor {number}, operand {which}"


@pytest.fixture(params=CUDA)
def counts(request) -> Emulated | None:
    """The emulator, for its counts; on a device nothing is counted."""
    return request.getfixturevalue("emulator") if request.param == "emulated" else None


def check(emulator: Emulated | None, call: Step, steps: int = 1) -> None:
    """Every operand of every tensor is as on the CPU, and nothing else has changed."""
    cpu, cuda = call.copy(), call.copy()
    for number in range(steps):
        on_cpu(cpu)
        on_cuda(cuda, emulator)
        assert_equal(cpu.tensors, cuda.tensors, f"step {number},")


OPERANDS = ("param", "gradient", "moments 0", "moments 1", "moments 2", "master", "average")


def shift(tensors: list[cases.Tensors], operands) -> list[cases.Tensors]:
    """Makes each of these operands begin 8 bytes after a multiple of 16."""

    def change(name, tensor):
        return shifted(tensor) if name in operands else tensor

    return [t.changed(change) for t in tensors]


def make_groups(algorithm: int, sizes=SIZES, **dtypes) -> tuple[list, torch.Tensor]:
    """Tensors of each size in each group, one of them before its first step."""
    settings = GROUPS[algorithm]
    tensors = []
    for group, setting in enumerate(settings):
        moments = MOMENTS[algorithm] + bool(setting.get("amsgrad"))
        moments -= algorithm == SGD and setting.get("momentum") == 0.0
        for i, size in enumerate(sizes):
            made = make(size, moments=moments, group=group, index=i, step=i * i, **dtypes)
            tensors.append(made)
    return tensors, hyper(*settings)


# ---- values --------------------------------------------------------------------------------------


@algorithms
@pytest.mark.parametrize("stochastic", [False, True])
def test_every_mix_of_dtypes(counts, algorithm, stochastic):
    tensors = make_mixes(MIXED_SIZES, MOMENTS[algorithm])
    call = Step(
        algorithm, tensors, hyper({}), stochastic_params=stochastic, stochastic_moments=stochastic
    )
    check(counts, call, steps=2)
    assert counts is None or all(call["launches"] == 1 for call in counts.done)


@algorithms
@pytest.mark.parametrize(
    "dtypes", [{}, {"param": BF16, "master": torch.int16}, {"param": F64}], ids=str
)
def test_settings_of_groups_and_sizes(counts, algorithm, dtypes):
    tensors, settings = make_groups(algorithm, **dtypes)
    check(counts, Step(algorithm, tensors, settings), steps=2)


@algorithms
def test_amsgrad_in_codes_and_noise_beyond_the_first_piece(counts, algorithm):
    """The noise continues over pieces; the third moment is rounded to nearest."""
    settings = {"amsgrad": algorithm == ADAM}
    moments = MOMENTS[algorithm] + settings["amsgrad"]
    tensors = [
        make(2 * PIECE + 512, BF16, BF16, moment, moments=moments, index=7, step=0)
        for moment in (INT8, BF16)
    ]
    check(
        counts,
        Step(
            algorithm, tensors, hyper(settings), seed=-5, stochastic_params=True,
            stochastic_moments=True,
        ),
        steps=2,
    )  # fmt: skip


@algorithms
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999, 1.0])
def test_averages(counts, algorithm, decay):
    """Averages of the step's unrounded result; 16-bit averages are rounded stochastically."""
    kinds = [
        (F32, None, F32), (BF16, None, F32), (BF16, None, BF16), (BF16, F32, BF16), (F16, F32, F16),
        (BF16, torch.int16, F32), (F64, None, F64),
    ]  # fmt: skip
    tensors = [
        make(size, param, master=master, moments=MOMENTS[algorithm], index=i, average=average)
        for i, (param, master, average) in enumerate(kinds)
        for size in (257, PIECE + 300)
    ]
    call = Step(algorithm, tensors, hyper({"ema_decay": decay}), stochastic_params=True)
    before = [t.average.clone() for t in tensors]
    check(counts, call, steps=2)
    on_cuda(call, counts)
    for t, was in zip(tensors, before, strict=True):
        if decay == 1.0:
            assert torch.equal(t.average, was)
        elif decay == 0.0 and t.average.dtype is t.param.dtype and t.param.itemsize > 2:
            assert torch.equal(t.average, t.param)


@algorithms
@pytest.mark.parametrize(
    "given",
    [
        {"grad_scale": 1024.0},
        {"norm": 30.0, "max_norm": 0.7},
        {"norm": 0.3, "max_norm": 0.7},  # nothing to clip
        {"norm": 3e4, "max_norm": 0.7, "grad_scale": 1024.0, "found_inf": 0.0},
        {"norm": 3.0},
    ],
    ids=str,
)
def test_unscaling_clipping_and_zeroing(counts, algorithm, given):
    tensors = [
        make(300, param, gradient, moments=MOMENTS[algorithm], index=i)
        for i, (param, gradient) in enumerate([(F32, BF16), (BF16, F16), (F64, F64)])
    ]
    for zero in (False, True):
        call = Step(algorithm, tensors, hyper({}), zero_gradients=zero, **given)
        check(counts, call)
        on_cuda(call, counts)
        assert all((t.gradient == 0).all() for t in tensors) == zero


@pytest.mark.parametrize("dtype", [F32, BF16, INT8, F64], ids=str)
def test_moments_that_the_settings_do_not_ask_for(counts, dtype):
    """They are neither read nor written."""
    wide = dtype is F64
    for algorithm, moments, settings in ((ADAM, 3, {}), (SGD, 1, {"momentum": 0.0})):
        for step in (0, 3):
            kinds = dict(param=F64 if wide else F32, moment=dtype, moments=moments, step=step)
            call = Step(algorithm, [make(512, **kinds)], hyper(settings))
            check(counts, call)
            before = call.tensors[0].moments[-1].clone()
            on_cuda(call, counts)
            assert torch.equal(call.tensors[0].moments[-1], before)


# ---- NaN and infinities --------------------------------------------------------------------------


@algorithms
@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e38])
def test_gradients_that_are_no_numbers(counts, algorithm, value):
    """Without a norm they are used, and spread as on the CPU."""
    mixes = [
        (F32, F32, F32, None), (BF16, F32, BF16, None), (BF16, F32, F32, F32),
        (BF16, F32, F32, torch.int16), (F16, F32, F16, None), (BF16, F32, INT8, None),
    ]  # fmt: skip
    tensors = [
        make(512, param, gradient, moment, master, moments=MOMENTS[algorithm], index=i)
        for i, (param, gradient, moment, master) in enumerate(mixes)
    ]
    for t in tensors:
        t.gradient[[3, 300]] = value
    for stochastic in (False, True):
        call = Step(
            algorithm, tensors, hyper({}), stochastic_params=stochastic,
            stochastic_moments=stochastic,
        )  # fmt: skip
        cpu, cuda = call.copy(), call.copy()
        on_cpu(cpu)
        on_cuda(cuda, counts)
        for one, two in zip(cpu.tensors, cuda.tensors, strict=True):
            for a, b in zip(values(one), values(two), strict=True):
                assert torch.equal(a.isnan(), b.isnan())
                assert torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def values(t) -> list[torch.Tensor]:
    """The operands as values: a NaN has many bit patterns, and its codes mean nothing."""
    moments = t.moments
    if t.scales:
        scales = [scale.repeat_interleave(cases.BLOCK) for scale in t.scales]
        moments = [
            torch.where(scale.isfinite(), moment.float(), NAN)
            for moment, scale in zip(t.moments, scales, strict=True)
        ]
    kept = [] if t.master is None or t.master.dtype is torch.int16 else [t.master]
    return [t.param, t.gradient, *moments, *t.scales, *kept]


# ---- contract ------------------------------------------------------------------------------------


@algorithms
@pytest.mark.parametrize(
    "given",
    [
        {"found_inf": 1.0},
        {"norm": INF, "max_norm": 1.0},
        {"norm": NAN},
        {"norm": 1e300, "grad_scale": 1e-30},
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [False, True])
def test_a_step_that_must_not_be_made_changes_nothing(counts, algorithm, given, zero):
    """Except gradients that are to be zeroed: else an infinity would block every later step."""
    tensors = make_mixes(MIXED_SIZES, MOMENTS[algorithm])[::5]
    call = Step(algorithm, tensors, hyper({}), zero_gradients=zero, **given)
    before = call.copy()
    if zero:
        for tensor in before.tensors:
            tensor.gradient.zero_()
    counted = on_cuda(call, counts)
    assert_equal(before.tensors, call.tensors)
    if counts is not None and not zero:
        assert counted["written"] == 0


def test_more_tensors_than_the_parameters_hold(emulator):
    """There is a launch for each table, and each counts the steps of its tensors."""
    count = 700
    tensors = [make(5 if i % 3 else 0, index=i, step=i) for i in range(count)]
    call = Step(ADAM, tensors, hyper({}), norm=5.0, max_norm=1.0)
    check(emulator, call)
    (counted,) = emulator.done
    assert counted["launches"] == 3
    call.tensors = tensors[:290]
    assert on_cuda(call, emulator)["launches"] == 1
    assert [t.step.item() for t in tensors[:290]] == [i + 1 for i in range(290)]


@pytest.mark.parametrize("build", ["plain", pytest.param("thread", marks=pytest.mark.slow)])
def test_many_pieces(emulator, build):
    """A block takes several in a row, across tensors; blocks do not end at tensors' ends."""
    sizes = (3, 2030 * PIECE - 100, 0, *[700] * 20, 2 * PIECE, 5)
    tensors = [make(size, BF16, moments=0, index=i, step=i) for i, size in enumerate(sizes)]
    settings = hyper({"momentum": 0.0, "decoupled": False})
    with emulator.sanitized(build, *KERNELS):
        check(emulator, Step(SGD, tensors, settings, stochastic_params=True))
    (counted,) = emulator.done
    assert counted["splits"] == 1 + 2030 + 20 + 2 + 1
    tickets = counted["written"] - 2 * sum(sizes) - COUNT * len(sizes)
    assert tickets == BLOCK_WRITTEN * math.ceil(counted["splits"] / 2)


def test_steps_are_counted_without_elements(counts):
    call = Step(ADAM, [make(0), make(0, BF16)], hyper({}))
    check(counts, call, steps=2)


@pytest.mark.parametrize("operands", [*OPERANDS, OPERANDS], ids=str)
def test_addresses_that_are_not_aligned(counts, operands):
    tensors = shift(make_mixes(MIXED_SIZES, 3), operands)
    settings = hyper({"amsgrad": True})
    call = Step(ADAM, tensors, settings, stochastic_params=True, stochastic_moments=True)
    check(counts, call)


# ---- traffic -------------------------------------------------------------------------------------

# AdamW, bytes per parameter: read, written; table 3c of the reference.
ONE_PASS = {
    "f32": (F32, F32, F32, None, 16, 12),
    "f32, bf16 state": (F32, F32, BF16, None, 12, 8),
    "bf16, f32 state": (BF16, BF16, F32, None, 12, 10),
    "bf16": (BF16, BF16, BF16, None, 8, 6),
    "bf16, f32 master": (BF16, BF16, F32, F32, 14, 14),
    "bf16, f32 gradient and master": (BF16, F32, F32, F32, 16, 14),
    "bf16, remainder, f32 state": (BF16, BF16, F32, torch.int16, 14, 12),
    "bf16, remainder": (BF16, BF16, BF16, torch.int16, 10, 8),
    "bf16, codes": (BF16, BF16, INT8, None, 6, 4),
}
BLOCK_READ, BLOCK_WRITTEN = 96 + 4 + 4, 4  # settings, step and ticket; ticket
COUNT = 4  # a tensor's step, read and written by the last block


def check_pass(emulator, call: Step, read: int, written: int, of_block: int = 0) -> int:
    """Bytes of an element, and what a block reads beside its settings. Returns the blocks."""
    elements = sum(t.param.numel() for t in call.tensors)
    scales = sum(scale.nbytes for t in call.tensors for scale in t.scales)
    counted, counts = on_cuda(call, emulator), COUNT * len(call.tensors)
    blocks = counted["splits"]
    assert counted["read"] == read * elements + scales + blocks * (BLOCK_READ + of_block) + counts
    assert counted["written"] == written * elements + scales + blocks * BLOCK_WRITTEN + counts
    return blocks


@pytest.mark.parametrize("average", [None, F32, BF16], ids=str)
@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass(emulator, name, average):
    """With averages 8 bytes more for each element, or 4."""
    *dtypes, read, written = ONE_PASS[name]
    average = F32 if average and dtypes[0] is F32 else average
    more = average.itemsize if average else 0
    tensors = [make(size, *dtypes, average=average) for size in (2 * PIECE, 256, PIECE + 512)]
    for noise in (False, True):
        call = Step(ADAM, tensors, hyper({}), stochastic_params=noise, stochastic_moments=noise)
        assert check_pass(emulator, call, read + more, written + more) == 5


@pytest.mark.parametrize(
    "algorithm, made, settings, read, written",
    [
        (ADAM, {"moments": 3}, {"amsgrad": True}, 20, 16),
        (SGD, {"moments": 0}, {"momentum": 0.0}, 8, 4),
        (SGD, {"moments": 0, "gradient": BF16}, {"momentum": 0.0}, 6, 4),  # of fused_accumulate
        (SGD, {"moments": 1}, {}, 12, 8),
        (SGD, {"moments": 1, "step": 0}, {}, 8, 8),  # a buffer that holds nothing yet
        (LION, {"moments": 1}, {}, 12, 8),
    ],
    ids=str,
)
def test_one_pass_of_the_other_algorithms(emulator, algorithm, made, settings, read, written):
    given = {"norm": 3.0, "grad_scale": 2.0, "found_inf": 0.0}
    tensors = [make(2 * PIECE, **made)]
    for zero in (0, tensors[0].gradient.itemsize):
        call = Step(algorithm, tensors, hyper(settings), zero_gradients=zero > 0, **given).copy()
        check_pass(emulator, call, read, written + zero, of_block=16)


def test_one_pass_of_single_elements(emulator):
    """For tails and unaligned tensors."""
    for numel, operands in ((1001, ()), (1024, ("gradient",))):
        tensors = shift([make(numel, BF16, BF16, F32)], operands)
        check_pass(emulator, Step(ADAM, tensors, hyper({})), 12, 10)


# ---- the norm of gradients, and their scaling ----------------------------------------------------

ORDERS = (1.0, 2.0, INF)


def drawn(*sizes, dtype=F32, scale=1.0) -> list[torch.Tensor]:
    return [(torch.randn(size) * scale).to(dtype) for size in sizes]


@pytest.mark.parametrize("order", ORDERS)
def test_norm_is_the_same_bits_in_any_order(emulator, order):
    """Also over several launches: more tensors than the parameters hold."""
    for sizes in ((5 * PIECE + 3, 300), (3, 0, 40) * 500):
        gradients = drawn(*sizes)
        norms = set()
        for seed in range(2):
            emulator.set(seed=seed)
            norms.add(norm_on_cuda(gradients, order, emulator).item())
        assert len(norms) == 1
        assert emulator.done[-1]["launches"] == (1 if len(sizes) < 5 else 2)
        ref = torch.linalg.vector_norm(torch.cat(gradients).double(), order).item()
        assert norms.pop() == pytest.approx(ref, rel=1e-6)


def test_norm_reads_once(emulator):
    for dtype in (F32, BF16):
        sizes = (3 * PIECE, 1000, 0, 17)
        norm_on_cuda(drawn(*sizes, dtype=dtype), 2.0, emulator)
        counted = emulator.done[-1]
        assert counted["splits"] == 5
        assert counted["read"] == sum(sizes) * dtype.itemsize + 5 * (8 + 4)  # partials, tickets
        assert counted["written"] == 5 * (8 + 4) + 8


def test_norm_of_many_pieces(emulator):
    """A block takes several in a row, across tensors; blocks do not end at tensors' ends."""
    gradients = [torch.randn(2500 * PIECE - 100).bfloat16(), *drawn(*[700] * 600)]
    norm = norm_on_cuda(gradients, 2.0, emulator).item()
    (counted,) = emulator.done
    assert counted["splits"] == (2500 + 600 + 2) // 3
    ref = torch.linalg.vector_norm(torch.cat([g.float() for g in gradients]).double()).item()
    assert norm == pytest.approx(ref, rel=1e-7)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_scaling_is_one_pass(emulator, dtype, is_aligned):
    """Its values: test_clipping.py."""
    for share in (0.37, 1.0, 2.0, NAN):
        gradients = drawn(*SIZES, dtype=dtype)
        if not is_aligned:
            gradients = [shifted(gradient) for gradient in gradients]
        norm = norm_on_cuda(gradients, 2.0, emulator).item()
        _, counted = clip_on_cuda(gradients, share * norm, emulator)
        assert share == share or all(gradient.isnan().all() for gradient in gradients)
        moved = 0 if share > 1.0 else sum(SIZES) * dtype.itemsize
        assert counted["written"] == moved
        warps = counted["splits"] * counted["launched"][0].threads // 32
        assert counted["read"] == moved + 8 * warps  # which read the norm


def test_scaling_more_tensors_than_the_parameters_hold(emulator):
    gradients = drawn(*[3] * 3000)
    before = torch.cat(gradients)
    _, counted = clip_on_cuda(gradients, 0.5 * before.norm().item(), emulator)
    assert counted["launches"] == 3
    torch.testing.assert_close(torch.cat(gradients), before / 2)


# ---- every instance, in every build --------------------------------------------------------------


def each_instance(emulator, steps: Emulated | None, build: str = "plain") -> None:
    """Calls that run each instance on all of its branches, steps on a device if `steps` is None;
    also see tests/device/test_smoke.py."""
    with emulator.sanitized(build, *KERNELS, seed=1):
        for algorithm in ALGORITHMS.values():
            # Races do not depend on the dtypes, and the thread sanitizer takes its time.
            mixes = make_mixes(MIXED_SIZES, MOMENTS[algorithm])[:: 4 if build == "thread" else 1]
            tensors = mixes + make_groups(algorithm, (0, 1, PIECE + 1))[0]
            settings = make_groups(algorithm, ())[1]
            for some in (tensors, shift(tensors[::4], ("param", "moments 0"))):
                every_branch(steps, algorithm, some, settings)
                plain = [t for t in some if t.average is None]
                every_branch(steps, algorithm, plain, settings)
        gradients = [g for d in (F32, BF16, F16, F64) for g in drawn(0, PIECE + 1, dtype=d)]
        every_branch_of_norms(emulator, gradients)
        every_branch_of_norms(emulator, [shifted(gradient) for gradient in gradients])


@pytest.mark.parametrize(
    "build", ["plain", "address", pytest.param("thread", marks=pytest.mark.slow)]
)
def test_each_instance(emulator, build):
    """Without races or bad accesses, on all of their branches; none is left out."""
    each_instance(emulator, emulator, build)
    kernels = ("optimizer_step_kernel", "gradient_norm_kernel", "scale_gradients_kernel")
    wanted = {name for name in all_instances() if any(kernel in name for kernel in kernels)}
    assert wanted and wanted == emulator.instances


def test_no_races(emulator):
    """On fewer tensors than test_each_instance, which takes the thread sanitizer minutes."""
    with emulator.sanitized("thread", *KERNELS, seed=1):
        tensors = make_mixes(MIXED_SIZES, MOMENTS[ADAM])[::20]
        tensors += make_groups(ADAM, (1, PIECE + 1))[0][:2]
        every_branch(emulator, ADAM, tensors, hyper({}))
        clip_on_cuda(drawn(0, PIECE + 1, 300), 1.0, emulator)


def every_branch(emulator, algorithm, tensors, settings) -> None:
    call = Step(
        algorithm, tensors, settings, stochastic_params=True, stochastic_moments=True,
        zero_gradients=True, norm=3.0, max_norm=1.0, grad_scale=2.0, found_inf=0.0,
    )  # fmt: skip
    check(emulator, call)


def every_branch_of_norms(emulator, gradients) -> None:
    overflowing = [drawn(300, scale=1e38)[0].clamp(-3e38, 3e38)]
    for order in ORDERS:
        clip_on_cuda([gradient.clone() for gradient in gradients], 1.0, emulator, order)
        norm_on_cuda(overflowing, order, emulator)
