"""Which scores dropout drops, found from outputs and gradients; for CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass.reference.attention import keep_scale
from tests.attention.cases import Case, backward, forward
from tests.support.dtypes import BF16, F16, F32, F64


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
    Case(F16, 8, heads=4, kv_heads=2, seq_q=9, seq_k=200, dropout_p=0.9),
    Case(F64, 16, heads=1, seq_q=130, seq_k=17, query_offset=9, key_offset=13, dropout_p=0.1),
    # Of buckets of head dims whose tiles hold other numbers of keys.
    with_threshold(Case(BF16, 64, batch=1, seq_q=150, seq_k=230)),
    Case(F16, 128, batch=1, seq_q=140, seq_k=170, dropout_p=0.4, key_offset=21),
    Case(BF16, 200, batch=1, heads=1, seq_q=70, seq_k=150, dropout_p=0.2, query_offset=3),
]  # fmt: skip
NAMES = ["whole", "a shard", "groups", "float64", "of 64", "of 128", "of 200"]
fates = pytest.mark.parametrize("case", FATES, ids=NAMES)
