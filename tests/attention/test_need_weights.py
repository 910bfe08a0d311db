"""`onepass.nn.MultiheadAttention` with need_weights=True: torch's results, and 0 for empty rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from tests.support.dtypes import F32, F64

BATCH, SEQ, KEYS, WIDTH, HEADS = 2, 3, 4, 12, 3
PADDING = torch.tensor([[False, False, True, True], [False, True, False, False]])
MASK = torch.tensor([[False, False, True, True], [False, True, True, True], [False] * 4])


def module(cls, batch_first: bool, training: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = cls(WIDTH, HEADS, batch_first=batch_first, dropout=0.3, dtype=dtype)
    return made.train(training)


def masks(padding: str, mask: str, batched: bool) -> dict[str, torch.Tensor | None]:
    def form(tensor, name):
        return tensor.float().masked_fill(tensor, -torch.inf) if name == "float" else tensor

    rows = PADDING if batched else PADDING[0]
    by_head = MASK.expand((BATCH if batched else 1) * HEADS, SEQ, KEYS)
    return {
        "key_padding_mask": form(rows, padding) if padding else None,
        "attn_mask": form(by_head if mask == "by head" else MASK, mask) if mask else None,
    }


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("padding", ["", "bool", "float"])
@pytest.mark.parametrize("mask", ["bool", "float", "by head"])
def test_dropout_draws_the_same_weights(batch_first, batched, average, padding, mask):
    """Values and gradients are those of test_modules.py."""
    first, second = (BATCH, SEQ, WIDTH), (BATCH, KEYS, WIDTH)
    query, key = torch.randn(first), torch.randn(second)
    if not batched:
        query, key = query[0], key[0]
    elif not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    found = []
    for cls in (onepass.nn.MultiheadAttention, nn.MultiheadAttention):
        made = module(cls, batch_first, True, F32)
        torch.manual_seed(2)
        given = masks(padding, mask, batched)
        found.append(made(query, key, key, average_attn_weights=average, **given))
    for ours, stock in zip(*found, strict=True):
        assert ours.shape == stock.shape and torch.equal(ours == 0, stock == 0)
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("empty", ["sequence", "row"])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_rows_without_keys_are_zero_and_so_are_their_gradients(empty, form):
    """torch has NaN there, in the gradients of all parameters too."""
    given = {}
    if empty == "sequence":
        given["key_padding_mask"] = torch.tensor([[True] * SEQ, [False] * SEQ])
    else:
        given["attn_mask"] = torch.tensor([[True] * SEQ, [False] * SEQ, [False] * SEQ])
    dead = (0,) if empty == "sequence" else (slice(None), 0)
    found = []
    x = torch.randn(BATCH, SEQ, WIDTH)
    for dtype, need_weights in ((F32, True), (F32, False), (F64, False)):
        made = module(onepass.nn.MultiheadAttention, True, False, dtype)
        given_now = given
        if form == "float":
            given_now = {
                name: torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)
                for name, mask in given.items()
            }
        leaf = x.to(dtype).requires_grad_()
        y, weights = made(leaf, leaf, leaf, need_weights=need_weights, **given_now)
        if need_weights:
            assert not weights[dead].any() and weights.isfinite().all()
        assert torch.equal(y[dead], made.out_proj.bias.expand_as(y[dead]))
        found.append(torch.autograd.grad(y.square().sum(), [leaf, *made.parameters()]))
    for ours, base, ref in zip(*found, strict=True):
        numerics.assert_close(ours, ref, base)
