"""Dtypes under autocast: of results torch's, of gradients those of what they belong to."""

import pytest
import torch

from tests.support.calls import CALLS

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = [n for n, call in CALLS.items() if call.stock and call.differentiable and "nn." not in n]


@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_are_torchs(name, dtype, cast):
    call = CALLS[name]
    given = call.typed(dtype)
    if dtype is not F64:  # torch's loss wants the weights of classes in the dtype of the logits
        given |= {n: given[n].to(dtype) for n in call.constant}
    leaves = {n: given[n].requires_grad_() for n in call.wanted(given)}
    with torch.autocast("cpu", dtype=cast):
        found, stock = call.run(**given | leaves), call.stock(**given | leaves)
    assert [y.dtype for y in found] == [y.dtype for y in stock]
    gradients = torch.autograd.grad([y.sum() for y in found], list(leaves.values()))
    assert [g.dtype for g in gradients] == [dtype] * len(leaves)
