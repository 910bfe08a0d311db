"""`onepass.nn.MultiheadAttention` with need_weights=True: torch's results, and 0 for empty rows."""

from __future__ import annotations

import warnings

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


def results(made: nn.Module, batched: bool, average: bool, given: dict) -> list[torch.Tensor]:
    """Output, weights, and the gradients of the inputs and parameters."""
    dtype = made.in_proj_weight.dtype
    torch.manual_seed(1)
    shapes = [(BATCH, SEQ, WIDTH), (BATCH, KEYS, WIDTH)]
    inputs = [torch.randn(shape) for shape in shapes]
    inputs = [x if made.batch_first else x.transpose(0, 1) for x in inputs]
    if not batched:
        inputs = [x[0] if made.batch_first else x[:, 0] for x in inputs]
    query, key = (x.to(dtype).requires_grad_() for x in inputs)
    given = {
        name: mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        for name, mask in given.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        output, weights = made(query, key, key, average_attn_weights=average, **given)
    upstream = [torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x) for x in (output, weights)]
    wanted = [query, key, *made.parameters()]
    return [output, weights, *torch.autograd.grad([output, weights], wanted, upstream)]


@pytest.mark.grid
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("padding", ["", "bool", "float"])
@pytest.mark.parametrize("mask", ["bool", "float", "by head"])
def test_results_are_torchs(batch_first, batched, training, average, padding, mask):
    """Dropout draws the same weights too. Query 1 of sequence 0 has one key, of padding or not."""
    found = []
    torchs = nn.MultiheadAttention
    for cls, dtype in ((onepass.nn.MultiheadAttention, F32), (torchs, F32), (torchs, F64)):
        if training and dtype is F64:
            continue  # which draws other numbers
        made = module(cls, batch_first, training, dtype)
        torch.manual_seed(2)
        found.append(results(made, batched, average, masks(padding, mask, batched)))
    ours, base = found[:2]
    assert [x.shape for x in ours] == [x.shape for x in base]
    if training:
        for a, b in zip(ours[:2], base[:2], strict=True):
            assert torch.equal(a == 0, b == 0)
        return
    for a, b, ref in zip(ours, base, found[2], strict=True):
        numerics.assert_close(a, ref, b)


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
