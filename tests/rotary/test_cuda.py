"""Rotary embedding's CUDA kernels under the emulator: traffic, addresses, races.

Their values are those of test_values.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from onepass import functional
from tests.emulator import emulated
from tests.emulator.executors import all_instances
from tests.rotary.cases import (
    BOTH,
    DTYPES,
    LEAVES,
    Case,
    check,
    check_tensors,
    outputs_and_gradients,
)
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.pairs import pairwise
from tests.support.results import assert_equal

ALIGNED = Case(head_dim=48, rotary_dim=32)


def goes_by_packs(cuda, call: int = -1, name: str = "rotary_forward") -> bool:
    """Whether the instance with packs ran: the last argument of the template."""
    launch = cuda.of(name)[call]["launched"][0]
    return "true>" in launch.kernel


MIXES = [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16), (F64, F64)]
AXES = {"mix": MIXES, "rotary_dim": [32, 30], "interleaved": [False, True]}
ALONE = {"half_width": [False, True], "backward": [False, True]}


@pytest.mark.parametrize("row", pairwise(AXES | ALONE), ids=str)
def test_one_pass(cuda, row):
    """To the byte: query and key read and written once; cos, sin and positions by each group of
    heads, positions by every thread that rotates."""
    row = dict(row)
    (dtype, table_dtype), backward = row.pop("mix"), row.pop("backward")
    case = replace(
        ALIGNED, dtype=dtype, table_dtype=table_dtype, positions="tokens", heads=6, key_heads=3,
        tokens=70, **row,
    )  # fmt: skip
    tensors = case.tensors()
    query = tensors["query"].requires_grad_(backward)
    key = tensors["key"].requires_grad_(backward)
    outputs = functional.rotary_embedding(**tensors, **case.options)
    if backward:
        torch.autograd.grad(outputs, (query, key), [torch.ones_like(x) for x in outputs])
    call = cuda.of("rotary_forward")[-1]
    rows = (query.numel() + key.numel()) * dtype.itemsize
    rotary_dim = case.rotary_dim
    width = rotary_dim // 2 if case.half_width else rotary_dim
    tokens = case.batch * case.tokens * call["splits"]
    aligned = rotary_dim % 16 == 0 and width % 8 == 0
    threads = rotary_dim // 2 // (8 if aligned else 1)  # of a token
    assert call["written"] == rows
    assert call["read"] == rows + tokens * (2 * width * table_dtype.itemsize + 8 * threads)


NORMED = {"mix": MIXES, "dims": [(32, 48), (30, 52)], "interleaved": [False, True]}


@pytest.mark.parametrize("row", pairwise(NORMED), ids=str)
def test_one_pass_of_norms(cuda, row):
    """To the byte: the forward as without norms, plus the weights once for each block; the backward
    reads gradients and rows once, plus the partial sums of its parts."""
    (dtype, weight_dtype), (rotary_dim, head_dim) = row["mix"], row["dims"]
    case = Case(
        dtype, weight_dtype=weight_dtype, rotary_dim=rotary_dim, head_dim=head_dim, norms=BOTH,
        positions="tokens", interleaved=row["interleaved"], heads=6, key_heads=3, tokens=70,
    )  # fmt: skip
    tensors = case.tensors()
    leaves = [tensors[name].requires_grad_() for name in LEAVES]
    outputs = functional.rotary_embedding(**tensors, **case.options)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    (forward,), (backward,) = cuda.of("rotary_forward"), cuda.of("rotary_backward")
    rows = sum(x.nbytes for x in outputs)
    each = forward["rows_per_tile"]
    groups = sum(-(-heads // each) for heads in (case.heads, case.key_heads))
    # Of a token in each group of heads: a lane that rotates asks for the position.
    lanes = rotary_dim // 2 // (8 if rotary_dim == 32 else 1)
    tables = case.batch * case.tokens * groups * (2 * rotary_dim * dtype.itemsize + 8 * lanes)
    weight = head_dim * weight_dtype.itemsize
    (launch,) = forward["launched"]
    assert forward["splits"] == groups and launch.blocks % groups == 0
    assert forward["written"] == rows
    assert forward["read"] == rows + tables + launch.blocks * weight
    parts = backward["splits"]
    sums = parts * head_dim * max(dtype.itemsize, 4)
    assert backward["launched"][0].blocks == parts <= launch.blocks
    assert backward["read"] == 2 * rows + tables + parts * weight + sums
    assert backward["written"] == rows + sums + 2 * weight


@pytest.mark.parametrize("rotary_dim", [32, 30])
@pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])
def test_one_pass_in_place(cuda, norms, rotary_dim):
    """To the byte: columns that are neither rotated nor normalised are not touched."""
    case = Case(BF16, head_dim=48, rotary_dim=rotary_dim, heads=6, key_heads=3, norms=norms)
    tensors = case.tensors()
    functional.rotary_embedding(**tensors, **case.options, inplace=True)
    (call,) = cuda.of("rotary_forward_inplace")
    rows = sum(tensors[name][..., : 48 if norms else rotary_dim].numel() for name in BOTH) * 2
    tables = case.batch * case.tokens * call["splits"] * 2 * rotary_dim * 2
    weights = sum(launch.blocks for launch in call["launched"]) * 48 * 2 if norms else 0
    assert call["written"] == rows
    assert call["read"] == rows + tables + weights


@pytest.mark.parametrize("wanted", LEAVES)
def test_what_nobody_asks_for_is_not_computed(cuda, wanted):
    """A tensor without a wanted gradient is not read, and only gradients are written."""
    case = replace(ALIGNED, norms=BOTH)
    tensors = case.tensors()
    tensors[wanted].requires_grad_()
    outputs = functional.rotary_embedding(**tensors, **case.options)
    outputs = [x for x in outputs if x.requires_grad]
    torch.autograd.grad(outputs, tensors[wanted], [torch.ones_like(x) for x in outputs])
    (call,) = cuda.of("rotary_backward")
    rows = tensors[wanted.removesuffix("_weight")].nbytes
    sums = 0 if wanted in BOTH else call["splits"] * case.head_dim * 4
    written = rows if wanted in BOTH else sums + tensors[wanted].nbytes
    assert call["written"] == written
    heads = tensors[wanted.removesuffix("_weight")].shape[1]
    groups = case.batch * case.tokens * -(-heads // call["rows_per_tile"])
    tables, weights = groups * 2 * 32 * 4, call["splits"] * case.head_dim * 4
    assert call["read"] == 2 * rows + sums + tables + weights


@pytest.mark.parametrize("heads, tokens, parts", [(1, 1, 2), (9, 40, 10), (40, 1000, 528)], ids=str)
def test_parts_follow_from_the_shape(cuda, heads, tokens, parts):
    """Parts have several steps each where there would be too many parts."""
    check(Case(F32, batch=1, heads=heads, key_heads=1, tokens=tokens, head_dim=64, norms=BOTH))
    assert {call["splits"] for call in cuda.of("rotary_backward")} == {parts}


@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_blocks_shows(cuda, seed):
    case = Case(heads=9, tokens=40, norms=BOTH)
    expected = outputs_and_gradients(functional.rotary_embedding, case, case.tensors())
    cuda.set(seed=seed, multiprocessors=3)
    found = outputs_and_gradients(functional.rotary_embedding, case, case.tensors())
    assert_equal(found, expected)


def test_wider_rows_with_norms_are_refused(cuda):
    tensors = Case(head_dim=520, norms=BOTH).tensors()
    message = "query must have a head_dim of at most 512 with a weight on CUDA, got 520"
    with pytest.raises(RuntimeError, match=message):
        functional.rotary_embedding(**tensors)


@pytest.mark.parametrize(
    "head_dim, tokens, each", [(32, 8, 1), (16, 20_000, 2), (2, 65_536, 8)], ids=str
)
def test_heads_share_what_a_thread_has_read(cuda, head_dim, tokens, each):
    """If there are enough threads; a group has heads of query and of key, and the last group is
    incomplete."""
    check(Case(F32, batch=1, heads=11, key_heads=4, tokens=tokens, head_dim=head_dim))
    assert {call["rows_per_tile"] for call in cuda.of("rotary_forward")} == {each}


def test_addresses(cuda):
    """Packs if everything is aligned, single elements if a tensor or a stride is not."""
    case = replace(ALIGNED, tokens=3)
    packs = []
    for changes in (dict(), dict(head_dim=44), dict(rotary_dim=24), dict(rotary_dim=8)):
        check(replace(case, **changes))
        packs.append(goes_by_packs(cuda))
    assert packs == [True, False, False, False]
    for name in ("query", "key", "cos", "sin"):
        tensors = case.tensors()
        tensors[name] = F.pad(tensors[name], (0, 1))[..., :-1]
        check_tensors(case, tensors)
        assert goes_by_packs(cuda, -2) is False  # the forward
    for tensor in range(7):  # of those that the struct points to, the last being positions
        cuda.set(shift=4, misaligned=tensor)
        for changes in (dict(), dict(interleaved=True, dtype=BF16)):
            check(replace(case, positions="batch", **changes))
            assert goes_by_packs(cuda) == (tensor == 6)


def test_addresses_with_norms(cuda):
    case = replace(ALIGNED, tokens=3, norms=BOTH)
    check(case)
    assert goes_by_packs(cuda) and goes_by_packs(cuda, name="rotary_backward")
    cuda.set(shift=4, misaligned=-1)
    check(case)
    assert not goes_by_packs(cuda) and not goes_by_packs(cuda, name="rotary_backward")
    # query, its result, its weight; key and its two; cos, sin; the rest does not matter here.
    for tensor in range(8):
        cuda.set(shift=4, misaligned=tensor)
        check(case)
        assert not goes_by_packs(cuda)


def test_strides_of_single_elements_mean_nothing(cuda):
    case = replace(ALIGNED, batch=1, heads=1, key_heads=1, tokens=1, table_batch=1)
    for name, tensor in case.tensors().items():
        odd = tensor.as_strided(tensor.shape, (999, 777, 555, 1)[-tensor.dim() :])
        check_tensors(case, case.tensors() | {name: odd})
        assert goes_by_packs(cuda, -2) and goes_by_packs(cuda)


@pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])
@pytest.mark.parametrize("far", [1, 2, 3])
def test_dimensions_beyond_32_bits(cuda, far, norms):
    cuda.set(far=far, far_new=far)
    check(Case(batch=3, tokens_first=far == 3, norms=norms))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 30])
def test_a_position_without_a_row_reads_nothing(cuda, rotary_dim, interleaved):
    """Its token becomes NaN, except columns that are not rotated."""
    case = replace(ALIGNED, rotary_dim=rotary_dim, positions="batch", interleaved=interleaved)
    tensors = case.tensors()
    right = functional.rotary_embedding(**tensors, **case.options)
    wrong = ((0, 1, -1), (1, 3, case.rows), (1, 0, 2**40))
    for batch, token, position in wrong:
        tensors["positions"][batch, token] = position
    found = functional.rotary_embedding(**tensors, **case.options)
    for ours, expected in zip(found, right, strict=True):
        for batch, token, _ in wrong:
            expected[batch, :, token, :rotary_dim] = float("nan")
        assert torch.equal(ours.nan_to_num(7.5), expected.nan_to_num(7.5))


def each_instance(cuda, build: str = "plain") -> None:
    """Calls that run each instance; also on a device, see tests/device/test_smoke.py."""
    with cuda.sanitized(build, "rotary/forward.cu", "rotary/backward.cu"):
        # Races do not depend on the dtypes, and the thread sanitizer takes its time.
        for dtype in DTYPES[:: 4 if build == "thread" else 1]:
            for interleaved in (False, True):
                for changes in (
                    dict(positions="batch"),
                    dict(rotary_dim=30, half_width=True),
                    dict(half_width=True, tokens_first=True),
                    dict(rotary_dim=48, key_heads=0, heads=9),
                    dict(norms=BOTH, positions="batch"),
                    dict(norms=BOTH, rotary_dim=30, half_width=True, tokens_first=True),
                    dict(norms=("key",), rotary_dim=48),
                ):
                    case = replace(ALIGNED, dtype=dtype, interleaved=interleaved, **changes)
                    check(case)
                    if dtype is F32:
                        given = {"key": None, **case.tensors()}
                        functional.rotary_embedding(**given, **case.options, inplace=True)


@pytest.mark.parametrize("build", emulated.SANITIZERS)
def test_each_instance(cuda, build):
    """Without races or bad accesses; none is left out."""
    each_instance(cuda, build)
    rotaries = {name for name in all_instances() if "rotary_" in name}
    assert rotaries == cuda.instances or build == "thread"
