"""Rotary embedding of tensors of any layout: read in place, results in the same memory order."""

import pytest
import torch

from onepass import functional
from tests.emulator.executors import everywhere
from tests.rotary.cases import BOTH, Case, check, check_tensors, outputs_and_gradients
from tests.support.dtypes import BF16, F32, F64

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
