"""Attention's dropout: which scores are dropped, in the forward, in the backward and in shards.

Whether a score is dropped depends on (seed, batch, head, query, key) alone:
reference.attention.keep_scale has the formula.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass import functional
from onepass.reference.attention import keep_scale
from onepass.reference.dropout import philox4x32
from tests.attention.cases import DTYPES, Case, backward, check, forward, ours
from tests.emulator.executors import everywhere
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.seeds import drawn_seed

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]


def kept(case: Case, seed: Tensor) -> Tensor:
    """The kept scores by the definition, (batch, heads, seq_q, seq_k)."""
    shape = (case.batch, case.heads, case.seq_q, case.seq_k)
    first = (0, case.query_offset, case.key_offset)
    return keep_scale(seed, shape, case.dropout_p, F32, first) != 0


def forward_mask(case: Case, seed: Tensor) -> Tensor:
    """All P are alike, and value is the identity on one run of value_dim keys after another."""
    t = case.tensors() | dict(seed=seed)
    t["query"].zero_()
    found = []
    for first in range(0, case.seq_k, case.head_dim):
        keys = range(first, min(first + case.head_dim, case.seq_k))
        t["value"].zero_()
        t["value"][:, :, list(keys), list(range(len(keys)))] = 1
        found.append(forward(case, t)["output"][..., : len(keys)] != 0)
    return torch.cat(found, -1)


def backward_masks(case: Case, seed: Tensor) -> dict[str, Tensor]:
    """The scores that the backward drops in P, found from dvalue, and in dP, found from dbias.

    With output and lse 0, delta is 0 and P is exp(score), here 1.
    """
    case = replace(case, bias="bhq", window_left=-1, window_right=-1, kv_heads=case.heads)
    t = case.tensors() | dict(seed=seed)
    t["query"].zero_(), t["bias"].zero_(), t["value"].fill_(1)
    outputs = dict(output=torch.zeros_like(t["doutput"]), lse=torch.zeros(t["query"].shape[:3]))
    if case.dtype is F64:
        outputs["lse"] = outputs["lse"].double()
    t["doutput"].fill_(1)
    dp = backward(case, t, outputs, ["bias"])["dbias"] != 0
    p = []
    for first in range(0, case.seq_q, case.head_dim):
        queries = range(first, min(first + case.head_dim, case.seq_q))
        t["doutput"].zero_()
        t["doutput"][:, :, list(queries), list(range(len(queries)))] = 1
        p.append(backward(case, t, outputs, ["value"])["dvalue"][..., : len(queries)] != 0)
    return dict(dp=dp, p=torch.cat(p, -1).mT)


SEED = torch.tensor([-0x0123456789ABCDEF, 2**40 + 5])


def with_threshold(case: Case) -> Case:
    """Sets dropout_p so that the threshold equals the number drawn for one of the kept scores."""
    row = replace(case, dropout_p=0.5)
    candidates = [n for n in range(8000, 30000) if n]
    low, high = candidates[0], candidates[-1]
    while low < high:  # the largest threshold that keeps score (0, 1, 2, 3)
        middle = (low + high + 1) // 2
        if kept(replace(row, dropout_p=middle / 65536), SEED)[0, 1, 2, 3]:
            low = middle
        else:
            high = middle - 1
    return replace(case, dropout_p=low / 65536)


# A call, and one that is a part of a larger one: beyond 31 bits of queries, and beginning within
# the eight keys that share a block of random numbers, so that tiles have parts of one block more.
FATES = [
    with_threshold(Case(F32, 64, seq_q=70, seq_k=150)),
    with_threshold(
        Case(BF16, 32, seq_q=70, seq_k=150, query_offset=2**31 - 20, key_offset=8 * 2**20 + 3)
    ),
    Case(F16, 8, heads=4, kv_heads=2, seq_q=9, seq_k=100, dropout_p=0.9),
    Case(F64, 16, heads=1, seq_q=130, seq_k=17, query_offset=9, key_offset=13, dropout_p=0.1),
    # Of buckets of head dims whose tiles hold other numbers of keys.
    with_threshold(Case(BF16, 64, batch=1, seq_q=40, seq_k=230)),
    Case(F16, 128, batch=1, seq_q=40, seq_k=170, dropout_p=0.4, key_offset=21),
    Case(BF16, 200, batch=1, heads=1, seq_q=70, seq_k=150, dropout_p=0.2, query_offset=3),
]  # fmt: skip
NAMES = ["whole", "a shard", "groups", "float64", "of 64", "of 128", "of 200"]
fates = pytest.mark.parametrize("case", FATES, ids=NAMES)


@everywhere
@fates
@pytest.mark.parametrize("seed", [SEED, torch.tensor([2**63 - 1, -1])], ids=["one", "other"])
def test_forward_and_backward_drop_what_the_reference_drops(case, seed):
    expected = kept(case, seed)
    assert torch.equal(forward_mask(case, seed), expected)
    for name, mask in backward_masks(case, seed).items():
        assert torch.equal(mask, expected), name


@everywhere
def test_golden_bits():
    """Counter (query, key // 8, sequence, offset) and key = seed, low halves first.

    Frozen: a change of these bits is a change of every seeded run.
    """
    case = Case(heads=3, seq_q=5, seq_k=30)
    query, key, sequence = 4, 19, 1 * 3 + 2
    word = philox4x32((0x89ABCDEF, 0x01234567), tuple(torch.tensor([n]) for n in
                      (query, key // 8, sequence, 42)))[key % 8 // 2]  # fmt: skip
    drawn = int(word >> 16 & 0xFFFF)  # 19 is odd
    seed = torch.tensor([0x0123456789ABCDEF, 42 + 2**32])  # of the offset, 32 bits count
    for threshold, fate in ((drawn, True), (drawn + 1, False)):
        of = replace(case, dropout_p=threshold / 65536)
        assert kept(of, seed)[1, 2, query, key] == fate
        assert forward_mask(of, seed)[1, 2, query, key] == fate


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_dropped(dtype):
    case = Case(dtype, 32, seq_q=9, seq_k=70, dropout_p=1.0, sinks=dtype, bias="q", dlse=True)
    check(case)
    t = case.tensors()
    found = ours(case, t)
    plain = forward(replace(case, dropout_p=0.0), t | dict(seed=None))
    assert torch.equal(found["lse"], plain["lse"])
    assert not found["output"].any() and not found["dvalue"].any()


@everywhere
def test_too_small_to_drop_anything_is_no_dropout():
    """round(65536 p) is 0."""
    case = Case(F32, 32, seq_q=70, seq_k=90, dropout_p=7e-6)
    assert forward_mask(case, SEED).all()
    check(case)


WHOLE = Case(F32, 32, batch=3, heads=4, kv_heads=2, seq_q=90, seq_k=90, window_right=0,
             dropout_p=0.3)  # fmt: skip


@everywhere
def test_shards_reproduce_the_mask_of_the_whole():
    """Context parallel, the keys beginning anywhere."""
    whole = kept(WHOLE, SEED)
    for q, k in ((64, 0), (13, 5), (0, 83), (89, 16)):
        shard = replace(
            WHOLE, kv_heads=4, seq_q=90 - q, query_offset=q, seq_k=90 - k, key_offset=k,
            window_right=-1,
        )  # fmt: skip
        expected = whole[:, :, q:, k:]
        assert torch.equal(forward_mask(shard, SEED), expected)
        for name, mask in backward_masks(shard, SEED).items():
            assert torch.equal(mask, expected), name


def test_the_seed_is_drawn_from_torchs_generator():
    case = Case(F32, 32, seq_q=40, seq_k=70, dropout_p=0.4)
    t = case.tensors()
    attend, qkv = functional.scaled_dot_product_attention, (t["query"], t["key"], t["value"])
    expected = forward(case, t | dict(seed=drawn_seed(5)))["output"]
    torch.manual_seed(5)
    attend(*qkv)  # draws nothing
    first, second = (attend(*qkv, dropout_p=0.4, scale=case.scale) for _ in range(2))
    assert torch.equal(first, expected) and not torch.equal(first, second)
