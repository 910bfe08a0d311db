"""Attention's promises beside its values: threads, batches, memory, and errors."""

import re
from dataclasses import replace

import pytest
import torch

from onepass._ops.attention import attention
from tests.attention.cases import DTYPES, Case, assert_same, forward, int32, ours
from tests.attention.cuda_cases import KINDS, half_and_float, of_kind
from tests.emulator.executors import each, everywhere
from tests.support import peaks
from tests.support.dtypes import BF16, F16, F32, F64

# ---- bitwise promises ---------------------------------------------------------------------------

EVERYTHING = dict(
    heads=4, kv_heads=2, window_left=150, window_right=0, bottom_right=True, bias="hq", mask="b",
    alibi="b", sinks=F32, dropout_p=0.25, dlse=True,
)  # fmt: skip
THREADED = {
    "one head": Case(F32, 64, batch=1, heads=1, seq_q=300, seq_k=500),
    "one key head": Case(BF16, 64, batch=1, heads=5, kv_heads=1, seq_q=200, seq_k=260),
    "float64": Case(F64, 24, batch=1, heads=2, seq_q=200, seq_k=150, bias=""),
    "bias of all": Case(F32, 16, batch=5, heads=4, seq_q=130, seq_k=140, bias=""),
    "everything": Case(F32, 40, 24, seq_q=200, seq_k=300, **EVERYTHING),
    "everything, packed, float16": Case(F16, 64, storage="packed", seq_q=200, **EVERYTHING),
    "paged": Case(F32, 64, heads=4, kv_heads=2, storage="paged", seq_q=1, seq_k=500),
    "more heads than threads": Case(F32, 8, batch=3, heads=14, kv_heads=7, seq_q=9, seq_k=9),
    "one query": Case(BF16, 64, batch=1, heads=2, seq_q=1, seq_k=1000),
}


@pytest.mark.isa
@pytest.mark.parametrize("name", THREADED)
def test_bitwise_equal_for_any_number_of_threads(name):
    case = THREADED[name]
    t = case.tensors()
    expected = ours(case, t)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert_same(ours(case, t), expected, f"{threads} threads")


@each("kind", cpu=DTYPES, cuda=KINDS)
@pytest.mark.isa
@pytest.mark.emulator_grid
@pytest.mark.parametrize("terms", [{}, dict(bias="bh", mask="b", alibi="b")], ids=["", "terms"])
@pytest.mark.parametrize("seq_q, seq_k", [(1, 300), (7, 129), (130, 150), (200, 70)])
def test_a_row_does_not_depend_on_its_batch(executor, seq_q, seq_k, terms, kind):
    """Nor on other heads, nor on the number of other rows; with more threads."""
    case = Case(head_dim=40, batch=3, heads=4, kv_heads=2, seq_q=seq_q, seq_k=seq_k,
                window_right=0, bottom_right=True, **terms, **of_kind(kind))  # fmt: skip
    t = case.tensors()
    whole = forward(case, t)
    torch.set_num_threads(3)
    for b in (slice(0, 1), slice(1, 3), slice(2, 3)):
        for kv in (slice(0, 2), slice(0, 1), slice(1, 2)):
            h = slice(2 * kv.start, 2 * kv.stop)
            part = {"query": t["query"][b, h]} | {name: t[name][b, kv] for name in ("key", "value")}
            if terms:
                part |= dict(
                    bias=t["bias"][b, h], mask=t["mask"][b], alibi_slopes=t["alibi_slopes"][b, h]
                )
            expected = {name: result[b, h] for name, result in whole.items()}
            assert_same(forward(case, part), expected, f"{b} {kv}")
    for rows in (slice(seq_q - 30, seq_q), slice(0, 1)) if seq_q > 30 else ():
        part = t | dict(query=t["query"][:, :, rows])  # as a call of these queries alone
        offset = rows.start + seq_k - seq_q
        if offset >= 0:
            shifted = replace(case, bottom_right=False, query_offset=offset)
            expected = {name: result[:, :, rows] for name, result in whole.items()}
            assert_same(forward(shifted, part), expected, f"rows {rows}")


@everywhere
@half_and_float
@pytest.mark.isa
def test_a_row_does_not_depend_on_what_other_rows_hold(dtype):
    """Scores so large that a row subtracts its maximum first affect that row alone."""
    case = Case(dtype, 40, batch=1, heads=1, seq_q=130, seq_k=200)
    t = case.tensors()
    whole = forward(case, t)["output"]
    rows = torch.arange(130) % 3 == 0
    t["query"] = torch.where(rows[:, None], t["query"], 50 * torch.randn_like(t["query"]))
    assert torch.equal(forward(case, t)["output"][:, :, rows], whole[:, :, rows])


# ---- memory -------------------------------------------------------------------------------------

STEP = """
import sys, torch
from onepass.functional import scaled_dot_product_attention as attend
torch.set_num_threads(2)
choices = eval(sys.argv[1])

def step(seq):
    for options in choices:
        tensors = [torch.randn(1, 1, seq, 16, requires_grad=True) for _ in range(3)]
        attend(*tensors, **options).sum().backward()
"""


def test_no_square_in_memory():
    """At 4,096 rows it would be 64 MiB of float32, or 16 MiB of bytes."""
    choices = "{}, dict(dropout_p=0.1), "
    choices += "dict(is_causal=True, softcap=2.0, alibi_slopes=torch.ones(1))"
    assert peaks.growth(STEP, choices, small=128, large=4096) < 12


# ---- errors -------------------------------------------------------------------------------------

X = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 5, 8)
CU_Q, CU_K = int32([0, 2, 6]), int32([0, 4, 5])
RIGHT = dict(query=X, key=KV, value=KV, scale=1.0)
PACKED = dict(query=torch.randn(6, 4, 8), key=torch.randn(5, 2, 8), value=torch.randn(5, 2, 8),
              cu_seq_q=CU_Q, cu_seq_k=CU_K, max_q=4, max_k=4, scale=1.0)  # fmt: skip
POOL = torch.randn(3, 4, 2, 8)
PAGED = dict(query=torch.randn(6, 4, 8), key=POOL, value=POOL, cu_seq_q=CU_Q, max_q=4, max_k=8,
             block_table=int32([[0, 1], [2, 0]]), seqused_k=int32([7, 3]), scale=1.0)  # fmt: skip
SEED = torch.zeros(2, dtype=torch.int64)

# Changes that make a right call wrong, and the whole message after `attention: `.
FLOATS = "must have dtype float32, bfloat16, float16 or float64, got"
BESIDE = "must have dtype float32, bfloat16 or float16 beside query, got"
OF_SCORES = "must have shape (2, 4, 6, 5) or 1 in place of all sizes but the last, got"
USED = "seqused_k must lie between 0 and the rows of the sequence,"
CAP = "softcap must be 0 or a positive number that float32 holds, got"
SEED_GIVEN = "seed must be given with dropout_p > 0 only, got"
BESIDE_CU = "cu_seq_k must be given with cu_seq_q, and not without, got"
LONGEST = "must be at least the longest sequence,"
SLOPES = "alibi_slopes must have shape (4,) or (2, 4), got"
PAGES = "block_table must hold numbers of the 3 pages, got"
INT32 = "must be an int32 tensor of shape"
WRONG = [
    # shapes
    (RIGHT, dict(query=X[0]), "query must have 4 dimensions, got (4, 6, 8)"),
    (RIGHT, dict(key=KV[0]), "key must have 4 dimensions, got (2, 5, 8)"),
    (RIGHT, dict(value=KV[:, :, :4]), "value must have shape (2, 2, 5, 8), got (2, 2, 4, 8)"),
    (RIGHT, dict(key=KV[..., :7]), "key must have shape (2, 2, 5, 8), got (2, 2, 5, 7)"),
    (RIGHT, dict(query=X[:, :3]), "query must have a multiple of the 2 heads of key, got 3"),
    (RIGHT, dict(query=X[:, :0]), "query must have a multiple of the 2 heads of key, got 0"),
    (RIGHT, dict(key=KV[:, :0], value=KV[:, :0]), "key must have at least one head, got 0"),
    (RIGHT, dict(query=X[..., :0], key=KV[..., :0]),
     "query must have a head_dim of 1 to 512, got 0"),
    (RIGHT, dict(value=torch.zeros(2, 2, 5, 513)),
     "value must have a head_dim of 1 to 512, got 513"),
    # dtypes and devices
    (RIGHT, dict(query=X.long()), f"query {FLOATS} int64"),
    (RIGHT, dict(key=KV.bfloat16()), "key must have dtype float32 like query, got bfloat16"),
    (RIGHT, dict(value=KV.double()), "value must have dtype float32 like query, got float64"),
    (RIGHT, dict(key=KV.to("meta")), "key must be on the device of query, cpu, got meta"),
    (RIGHT, dict(bias=torch.zeros(1, 1, 1, 5, device="meta")),
     "bias must be on the device of query, cpu, got meta"),
    # bias and mask
    (RIGHT, dict(bias=torch.zeros(1, 3, 6, 5)), f"bias {OF_SCORES} (1, 3, 6, 5)"),
    (RIGHT, dict(bias=torch.zeros(1, 1, 6, 5).int()), f"bias {FLOATS} int32"),
    (RIGHT, dict(bias=torch.zeros(1, 1, 6, 5).double()), f"bias {BESIDE} float64"),
    (RIGHT, dict(mask=torch.zeros(3, 1, 6, 5).bool()), f"mask {OF_SCORES} (3, 1, 6, 5)"),
    (RIGHT, dict(mask=torch.zeros(1, 1, 6, 5)), "mask must have dtype bool, got float32"),
    # slopes and sinks
    (RIGHT, dict(alibi_slopes=torch.zeros(3)), f"{SLOPES} (3,)"),
    (RIGHT, dict(alibi_slopes=torch.zeros(3, 4)), f"{SLOPES} (3, 4)"),
    (RIGHT, dict(alibi_slopes=torch.zeros(4).half()),
     "alibi_slopes must have dtype float32, got float16"),
    (RIGHT, dict(sinks=torch.zeros(2)), "sinks must have shape (4,), got (2,)"),
    (RIGHT, dict(sinks=torch.zeros(4).half()),
     "sinks must have dtype float32 or query's float32, got float16"),
    # numbers
    (RIGHT, dict(window_left=-2), "window_left must be at least -1, got -2"),
    (RIGHT, dict(dropout_p=1.5, seed=SEED), "dropout_p must lie between 0 and 1, got 1.5"),
    (RIGHT, dict(softcap=-1.0), f"{CAP} -1"),
    (RIGHT, dict(dropout_p=0.5), f"{SEED_GIVEN} none"),
    (RIGHT, dict(seed=SEED), f"{SEED_GIVEN} one"),
    (RIGHT, dict(dropout_p=0.5, seed=SEED.int()),
     "seed must be a dense int64 tensor of shape (2,) on cpu, got (2,) of int32 on cpu"),
    (RIGHT, dict(softcap=1e39), f"{CAP} 1e+39"),
    (RIGHT, dict(max_q=5), "max_q must be at least the longest sequence, 6, got 5"),
    (RIGHT, dict(query_offset=-1), "query_offset must not be negative, got -1"),
    (RIGHT, dict(key_offset=2**40), "key_offset must be below 2^40, got 1099511627776"),
    # packed sequences
    (PACKED, dict(max_q=-1), "max_q must not be negative, got -1"),
    (PACKED, dict(cu_seq_q=torch.zeros(2, 2).int()),
     "cu_seq_q must have one dimension and an element more than sequences, got (2, 2)"),
    (PACKED, dict(query=X), "query must have 3 dimensions, got (2, 4, 6, 8)"),
    (PACKED, dict(cu_seq_k=None), f"{BESIDE_CU} none"),
    (RIGHT, dict(cu_seq_k=CU_K), f"{BESIDE_CU} one"),
    (PACKED, dict(cu_seq_q=CU_Q.long()), f"cu_seq_q {INT32} (3,) on cpu, got (3,) of int64 on cpu"),
    (PACKED, dict(cu_seq_q=int32([1, 2, 6])), "cu_seq_q must begin with 0, got 1"),
    (PACKED, dict(cu_seq_q=int32([0, 7, 6])), "cu_seq_q must not decrease, got 6 after 7"),
    (PACKED, dict(cu_seq_q=int32([0, 2, 5])),
     "cu_seq_q must end with the number of rows, 6, got 5"),
    (PACKED, dict(max_q=3), f"max_q {LONGEST} 4, got 3"),
    (PACKED, dict(query_offset=1),
     "query_offset must be 0 where sequences have lengths of their own, got 1"),
    (PACKED, dict(seqused_k=int32([5, 1])), f"{USED} 4, got 5"),
    (RIGHT, dict(seqused_k=int32([6, 1])), f"{USED} 5, got 6"),
    # pages
    (PAGED, dict(block_table=int32([[0, 3], [2, 0]])), f"{PAGES} 3"),
    (PAGED, dict(block_table=int32([[0, 1], [-1, 0]])), f"{PAGES} -1"),
    (PAGED, dict(block_table=int32([[0, 1]])),
     f"block_table {INT32} (2, 2) on cpu, got (1, 2) of int32 on cpu"),
    (PAGED, dict(seqused_k=None), "seqused_k must be given with block_table, got none"),
    (PAGED, dict(seqused_k=int32([9, 3])), f"{USED} 8, got 9"),
    (PAGED, dict(cu_seq_q=None), "cu_seq_q must be given with block_table, got none"),
    (PAGED, dict(cu_seq_k=CU_K), "cu_seq_k must not be given with block_table, got one"),
    (PAGED, dict(key=POOL[0], value=POOL[0]), "key must have 4 dimensions, got (4, 2, 8)"),
    (RIGHT, dict(bias=torch.zeros(1, 1, 6, 1)), f"bias {OF_SCORES} (1, 1, 6, 1)"),
    (RIGHT, dict(window_right=-7), "window_right must be at least -1, got -7"),
    (RIGHT, dict(softcap=1e-46), f"{CAP} 1e-46"),
    (PACKED, dict(max_k=-2), "max_k must not be negative, got -2"),
    (PACKED, dict(cu_seq_k=CU_K.long()), f"cu_seq_k {INT32} (3,) on cpu, got (3,) of int64 on cpu"),
    (PACKED, dict(cu_seq_k=int32([0, -1, 5])), "cu_seq_k must not decrease, got -1 after 0"),
    (PACKED, dict(max_k=3), f"max_k {LONGEST} 4, got 3"),
]  # fmt: skip


def refused(call, right: dict, changes: dict, message: str) -> None:
    arguments = {name: v for name, v in (right | changes).items() if v is not None}
    with pytest.raises(RuntimeError, match=f"^attention: {re.escape(message)}($|\n)"):
        call(**arguments)


def test_messages():
    for row in WRONG:
        refused(torch.ops.onepass.attention_forward, *row)


@pytest.mark.parametrize("trained", ["query", "key", "value"])
def test_messages_of_pages_with_gradients(trained):
    """The same messages, page numbers and lengths too, raised before pages are gathered."""

    def call(query, key, value, **options):
        return attention(query, key, value, options)

    for right, changes, message in WRONG:
        if right is PAGED:
            wrong = right | changes
            leaf = {trained: wrong[trained].clone().requires_grad_()}
            refused(call, wrong, leaf, message)


def test_where_lengths_are_not_read_no_row_is_left_out():
    """On CUDA; here on the meta device, which runs the same checks."""
    tensors = {n: v.to("meta") for n, v in PACKED.items() if isinstance(v, torch.Tensor)}
    ends = {n: tensors[n][:1] for n in ("cu_seq_q", "cu_seq_k")}
    for changes, message in (
        (dict(max_q=0), f"max_q {LONGEST} got 0"),
        (ends, "cu_seq_q must have an end for each sequence, got none"),
    ):
        refused(torch.ops.onepass.attention_forward, PACKED | tensors, changes, message)


def test_the_right_calls_are_right():
    for arguments in (RIGHT, PACKED, PAGED):
        output, lse, _ = torch.ops.onepass.attention_forward(**arguments)
        assert output.shape == arguments["query"].shape and lse.isfinite().all()


WRONG_BACKWARD = [
    (dict(doutput=X[..., :7]), "doutput must have shape (2, 4, 6, 8), got (2, 4, 6, 7)"),
    (dict(doutput=X.double()), f"doutput {BESIDE} float64"),
    (dict(dlse=torch.zeros(2, 4)), "dlse must have shape (2, 4, 6), got (2, 4)"),
    (dict(dlse=torch.zeros(2, 4, 6).bfloat16()), "dlse must have dtype float32, got bfloat16"),
    (dict(output=X[:, :2]), "output must have shape (2, 4, 6, 8), got (2, 2, 6, 8)"),
    (dict(lse=torch.zeros(2, 4, 5)), "lse must have shape (2, 4, 6), got (2, 4, 5)"),
    (dict(lse=torch.zeros(2, 4, 6).bfloat16()), "lse must have dtype float32, got bfloat16"),
    (dict(lse_rest=torch.zeros(2, 4)), "lse_rest must have shape (2, 4, 6), got (2, 4)"),
    (dict(lse_rest=torch.zeros(2, 4, 6).double()), f"lse_rest {BESIDE} float64"),
    (dict(grad_mask=64), "grad_mask must ask for gradients of what is given only, 7, got 64"),
    (dict(grad_mask=8), "grad_mask must ask for gradients of what is given only, 7, got 8"),
    (dict(key=KV[:, :, :4]), "value must have shape (2, 2, 4, 8), got (2, 2, 5, 8)"),
    (dict(window_left=-2), "window_left must be at least -1, got -2"),
]  # fmt: skip


def test_messages_of_the_backward():
    backward, op = torch.ops.onepass.attention_backward, "attention_backward"
    for right, table in (
        (RIGHT, WRONG_BACKWARD),
        (PAGED, [({}, "block_table must not be given, got one")]),
    ):
        output, lse, _ = torch.ops.onepass.attention_forward(**right)
        saved = dict(doutput=output, dlse=None, output=output, lse=lse, lse_rest=None, grad_mask=7)
        for changes, message in table:
            arguments = right | saved | changes
            with pytest.raises(RuntimeError, match=f"^{op}: {re.escape(message)}($|\n)"):
                backward(**arguments)


def test_other_floats_are_float32s_and_float64s():
    """float64 goes with float64, everything else with everything else but float64."""
    x, kv = X.double(), KV.double()
    attend = torch.ops.onepass.attention_forward
    with pytest.raises(RuntimeError, match="^attention: bias must .*float64.*, got float32"):
        attend(x, kv, kv, bias=torch.zeros(1, 1, 6, 5), scale=1.0)
    assert attend(x, kv, kv, sinks=torch.zeros(4), scale=1.0)[0].dtype is F64
