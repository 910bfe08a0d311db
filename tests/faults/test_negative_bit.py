"""Tensors with the negative bit are never half written; test_input_classes.py reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onepass
from onepass import _negative, functional

REFUSED = "must not be a negative view, it is written in place"


def view_of(tensor: Tensor) -> Tensor:
    """The same numbers, with the bit."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    return view


def test_a_cache_to_be_written_is_refused_before_a_row_is():
    new, caches = torch.randn(1, 2, 1, 8), {n: torch.randn(1, 2, 9, 8) for n in ("k", "v")}
    caches["v"] = view_of(caches["v"])
    before = [cache.clone() for cache in caches.values()]
    query, used = torch.randn(1, 4, 1, 8), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"attention_decode_append: v_cache {REFUSED}"):
        functional.attention_with_kv_cache(query, *caches.values(), new, new, cache_seqlens=used)
    assert all(map(torch.equal, caches.values(), before))


def test_a_step_of_negative_views_is_refused_whole():
    """Views of parameters, which it writes; gradients are resolved (test_optim_loads.py)."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    parameters[1] = torch.nn.Parameter(view_of(torch.ones(8)))
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    optimizer = onepass.optim.AdamW(parameters)
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    assert all(torch.equal(parameter, torch.ones(8)) for parameter in parameters)


def test_clipping_negative_views_is_refused_whole():
    gradients = [torch.ones(8), view_of(torch.ones(8))]
    with pytest.raises(RuntimeError, match=f"clip_grad_norm: gradients {REFUSED}"):
        torch.ops.onepass.clip_grad_norm(gradients, 0.1, 2.0, False)
    assert all(torch.equal(gradient, torch.ones(8)) for gradient in gradients)


def test_every_operator_that_writes_has_such_a_kernel():
    writing = {
        schema.name.removeprefix("onepass::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("onepass::")
        and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    }
    assert writing == _negative.registered
