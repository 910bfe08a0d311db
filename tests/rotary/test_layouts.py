"""Rotary embedding of tensors of any layout: read in place, results in the same memory order."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.rotary.cases import (
    BF16,
    BOTH,
    F32,
    F64,
    Case,
    check,
    check_tensors,
    outputs_and_gradients,
)

pytestmark = [everywhere, pytest.mark.isa]
dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
normed = pytest.mark.parametrize("norms", [(), BOTH], ids=["alone", "normed"])


@dtypes
@pytest.mark.parametrize("seq_first", [False, True])
@pytest.mark.parametrize("tokens_first", [False, True])
@normed
def test_heads_or_tokens_first(dtype, norms, tokens_first, seq_first):
    case = Case(dtype, tokens_first=tokens_first, seq_first=seq_first, norms=norms)
    tensors = case.tensors()
    check_tensors(case, tensors)
    outputs = functional.rotary_embedding(**tensors, **case.options)
    for name, output in zip(("query", "key"), outputs, strict=True):
        assert output.stride() == tensors[name].stride()


@normed
@pytest.mark.parametrize("tokens_first", [False, True])
def test_slices_of_one_projection(tokens_first, norms):
    """query, key and value in one tensor; results are dense and in its order."""
    case = Case(heads=4, key_heads=2, norms=norms)
    batch, tokens, head_dim = case.batch, case.tokens, case.head_dim
    rows = torch.randn(batch, tokens, 8, head_dim) if tokens_first else torch.randn(
        batch, 8, tokens, head_dim)  # fmt: skip
    rows = rows.transpose(1, 2) if tokens_first else rows
    tensors = case.tensors() | {"query": rows[:, :4], "key": rows[:, 4:6]}
    check_tensors(case, tensors)
    query, key = functional.rotary_embedding(**tensors, **case.options)
    for output in (query, key):
        dense = output.transpose(1, 2) if tokens_first else output
        assert dense.is_contiguous()


@normed
def test_far_and_expanded_strides(norms):
    case = Case(batch=3, table_batch=3, norms=norms)
    tensors = case.tensors()
    for name, tensor in tensors.items():
        far = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 13), float("nan"))
        far[..., 3 : 3 + tensor.shape[-1]] = tensor
        tensors[name] = far[..., 3 : 3 + tensor.shape[-1]]
    check_tensors(case, tensors)
    tensors = case.tensors()
    tensors["query"] = tensors["query"][:1, :, :1].expand_as(tensors["query"])
    tensors["cos"] = tensors["cos"][:1].expand(3, -1, -1)
    tensors["sin"] = tensors["sin"][:, :1].expand(3, case.tokens, -1)
    check_tensors(case, tensors)


@normed
def test_columns_that_are_not_dense_are_copied(norms):
    case = Case(norms=norms)
    tensors = {n: t.mT.contiguous().mT if t.dim() > 1 else t for n, t in case.tensors().items()}
    assert tensors["query"].stride(-1) > 1 and tensors["cos"].stride(-1) > 1
    check_tensors(case, tensors)
    wide = {n: t.repeat_interleave(2, -1)[..., ::2] for n, t in case.tensors().items()}
    check_tensors(case, wide)


@dtypes
def test_memory_that_begins_anywhere(dtype):
    case = Case(dtype, norms=BOTH)
    for shifted in case.tensors():
        tensors = case.tensors()
        x = tensors[shifted]
        tensors[shifted] = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
        check_tensors(case, tensors)


def test_strided_positions():
    case = Case(positions="batch")
    tensors = case.tensors()
    for positions in (
        torch.randint(11, (2, 10))[:, ::2],
        torch.randint(11, (5, 2)).t(),
        torch.randint(11, (1, 5)),
        torch.randint(11, (1, 5)).expand(2, 5),
    ):
        check_tensors(case, tensors | {"positions": positions})


@normed
@pytest.mark.parametrize("positions", ["", "batch"])
@pytest.mark.parametrize("empty", ["batch", "heads", "key_heads", "tokens", "head_dim"])
def test_empty(empty, positions, norms):
    norms = norms if empty != "key_heads" else norms[:1]
    case = Case(**{empty: 0}, positions=positions, rows=3, norms=norms)
    tensors = {"key": None, **case.tensors()}
    query, key = functional.rotary_embedding(**tensors, **case.options)
    assert query.shape == tensors["query"].shape
    assert (key is None) == (tensors["key"] is None)
    if key is not None and key.numel():  # without heads of the query
        check_tensors(case, case.tensors())
    if norms and empty != "key_heads":  # sums over no rows are 0
        found = outputs_and_gradients(functional.rotary_embedding, case, case.tensors())
        weights = found[-2:] if empty != "heads" else found[-2:-1]
        assert not any(weight.any() for weight in weights)


def test_without_a_batch():
    case = Case(batch=1)
    tensors = case.tensors()
    whole = functional.rotary_embedding(**tensors)
    for name in ("query", "key"):
        tensors[name] = tensors[name][0]
    for one, other in zip(functional.rotary_embedding(**tensors), whole, strict=True):
        assert torch.equal(one, other[0])


@normed
def test_one_token_of_a_decoding_step(norms):
    check(Case(tokens=1, tokens_first=True, positions="batch", norms=norms))


@normed
def test_upstream_gradients_of_any_layout(norms):
    tensors = Case(norms=norms).tensors()
    names = ("query", "query_weight") if norms else ("query",)
    leaves = [tensors[name].requires_grad_() for name in names]
    output, _ = functional.rotary_embedding(**tensors)
    dense = torch.randn(output.shape)
    tokens_first = dense.transpose(1, 2).contiguous().transpose(1, 2)
    for upstream in (dense.mT.contiguous().mT, dense[:1].expand_as(dense), tokens_first):
        found = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
        expected = torch.autograd.grad(output, leaves, upstream.contiguous(), retain_graph=True)
        assert all(map(torch.equal, found, expected))
