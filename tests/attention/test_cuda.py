"""Attention's CUDA kernels under the emulator: which kernel, addresses, every instance, races.

Values of each option alone are those of the family's other tests.
"""

from dataclasses import replace

import pytest

from tests.attention import test_values
from tests.attention.cases import (
    Case,
    assert_same,
    backward,
    check,
    combination,
    forward,
    ours,
    reserved,
)
from tests.attention.cuda_cases import (
    BRANCHES,
    CAUSAL,
    INSTANCES,
    KERNELS,
    KINDS,
    SEQUENCES,
    TILED,
    TILED_KERNELS,
    branches,
    dtypes,
    half_and_float,
    kinds,
    of_kind,
)
from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.pairs import drawn, every_third, pairwise

pytestmark = pytest.mark.usefixtures("one_draw_first")


# ---- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [16, 72, 160])
@pytest.mark.grid
def test_rows_of_bias_and_mask_that_no_16_bytes_divide(head_dim, dtype):
    """Rows of a mask aligned to 16, 4, 2 or 1 bytes; of a bias, read in pairs or one by one."""
    for seq_k in (144, 148, 146, 145):
        case = Case(dtype, head_dim, batch=1, heads=1, seq_q=70, seq_k=seq_k, bias="q", mask="q",
                    window_left=100, window_right=60)  # fmt: skip
        check(case)
        if seq_k == 148:
            check(replace(case, bias_dtype=F32, dropout_p=0.3, key_offset=3))
        if seq_k == 145:
            check(replace(case, bias="b", mask="b"))  # one row for all queries


@kinds
@pytest.mark.parametrize("storage", ["packed", "packed used", "used", "paged"])
@pytest.mark.grid
def test_sequences_of_their_own_lengths(storage, kind):
    case = Case(head_dim=40, value_dim=24, heads=2, kv_heads=1, storage=storage, lengths=SEQUENCES,
                **of_kind(kind))  # fmt: skip
    check(case)
    check(replace(case, bias="bhq", mask="bq", alibi="b", sinks=F32, dropout_p=0.3, softcap=3.0,
                  window_left=40, bottom_right=True, bias_dtype=case.dtype, dlse=True))  # fmt: skip


AXES = {"kind" if name == "dtype" else name: of for name, of in test_values.AXES.items()} | dict(
    kind=KINDS,
    head_dim=(8, 64, 72, 128, 160, 264),
    length=[(150, 230), (1, 200), (130, 3), (33, 97), (96, 64)],
    bias=[None, "", "b", "h", "q", "bhq"],
    mask=[None, "", "h", "bq", "bhq"],
    window=[(-1, -1, False), (-1, 0, False), (-1, 0, True), (60, 0, True), (33, 17, False),
            (0, 0, False)],
    value_dim=[0, 24, 72],
)  # fmt: skip


@pytest.mark.parametrize("row", every_third(pairwise(AXES, 1) + drawn(AXES, 6)))
def test_pairs_of_options(cuda, row):
    cuda.keywords["deterministic"] = row["dlse"]
    kind = of_kind(row["kind"])
    check(combination({name: value for name, value in row.items() if name != "kind"} | kind))


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.grid
def test_plain_kernels_take_what_tiles_do(cuda, head_dim, dtype):
    cuda.set(plain=1)
    check(Case(dtype, head_dim, heads=2, kv_heads=1, seq_q=70, seq_k=130, **CAUSAL))
    check(Case(dtype, head_dim, heads=1, seq_q=33, seq_k=70, bias="bhq", dropout_p=0.3, dlse=True))
    plain = {f"attention_{direction}_plain_kernel" for direction in ("forward", "backward")}
    assert {call["kernel"] for call in cuda.done} == plain


@dtypes
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (256, 1), (257, 8), (8, 264)])
def test_which_kernel(cuda, head_dim, value_dim, dtype):
    check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=40, seq_k=9))
    tiled = dtype in TILED and max(head_dim, value_dim) <= 256
    kernels = ("attention_forward", "attention_backward")
    expected = {f"{name}_kernel" if tiled else f"{name}_plain_kernel" for name in kernels}
    assert {call["kernel"] for call in cuda.done} == expected


# ---- layouts -------------------------------------------------------------------------------------

LAID_OUT = Case(
    BF16, 64, heads=2, kv_heads=2, seq_q=33, seq_k=70, window_left=60, bias="hq", mask="bhq",
    **CAUSAL,
)  # fmt: skip


NOT_ALIGNED = [(BF16, 2), (BF16, 8), (F32, 4)]
SLOWLY = [(BF16, 4), (F16, 2), (F16, 4), (F16, 8), (F32, 8), (F64, 8)]


@pytest.mark.parametrize(
    "dtype, shift",
    NOT_ALIGNED + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY],
    ids=str,
)
def test_one_tensor_that_is_not_aligned(cuda, dtype, shift):
    """Any of those that an argument struct points to."""
    cuda.keywords["deterministic"] = True
    case = replace(LAID_OUT, dtype=dtype, head_dim=40, batch=1, heads=1, kv_heads=1, dlse=True)
    t = case.tensors()
    outputs = forward(case, t)
    gradients = backward(case, t, outputs)
    of_forward, of_backward = (call["tensors"] for call in cuda.done)
    for tensor in range(of_forward):
        cuda.set(shift=shift, misaligned=tensor)
        assert_same(forward(case, t), outputs, f"{tensor} of {of_forward}")
    for tensor in range(of_backward):
        cuda.set(shift=shift, misaligned=tensor)
        assert_same(backward(case, t, outputs), gradients, f"{tensor} of {of_backward}")


@kinds
@pytest.mark.parametrize("head_dim", [1, 3, 40, 97, 200])
@pytest.mark.grid
def test_no_tensor_is_aligned(cuda, head_dim, kind):
    case = Case(head_dim=head_dim, heads=1, seq_q=70, seq_k=130, dlse=True, **CAUSAL,
                **of_kind(kind))  # fmt: skip
    cuda.set(shift=case.dtype.itemsize)
    check(replace(case, sinks=case.dtype))


@half_and_float
@pytest.mark.parametrize("far", [1, 2, 3], ids=["sequences", "heads", "rows"])
@pytest.mark.grid
def test_offsets_beyond_32_bits(cuda, far, dtype):
    """The memory between such elements is never touched. A dbias is always dense."""
    reserved(2**31 + 2**20, dtype)
    cuda.keywords["deterministic"] = True
    case = Case(dtype, 64, heads=2, seq_q=20, seq_k=70, bias="bhq", mask="bhq", **CAUSAL)
    t = case.tensors()
    outputs = forward(case, t)
    wanted = ("query", "key", "value")
    gradients = backward(case, t, outputs)
    cuda.set(far=far)
    assert_same(backward(case, t, outputs), gradients)
    cuda.set(far_new=far)
    assert_same(forward(case, t), outputs)
    expected = {f"d{name}": gradients[f"d{name}"] for name in wanted}
    assert_same(backward(case, t, outputs, wanted), expected)


# ---- every instance, in every build --------------------------------------------------------------


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, *KERNELS, seed=1, resident=2):
        for case in INSTANCES:
            check(case)
        cuda.set(shared=99 * 1024, capability=86)
        for case in INSTANCES:
            if case.dtype in TILED and case.head_dim in (72, 128, 160) and case.bias is None:
                check(case)


@pytest.mark.parametrize("build", emulated.SLOW_UNDER_SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    attention = {name for name in all_instances() if "::attention_" in name}
    assert len(attention) < 75  # compilation takes minutes as it is
    left_out = attention - cuda.instances
    assert not {name for name in left_out if "_decode" not in name}


def check_sanitized(cuda, case: Case, build: str, kernels: tuple[str, ...]) -> None:
    """With sums that are atomic, and in order on a device of little shared memory and reductions of
    one number."""
    t = case.tensors()
    with cuda.sanitized(build, *kernels, seed=2, resident=3):
        ours(case, t)
        cuda.set(shared=99 * 1024, capability=86)
        cuda.keywords["deterministic"] = True
        ours(case, t)


@pytest.mark.parametrize("build", ["address", "thread"])
@pytest.mark.parametrize("head_dim, terms", [(40, dict(bias="q", mask="q")), (128, {})], ids=str)
def test_sanitizers_are_silent_on_tiles(cuda, build, head_dim, terms):
    """At 128 columns without terms the backward has a layout for each kind of device."""
    case = Case(BF16, head_dim, batch=1, heads=1, seq_q=70, seq_k=110, **terms)
    check_sanitized(cuda, case, build, TILED_KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["address", "thread"])
@branches
def test_sanitizers_are_silent(cuda, name, kind, build):
    """On the branches within an instance that the tests above do not take."""
    case = Case(head_dim=40, heads=2, kv_heads=1, **of_kind(kind))
    check_sanitized(cuda, replace(case, **BRANCHES[name]), build, KERNELS)
