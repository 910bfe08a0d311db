"""Attention's dropout: which scores are dropped, in the forward, in the backward and in shards.

Whether a score is dropped depends on (seed, batch, head, query, key) alone:
reference.attention.keep_scale has the formula.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from onepass import functional
from onepass.reference.dropout import philox4x32
from tests.attention.cases import DTYPES, Case, check, forward, ours
from tests.attention.dropout_cases import SEED, backward_masks, fates, forward_mask, kept
from tests.emulator.executors import everywhere
from tests.support.dtypes import F32
from tests.support.seeds import drawn_seed

pytestmark = [pytest.mark.isa, pytest.mark.emulator_grid]


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


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9])
def test_keep_fraction(p):
    case = Case(F32, 64, heads=4, seq_q=100, seq_k=256, dropout_p=p)
    count = 2 * 4 * 100 * 256
    fraction = float(forward_mask(case, SEED).double().mean())
    quantised = 1 - math.floor(65536 * p + 0.5) / 65536
    deviation = math.sqrt(quantised * (1 - quantised) / count)
    assert abs(fraction - quantised) <= 4 * deviation
    # Neighbours in any direction are independent.
    mask = kept(case, SEED).double() - quantised
    for dim in range(4):
        size = mask.shape[dim] - 1
        pairs = mask.narrow(dim, 0, size) * mask.narrow(dim, 1, size)
        bound = 5 * quantised * (1 - quantised) / math.sqrt(pairs.numel())
        assert abs(float(pairs.mean())) <= bound, dim


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


# ---- shards -------------------------------------------------------------------------------------

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


# ---- the functions ------------------------------------------------------------------------------


def test_the_seed_is_drawn_from_torchs_generator():
    case = Case(F32, 32, seq_q=40, seq_k=70, dropout_p=0.4)
    t = case.tensors()
    attend = functional.scaled_dot_product_attention

    def call():
        return attend(t["query"], t["key"], t["value"], dropout_p=0.4, scale=case.scale)

    expected = forward(case, t | dict(seed=drawn_seed(5)))["output"]
    torch.manual_seed(5)
    first, second = call(), call()
    assert torch.equal(first, expected)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(call(), expected)
    torch.manual_seed(5)
    attend(t["query"], t["key"], t["value"])  # draws nothing
    assert torch.equal(call(), expected)
