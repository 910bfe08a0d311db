"""Attention on a CUDA device: values and gradients of every variant, layouts, contracts, extremes.

Cases and checks are the CPU's own (attention/cases.py): the definition in float64, and torch's
function, by which its error is measured, run on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from onepass import functional, numerics
from tests.attention import cases as attention_cases
from tests.attention.cases import (
    DTYPES,
    GRADIENTS,
    LAYOUTS,
    NAN,
    Case,
    assert_same,
    backward,
    forward,
    ours,
    strided,
)
from tests.device.common import BF16, DEVICE, F16, F32, F64, ON_CUDA, needs_device, to_device

pytestmark = needs_device
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
halves = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
INF = math.inf


def check(case: Case, change=lambda t: {}) -> None:
    """Every result by the numerics rule; of tensors that `change` has changed."""

    def compute(drawn: Case):
        t = drawn.tensors()
        t |= change(t)
        on_device = to_device(t)
        found = ours(drawn, on_device)
        for name, tensor in on_device.items():
            assert attention_cases.equal(tensor.cpu(), t[name]), f"{name} was written"
        for name, dtype in attention_cases.expected_dtypes(drawn, t).items():
            assert name not in found or found[name].dtype == dtype, f"{case}: {name}"
        ref = attention_cases.definition(drawn, t, F64)
        assert found.keys() == ref.keys()
        return found, ref, ref if drawn.dtype is F64 else attention_cases.base(drawn, t)

    attention_cases.check(case, compute)


def repeatable(case: Case, t: dict[str, torch.Tensor], **changes) -> dict[str, torch.Tensor]:
    """Outputs and gradients of tensors on the device, the same bits each time."""
    found = forward(case, t, **changes)
    return found | backward(case, t, found, deterministic=True, **changes)


# ---- values and gradients ------------------------------------------------------------------------

VARIANTS = {
    "full": {},
    "causal": dict(window_right=0),
    "bottom right": dict(window_right=0, bottom_right=True, seq_q=90, seq_k=210),
    "top left": dict(window_right=0, seq_q=210, seq_k=90),
    "window": dict(window_left=70, window_right=20, seq_q=300, seq_k=300),
    "grouped": dict(heads=8, kv_heads=2, window_right=0),
    "one kv head": dict(heads=6, kv_heads=1, seq_q=70),
    "narrow value": dict(value_dim=40),
    "wide value": dict(value_dim=128, window_right=0),
    "bias": dict(bias="hq"),
    "bias of everything": dict(bias="bhq", window_right=0),
    "bias of a row": dict(bias=""),
    "mask": dict(mask="bq", seq_k=300),
    "bias and mask": dict(bias="h", mask="b", seq_k=300),
    "ALiBi": dict(alibi="", window_right=0),
    "ALiBi of a batch": dict(alibi="b"),
    "sinks": dict(sinks=F32, window_right=0),
    "softcap": dict(softcap=2.0),
    "dropout": dict(dropout_p=0.25),
    "causal dropout": dict(dropout_p=0.1, window_right=0, heads=4, kv_heads=2),
    "LSE": dict(dlse=True, window_right=0),
    "sharded": dict(
        query_offset=100, key_offset=60, window_left=90, window_right=0, dropout_p=0.2, alibi="",
    ),
    "everything": dict(
        head_dim=72, value_dim=40, heads=4, kv_heads=2, seq_q=130, seq_k=260, window_left=200,
        window_right=0, bottom_right=True, bias="hq", mask="b", alibi="b", sinks=F32, softcap=3.0,
        dropout_p=0.25, dlse=True,
    ),
    "used": dict(storage="used", window_right=0, bottom_right=True),
    "packed": dict(storage="packed", window_right=0, bottom_right=True),
    "packed used": dict(storage="packed used", bias="h", heads=4, kv_heads=2),
    "packed dropout": dict(storage="packed", dropout_p=0.25, alibi="b", sinks=F32),
    "paged": dict(storage="paged", window_right=0, bottom_right=True, heads=4, kv_heads=2),
    "odd pages": dict(storage="paged", page_size=7, mask="b"),
}  # fmt: skip


def variant(name: str, dtype: torch.dtype) -> Case:
    options = dict(VARIANTS[name])
    if dtype is F64 and "sinks" in options:
        options["sinks"] = F64
    return Case(dtype, **options)


@dtypes
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, dtype):
    check(variant(name, dtype))


# Around tiles of 16, 32, 64 and 128 rows, and what no tile divides.
@halves
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 7, 31, 33, 63, 64, 65, 127, 128, 129, 203, 385])
def test_lengths(length, causal, dtype):
    check(Case(dtype, seq_q=length, seq_k=length, window_right=0 if causal else -1))


# The dimensions that tiles are made for; between them; rows that are not of 16 bytes; the longest.
@dtypes
@pytest.mark.parametrize("head_dim", [1, 8, 40, 59, 72, 96, 111, 128, 160, 192, 250, 256, 300, 512])
def test_head_dims(head_dim, dtype):
    check(Case(dtype, head_dim, batch=1, seq_q=66, seq_k=130, window_right=0, bottom_right=True))


@halves
@pytest.mark.parametrize("seq_q, seq_k", [(1, 385), (385, 5), (385, 1), (7, 300), (300, 7)])
def test_queries_and_keys_of_different_lengths(seq_q, seq_k, dtype):
    for bottom_right in (False, True):
        for left, right in ((-1, -1), (-1, 0), (40, 0)):
            options = dict(window_left=left, window_right=right, bottom_right=bottom_right)
            check(Case(dtype, 32, seq_q=seq_q, seq_k=seq_k, batch=1, **options))


# As models have them: many blocks, many tiles in each.
REALISTIC = {
    "GPT": Case(BF16, 64, heads=12, seq_q=512, seq_k=512, window_right=0),
    "grouped": Case(BF16, 128, batch=1, heads=16, kv_heads=4, seq_q=768, seq_k=768, window_right=0),
    "cross": Case(F16, 128, batch=1, heads=4, seq_q=1023, seq_k=1025),
    "wide": Case(BF16, 256, batch=1, heads=4, kv_heads=1, seq_q=640, seq_k=640, window_right=0),
    "biased": Case(F16, 80, heads=4, seq_q=577, seq_k=577, bias="h", dropout_p=0.1),
    "float32": Case(F32, 64, batch=1, heads=4, seq_q=512, seq_k=512, window_right=0),
}


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_sizes(name):
    check(REALISTIC[name])


@halves
@pytest.mark.parametrize("bias_dtype", [F32, BF16, F16], ids=str)
def test_dtypes_of_bias_and_sinks(dtype, bias_dtype):
    check(Case(dtype, 64, seq_q=60, seq_k=90, bias="hq", bias_dtype=bias_dtype))
    check(Case(dtype, 64, seq_q=60, seq_k=90, sinks=dtype, dlse=True))


# By the error of the formula whose products are of TF32; on the CPU there is none.
TF32 = {
    "causal": Case(F32, 64, heads=4, kv_heads=2, seq_q=200, seq_k=300, window_right=0, tf32=True),
    "bias": Case(F32, 40, seq_q=130, seq_k=200, bias="hq", tf32=True),
    "everything": replace(variant("everything", F32), tf32=True),
    "long dim": Case(F32, 264, heads=2, seq_q=70, seq_k=130, tf32=True),
    "packed": Case(F32, 64, heads=4, storage="packed", seq_q=130, seq_k=200, tf32=True),
}


@pytest.mark.parametrize("name", TF32)
def test_tf32(name):
    check(TF32[name])


@halves
def test_16_bit_gradients_are_accumulated_in_float32(dtype):
    """torch's unfused function does; its fused one, elsewhere the measure, does not."""
    case = Case(dtype, 64, batch=1, heads=4, seq_q=512, seq_k=512, window_right=0)
    t = case.tensors()
    found, ref = ours(case, to_device(t)), attention_cases.definition(case, t, F64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        unfused = attention_cases.stock(case, t)
    for name, result in unfused.items():
        numerics.assert_close(found[name], ref[name], result, name)


EVERYTHING = replace(variant("everything", BF16), head_dim=64)


def test_each_gradient_alone():
    t = to_device(EVERYTHING.tensors())
    outputs = forward(EVERYTHING, t)
    every = backward(EVERYTHING, t, outputs, deterministic=True)
    for name in GRADIENTS:
        alone = backward(EVERYTHING, t, outputs, wanted=[name], deterministic=True)
        assert_same(alone, {f"d{name}": every[f"d{name}"]}, name)
    assert backward(EVERYTHING, t, outputs, wanted=[]) == {}


# ---- dropout -------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("options", [{}, dict(window_right=0), dict(storage="packed")], ids=str)
def test_the_dropped_scores_are_the_cpus(options, dtype):
    """With the identity as value, what comes out is P with its dropped elements."""
    case = Case(dtype, 32, heads=3, seq_q=130, seq_k=128, dropout_p=0.4, **options)
    t = case.tensors()
    if case.packed:
        for b in range(len(case.sequences)):
            rows = attention_cases.sequence_rows(t | dict(value=t["value"]), "value", b)
            rows.zero_()
        t["value"] = torch.zeros(*t["value"].shape[:2], 128, dtype=dtype)
        for b, (_, keys) in enumerate(case.sequences):
            rows = attention_cases.sequence_rows(t, "value", b)
            rows.copy_(torch.eye(keys, 128, dtype=dtype)[:, None].expand_as(rows))
    else:
        t["value"] = torch.eye(128, dtype=dtype).expand(2, 3, 128, 128).contiguous()
    expected, found = (forward(case, of)["output"] for of in (t, to_device(t)))
    assert torch.equal(found.cpu() == 0, expected == 0)
    assert 0.3 < float((expected == 0).float().mean())


def test_manual_seed_says_what_is_dropped():
    x = torch.randn(2, 2, 70, 32, device=DEVICE)

    def draw(seed):
        torch.manual_seed(seed)
        attend = functional.scaled_dot_product_attention
        return [attend(x, x, x, dropout_p=0.5) for _ in range(2)]

    (first, second), again = draw(1), draw(1)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, second)


# ---- layouts -------------------------------------------------------------------------------------

LAID = Case(
    F16, 40, 24, heads=4, kv_heads=2, seq_q=70, seq_k=150, window_left=90, window_right=0,
    bottom_right=True, bias="hq", mask="bq", dropout_p=0.2, dlse=True, alibi="b", sinks=F32,
)  # fmt: skip
LAYOUT_CASES = [LAID, replace(LAID, dtype=BF16, head_dim=128, value_dim=128)]
LAYOUT_CASES += [replace(LAID, dtype=F32)]
of_dtypes = pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: str(case.dtype))
LAID_NAMES = ("query", "key", "value", "bias", "mask", "doutput")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, in a buffer that is the same everywhere else."""
    whole = tensor.new_empty(0).set_(tensor.untyped_storage()).to(DEVICE)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@of_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case, layout):
    t = case.tensors()
    expected = repeatable(case, to_device(t))
    laid = {name: on_device(strided(t[name], layout)) for name in LAID_NAMES}
    assert_same(repeatable(case, to_device(t) | laid), expected)


@of_dtypes
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (2, 3), (0, 1, 2, 3)], ids=str)
def test_expanded_inputs_and_gradients(case, dims):
    t = to_device(case.tensors())
    for name in LAID_NAMES:
        first = t[name]
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        expanded = first.expand(t[name].shape)
        found = repeatable(case, t | {name: expanded})
        assert_same(found, repeatable(case, t | {name: expanded.contiguous()}), name)


@of_dtypes
@pytest.mark.parametrize("out_bshd", [False, True])
def test_results_are_contiguous_in_the_asked_order(case, out_bshd):
    t = to_device(case.tensors())
    results = repeatable(case, t, out_bshd=out_bshd)
    assert_same(results, repeatable(case, t))
    for name in ("output", "dquery", "dkey", "dvalue"):
        result = results[name].transpose(1, 2) if out_bshd else results[name]
        assert result.is_contiguous(), name


@of_dtypes
def test_packed_rows_beside_others(case):
    case = replace(case, storage="packed", bias="bhq", mask="q")
    t = case.tensors()
    expected = repeatable(case, to_device(t))

    def beside(tensor):
        total, heads, dim = tensor.shape
        buffer = torch.full((total, 3, heads, dim + 3), NAN).to(tensor.dtype)
        buffer[:, 1, :, 1 : 1 + dim] = tensor
        return on_device(buffer[:, 1, :, 1 : 1 + dim])

    other = {name: beside(t[name]) for name in ("query", "key", "value", "doutput")}
    assert_same(repeatable(case, to_device(t) | other), expected)


# ---- contracts -----------------------------------------------------------------------------------

REPEATED = {
    "bfloat16": Case(BF16, 64, heads=8, kv_heads=2, seq_q=500, seq_k=500, window_right=0),
    "float16": Case(F16, 128, heads=4, seq_q=300, seq_k=700, bias="hq", sinks=F32, alibi=""),
    "wide": Case(BF16, 256, heads=4, kv_heads=1, seq_q=300, seq_k=300, dropout_p=0.2),
    "float32": Case(F32, 64, heads=4, kv_heads=2, seq_q=300, seq_k=300, mask="b"),
    "packed": Case(BF16, 64, heads=4, storage="packed", seq_q=300, seq_k=400, alibi="b"),
}
repeated = pytest.mark.parametrize("name", REPEATED)


@repeated
def test_deterministic_gradients_repeat_bit_for_bit(name):
    case = REPEATED[name]
    t = to_device(case.tensors())
    first = repeatable(case, t)
    for _ in range(5):
        assert_same(repeatable(case, t), first, name)


@repeated
def test_torchs_switch_makes_gradients_deterministic(name):
    case = replace(REPEATED[name], storage="dense", bias=None)
    t = to_device(case.tensors())
    leaves = [t[name].requires_grad_() for name in ("query", "key", "value")]

    def gradients(**options):
        output = functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True, **options
        )
        return torch.autograd.grad(output, leaves, t["doutput"])

    expected = gradients(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            for one, other in zip(gradients(), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)


@repeated
def test_forwards_repeat_bit_for_bit(name):
    case = REPEATED[name]
    t = to_device(case.tensors())
    first = forward(case, t)
    for _ in range(5):
        assert_same(forward(case, t), first, name)


@pytest.mark.parametrize("options", [{}, dict(bias="bhq", alibi="b")], ids=str)
@dtypes
def test_a_row_does_not_depend_on_its_batch(dtype, options):
    case = Case(dtype, 64, batch=5, heads=4, kv_heads=2, seq_q=130, seq_k=200, **options)
    t = to_device(case.tensors())
    whole = forward(case, t)
    for first, last in ((0, 1), (2, 3), (1, 5)):
        part = {name: x[first:last] if x.dim() > 1 and len(x) == 5 else x for name, x in t.items()}
        found = forward(case, part)
        assert_same(found, {name: x[first:last] for name, x in whole.items()})
    pair = slice(2, 4), slice(1, 2)  # query heads that share a kv head, and it
    alone = t | {"query": t["query"][:, pair[0]], "key": t["key"][:, pair[1]]}
    alone |= {"value": t["value"][:, pair[1]]}
    alone |= {name: t[name][:, pair[0]] for name in ("bias", "alibi_slopes") if name in t}
    found = forward(case, alone)
    assert_same(found, {name: x[:, pair[0]] for name, x in whole.items()})


def test_packed_sequences_are_what_they_are_alone():
    case = Case(BF16, 64, heads=4, kv_heads=2, storage="packed", seq_q=203, seq_k=300,
                window_right=0, bottom_right=True)  # fmt: skip
    t = to_device(case.tensors())
    whole = forward(case, t)
    for b, (queries, keys) in enumerate(case.sequences):
        (q0, q1), (k0, k1) = (t[name][b : b + 2].tolist() for name in ("cu_seq_q", "cu_seq_k"))
        alone = Case(BF16, 64, heads=4, kv_heads=2, batch=1, seq_q=queries, seq_k=keys,
                     window_right=0, bottom_right=True)  # fmt: skip
        rows = dict(query=t["query"][q0:q1], key=t["key"][k0:k1], value=t["value"][k0:k1])
        found = forward(alone, {name: x.transpose(0, 1)[None] for name, x in rows.items()})
        assert torch.equal(whole["output"][q0:q1], found["output"][0].transpose(0, 1))
        assert torch.equal(whole["lse"][:, q0:q1], found["lse"][0])


# ---- extremes ------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    "sizes", [dict(seq_q=0), dict(seq_k=0), dict(seq_q=0, seq_k=0), dict(batch=0)], ids=str
)
def test_nothing(sizes, dtype):
    case = Case(dtype, 16, **dict(batch=2, heads=4, kv_heads=2, seq_q=9, seq_k=70) | sizes)
    for options in ({}, dict(bias="bhq", mask="q", alibi="b", dropout_p=0.5, window_left=3)):
        of = replace(case, dlse=True, **options)
        t = to_device(of.tensors())
        for name, result in ours(of, t).items():
            assert (result == -INF).all() if name == "lse" else not result.any(), name
            assert name[0] != "d" or result.shape == t[name[1:]].shape, name


@dtypes
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", ["mask", "bias", "causal"])
def test_rows_without_keys(how, sinks, dtype):
    sinks = dtype if sinks else None
    case = Case(dtype, 32, seq_q=100, seq_k=70, sinks=sinks, dlse=True)
    dead = torch.zeros(100, dtype=torch.bool)
    dead[:30] = True
    if how == "causal":
        case = replace(case, window_right=0, bottom_right=True)
    else:
        dead[[44, 77]] = True
        case = replace(case, **{how: "q"})

    def change(t):
        if how == "causal":
            return {}
        changed = t[how].clone()
        changed[:, :, dead] = False if how == "mask" else -INF
        if how == "mask":
            changed[:, :, ~dead, 0] = True
        return {how: changed}

    check(case, change)
    t = case.tensors()
    results = ours(case, to_device(t | change(t)))
    alone = t["sinks"].to(results["lse"].dtype)[:, None] if sinks else torch.tensor(-INF)
    assert not results["output"][:, :, dead].any() and not results["dquery"][:, :, dead].any()
    assert (results["lse"][:, :, dead].cpu() == alone).all()


@dtypes
def test_rows_of_the_smallest_number_average(dtype):
    """finfo.min is no mask where a row has nothing else."""
    case = Case(dtype, 32, seq_q=40, seq_k=70, bias="q")
    t = case.tensors()
    smallest = torch.finfo(dtype).min
    t["bias"] = torch.zeros_like(t["bias"]).masked_fill(t["bias"] < 0, smallest)
    t["bias"][:, :, 3:9] = smallest
    found = ours(case, to_device(t))
    ref, unfused = (attention_cases.definition(case, t, of) for of in (F64, dtype))
    for name in ("dquery", "dkey", "dvalue", "dbias"):
        numerics.assert_close(found[name], ref[name], unfused[name], name)
    base = attention_cases.base(case, t)
    for name in ("output", "lse"):
        numerics.assert_close(found[name], ref[name], base[name], name)


@dtypes
@pytest.mark.parametrize("magnitude", [30.0, 200.0])
def test_huge_scores(magnitude, dtype):
    change = lambda t: dict(query=(t["query"] * magnitude).to(dtype))  # noqa: E731
    check(Case(dtype, 64, seq_q=70, seq_k=90, dlse=True), change)


@dtypes
@pytest.mark.parametrize("length", [64, 192, 320])
def test_half_a_tile_with_a_mask_and_a_small_lse(length, dtype):
    """S mod 128 = 64 and LSE below -88, where exp(score) and exp(-lse) have no float32."""

    def change(t):
        key = (t["key"] + 4).to(dtype)
        return dict(query=(t["query"] / 4 - 8).to(dtype), key=key)

    case = Case(dtype, 64, batch=1, seq_q=length, seq_k=length, factor=0.5, mask="bq", dlse=True)
    check(case, change)


UNSEEN = {
    "causal": (dict(window_right=0), slice(70, None)),
    "bottom-right window": (dict(window_left=20, window_right=0, bottom_right=True), slice(0, 128)),
    "mask": (dict(mask=""), slice(128, None)),
    "mask of a middle": (dict(mask="b"), slice(128, 256)),
}


@dtypes
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_that_no_query_sees_are_not_read(name, dtype):
    options, unseen = UNSEEN[name]
    case = Case(dtype, 40, seq_q=70, seq_k=300, bias="bhq", **options)
    t = to_device(case.tensors())
    if "mask" in t:
        t["mask"][..., unseen] = False
    clean = repeatable(case, t)
    for value in (NAN, INF):
        spoilt = {n: t[n].clone() for n in ("key", "value")}
        for tensor in spoilt.values():
            tensor[:, :, unseen] = value
        assert_same(repeatable(case, t | spoilt), clean)
    assert not clean["dkey"][:, :, unseen].any() and not clean["dvalue"][:, :, unseen].any()


@dtypes
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_not_finite_inputs_stay_in_their_head(name, dtype):
    case = Case(dtype, 32, seq_q=70, seq_k=90)
    t = to_device(case.tensors())
    clean = forward(case, t)["output"]
    for value in (NAN, INF):
        spoilt = t[name].clone()
        spoilt[1, 0, 33, 7] = value
        found = forward(case, t | {name: spoilt})["output"]
        assert not found[1, 0].isfinite().all()
        assert torch.equal(found[0], clean[0]) and torch.equal(found[1, 1], clean[1, 1])


# ---- for compute-sanitizer -----------------------------------------------------------------------

SMALL = {
    "causal": dict(window_right=0),
    "everything": VARIANTS["everything"] | dict(seq_q=40, seq_k=70),
    "packed": dict(storage="packed", seq_q=40, seq_k=70),
    "paged": dict(storage="paged", seq_q=20, seq_k=40),
    "wide": dict(head_dim=200, seq_q=40, seq_k=70, kv_heads=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_for_sanitizers(name):
    """Each kernel once on little data, and next to nothing of torch's own."""
    for dtype in (BF16, F32):
        case = Case(dtype, **SMALL[name])
        t = to_device(case.tensors())
        ours(case, t)
        if case.storage != "paged":
            repeatable(case, t)
    if ON_CUDA:
        torch.cuda.synchronize()
