"""Attention's CUDA kernels under the emulator: values, all six gradients, every instance, races."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.attention import cases as attention_cases
from tests.attention.cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    Case,
    Results,
    assert_same,
    backward,
    check,
    forward,
    ours,
    pairwise,
)
from tests.attention.cuda_cases import (
    AXES,
    BRANCHES,
    CAUSAL,
    INSTANCES,
    KERNELS,
    LONG_DIMS,
    SEQUENCES,
    TILED,
    TILED_DIMS,
    TILED_KERNELS,
    branches,
    combination,
    dtypes,
    every_third,
    half_and_float,
    judge_one_draw_first,
    kinds,
    of_kind,
)
from tests.emulator import emulated
from tests.emulator.executors import all_instances


@pytest.fixture(autouse=True)
def on_cuda(cuda, monkeypatch):
    judge_one_draw_first(monkeypatch)


# ---- values and gradients ------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("head_dim", TILED_DIMS + LONG_DIMS)
@pytest.mark.grid
def test_head_dims(head_dim, kind):
    case = Case(head_dim=head_dim, batch=1, heads=1, seq_q=66, seq_k=130, dlse=True, **CAUSAL)
    check(replace(case, **of_kind(kind)))


@half_and_float
@pytest.mark.parametrize("value_dim", [1, 24, 72, 200, 512])
@pytest.mark.grid
def test_value_dims(value_dim, dtype):
    for head_dim in (8, 64, 136):
        check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=40, seq_k=110))


# Of nothing but a row, of whole tiles, of one more and one less; several of both.
LENGTHS = [
    (1, 1), (1, 385), (385, 1), (128, 96), (127, 95), (129, 97), (127, 63), (129, 65), (64, 128),
    (150, 230),
]  # fmt: skip


@kinds
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.grid
def test_lengths(lengths, kind):
    seq_q, seq_k = lengths
    case = Case(batch=1, heads=1, seq_q=seq_q, seq_k=seq_k, **of_kind(kind))
    for window in ({}, dict(window_right=0), CAUSAL):
        # Of one key all gradients of scores are what cancels, see attention_cases.pool.
        if seq_k > 1 or (case.dtype is not F32 and not window):
            check(replace(case, **window))


# Of one key, beyond the keys, behind the diagonal, narrower and wider than a tile.
WINDOWS = [(0, 0), (5, 3), (0, -1), (-1, 5), (63, 0), (100, 30), (1000, 0)]


@half_and_float
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.grid
def test_windows(window, dtype):
    left, right = window
    for seq_q, seq_k in ((150, 230), (200, 90)):
        for bottom_right in (False, True):
            check(
                Case(dtype, 32, batch=1, heads=1, seq_q=seq_q, seq_k=seq_k, window_left=left,
                     window_right=right, bottom_right=bottom_right)
            )  # fmt: skip


@half_and_float
@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (6, 2), (5, 5)])
@pytest.mark.grid
def test_groups(heads, kv_heads, dtype):
    check(Case(dtype, 32, heads=heads, kv_heads=kv_heads, seq_q=40, seq_k=70, window_right=0))


@half_and_float
@pytest.mark.parametrize("pattern", ["", "b", "h", "q", "bh", "bq", "hq", "bhq"])
@pytest.mark.grid
def test_bias_and_mask_of_one_pattern(pattern, dtype):
    case = Case(dtype, 16, heads=2, seq_q=70, seq_k=200)
    check(replace(case, bias=pattern))
    check(replace(case, mask=pattern))
    check(replace(case, bias=pattern, mask=pattern, **CAUSAL))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("other", [F32, BF16, F16], ids=str)
@pytest.mark.grid(2)
def test_dtypes_of_bias_and_sinks(dtype, other):
    check(Case(dtype, 32, heads=1, seq_q=60, seq_k=90, bias="hq", bias_dtype=other))
    if other in (F32, dtype):
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=90, sinks=other, dlse=True))
        check(Case(dtype, 32, heads=3, seq_q=60, seq_k=40, sinks=other, alibi="b", **CAUSAL))


@pytest.mark.parametrize("dtype", TILED, ids=str)
@pytest.mark.parametrize("head_dim", [16, 72, 160])
@pytest.mark.grid
def test_rows_of_bias_and_mask_that_no_16_bytes_divide(head_dim, dtype):
    """Of a mask those that 16 bytes divide, 4, 2 or one; of a bias in pairs or one by one."""
    for seq_k in (144, 148, 146, 145):
        case = Case(dtype, head_dim, batch=1, heads=1, seq_q=70, seq_k=seq_k, bias="q", mask="q",
                    window_left=100, window_right=60)  # fmt: skip
        check(case)
        if seq_k == 148:
            check(replace(case, bias_dtype=F32, dropout_p=0.3, key_offset=3))
        if seq_k == 145:
            check(replace(case, bias="b", mask="b"))  # one row for all queries


@kinds
@pytest.mark.parametrize(
    "options",
    [dict(alibi=""), dict(alibi="b", **CAUSAL), dict(softcap=2.0), dict(softcap=20.0, factor=9.0),
     dict(dropout_p=0.3), dict(dropout_p=0.3, dlse=True, bias="q"), dict(factor=-0.7),
     dict(factor=0.0)],
    ids=str,
)  # fmt: skip
@pytest.mark.grid(2)
def test_options(options, kind):
    case = Case(heads=2, kv_heads=1, seq_q=70, seq_k=200, **of_kind(kind))
    check(replace(case, **options))


@half_and_float
@pytest.mark.parametrize("terms", [{}, dict(bias="hq"), dict(dropout_p=0.3)], ids=str)
@pytest.mark.grid
def test_positions_of_a_shard(terms, dtype):
    """Far beyond 32 bits, and beginning within the eight keys that share random numbers."""
    case = Case(dtype, 40, heads=1, seq_q=70, seq_k=130, window_left=60, window_right=20, **terms)
    for first, key in ((0, 0), (0, 3), (2**33, 50), (2**33, 117)):
        check(replace(case, query_offset=first + 40, key_offset=first + key))


@kinds
@pytest.mark.parametrize("storage", ["packed", "packed used", "used", "paged"])
@pytest.mark.grid
def test_sequences_of_their_own_lengths(storage, kind):
    case = Case(head_dim=40, value_dim=24, heads=2, kv_heads=1, storage=storage, lengths=SEQUENCES,
                **of_kind(kind))  # fmt: skip
    check(case)
    check(replace(case, **CAUSAL))
    check(replace(case, bias="bhq", mask="bq", alibi="b", sinks=F32, dropout_p=0.3, softcap=3.0,
                  window_left=40, bottom_right=True, bias_dtype=case.dtype, dlse=True))  # fmt: skip


@pytest.mark.parametrize("row", every_third(pairwise(AXES, 1)))
def test_pairs_of_options(row):
    check(combination(row))


@dtypes
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.grid
def test_page_sizes(page_size, dtype):
    sequences = ((1, 130), (9, 16), (4, 0), (0, 20), (64, 257))
    case = Case(dtype, 64, heads=2, kv_heads=1, storage="paged", lengths=sequences,
                page_size=page_size)  # fmt: skip
    check(case)
    check(replace(case, window_left=30, alibi="", sinks=dtype, **CAUSAL))


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
    check(Case(dtype, head_dim, value_dim, batch=1, heads=1, seq_q=5, seq_k=9))
    tiled = dtype in TILED and max(head_dim, value_dim) <= 256
    kernels = ("attention_forward", "attention_backward")
    expected = {f"{name}_kernel" if tiled else f"{name}_plain_kernel" for name in kernels}
    assert {call["kernel"] for call in cuda.done} == expected


@half_and_float
def test_gradients_of_the_lse_alone(dtype):
    case = Case(dtype, 32, seq_q=66, seq_k=80, window_right=0, bias="q", sinks=dtype, dlse=True)

    def compute(drawn: Case):
        t = {name: x for name, x in drawn.tensors().items() if name != "doutput"}
        found = ours(drawn, t)
        assert not found["dvalue"].any()
        return found, attention_cases.definition(drawn, t, F64), attention_cases.base(drawn, t)

    check(case, compute)


# ---- layouts -------------------------------------------------------------------------------------

LAID_OUT = Case(
    BF16, 64, heads=2, kv_heads=2, seq_q=33, seq_k=70, window_left=60, bias="hq", mask="bhq",
    **CAUSAL,
)  # fmt: skip


@half_and_float
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.grid
def test_each_tensor_in_each_layout(cuda, layout, dtype):
    """Bit for bit, whether rows are copied by 16 bytes, by 8, by 4 or by elements."""
    cuda.keywords["deterministic"] = True
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    expected = ours(case, t)
    names = ("query", "key", "value", "bias", "mask", "doutput")
    every = {name: attention_cases.strided(t[name], layout) for name in names}
    for changed in ({name: every[name]} for name in names):
        assert_same(ours(case, t | changed), expected, str(list(changed)))
    found = forward(case, t | every, out_bshd=True)
    saved = Results(found, found.lse_rest)
    saved["output"] = attention_cases.strided(found["output"], layout)
    assert_same(found | backward(case, t | every, saved, out_bshd=True), expected)


@half_and_float
def test_terms_of_a_shard_of_keys(dtype):
    """Tiles begin where calls of Philox do: here before the first row of bias and mask, by what
    both are read by."""
    check(Case(dtype, 40, batch=1, heads=1, seq_q=40, seq_k=64, key_offset=12, bias="hq", mask="hq",
               dropout_p=0.2))  # fmt: skip


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
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.grid
def test_expanded_tensors(cuda, dims, dtype):
    """Stride 0 is as good as copies, upstream too."""
    cuda.keywords["deterministic"] = True
    case = replace(LAID_OUT, dtype=dtype)
    t = case.tensors()
    t["mask"][:, :, 0, 0] = True
    expanded = {}
    for name in ("query", "key", "value", "bias", "mask", "doutput"):
        first = t[name]
        for dim in dims:
            first = first[(slice(None),) * dim + (slice(0, 1),)]
        expanded[name] = first.expand(t[name].shape)
    copied = {name: tensor.contiguous() for name, tensor in expanded.items()}
    assert_same(ours(case, t | expanded), ours(case, t | copied))


@half_and_float
@pytest.mark.parametrize("far", [1, 2, 3], ids=["sequences", "heads", "rows"])
@pytest.mark.grid
def test_offsets_beyond_32_bits(cuda, far, dtype):
    """The memory between what lies so far apart is never touched. A dbias is always dense."""
    attention_cases.reserved(2**31 + 2**20, dtype)
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


@pytest.mark.parametrize("build", emulated.SLOW_UNDER_SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    with cuda.sanitized(build, *KERNELS, seed=1, resident=2):
        for case in INSTANCES:
            check(case)
        cuda.set(shared=99 * 1024)
        for case in INSTANCES:
            if case.dtype in TILED and case.head_dim == 72 and case.bias is None:
                check(case)
    left_out = {name for name in all_instances() - cuda.instances if "::attention_" in name}
    assert not {name for name in left_out if "_decode" not in name}


def check_sanitized(cuda, case: Case, build: str, kernels: tuple[str, ...]) -> None:
    """With sums that are atomic, and in order in as little shared memory as any device has."""
    t = case.tensors()
    with cuda.sanitized(build, *kernels, seed=2, resident=3):
        ours(case, t)
        cuda.set(shared=99 * 1024)
        cuda.keywords["deterministic"] = True
        ours(case, t)


@pytest.mark.parametrize("build", ["address", "thread"])
def test_sanitizers_are_silent_on_tiles(cuda, build):
    case = Case(BF16, 40, batch=1, heads=1, seq_q=70, seq_k=110, bias="q", mask="q")
    check_sanitized(cuda, case, build, TILED_KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["address", "thread"])
@branches
def test_sanitizers_are_silent(cuda, name, kind, build):
    """On the branches within an instance that the tests above do not take."""
    case = Case(head_dim=40, heads=2, kv_heads=1, **of_kind(kind))
    check_sanitized(cuda, replace(case, **BRANCHES[name]), build, KERNELS)
