"""Tensors with the negative bit: read as torch reads them, and never half written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onepass
from onepass import _negative, functional
from tests.attention_decode.cases import int32

REFUSED = "must not be a negative view, it is written in place"


def view_of(tensor: Tensor) -> Tensor:
    """The same numbers, with the bit."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    return view


def append(**changes) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    new = torch.randn(1, 2, 1, 8)
    cos = torch.randn(9, 4)
    tensors = dict(
        query=torch.randn(1, 4, 1, 8), k_cache=torch.randn(1, 2, 9, 8),
        v_cache=torch.randn(1, 2, 9, 8), key=new, value=new + 1, rotary_cos=cos, rotary_sin=cos - 1,
        alibi_slopes=torch.randn(4), sinks=torch.randn(4),
    )  # fmt: skip
    tensors |= {name: change(tensors[name]) for name, change in changes.items()}
    used = int32([3])
    return functional.attention_with_kv_cache(**tensors, cache_seqlens=used), tensors


READ = ("query", "key", "value", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks")


@pytest.mark.parametrize("names", [*((n,) for n in READ), READ], ids="+".join)
def test_what_an_append_reads_is_resolved(names):
    expected, plain = append()
    output, tensors = append(**dict.fromkeys(names, view_of))
    assert torch.equal(output, expected)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(tensors[cache], plain[cache])


@pytest.mark.parametrize("names", [("k_cache",), ("v_cache",), ("k_cache", "v_cache")])
def test_a_cache_to_be_written_is_refused_before_a_row_is(names):
    caches = {}

    def kept(name, change):
        def keep(tensor):
            caches[name] = (change(tensor), tensor.clone())
            return caches[name][0]

        return keep

    changes = {n: kept(n, view_of if n in names else torch.clone) for n in ("k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match=f"attention_decode_append: {names[0]} {REFUSED}"):
        append(**changes)
    for name, (tensor, before) in caches.items():
        assert torch.equal(tensor, before), name


def test_a_cache_that_is_read_is_resolved():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    call = functional.attention_with_kv_cache
    assert torch.equal(call(view_of(q), view_of(k), view_of(v)), call(q, k, v))


def test_operators_that_read_resolve():
    x, w = torch.randn(2, 4, 6, 8), torch.randn(8)
    sdpa = functional.scaled_dot_product_attention
    bias = torch.randn(2, 4, 6, 6)
    assert torch.equal(sdpa(view_of(x), view_of(x), view_of(x), view_of(bias)), sdpa(x, x, x, bias))
    assert torch.equal(
        functional.layer_norm(view_of(x), (8,), view_of(w), view_of(w)),
        functional.layer_norm(x, (8,), w, w),
    )
    weight, b = torch.randn(5, 8), torch.randn(5)
    assert torch.equal(
        functional.linear(view_of(x), view_of(weight), view_of(b)), functional.linear(x, weight, b)
    )
    gradients = [view_of(w), w]
    assert torch.equal(
        torch.ops.onepass.gradient_norm(gradients), torch.ops.onepass.gradient_norm([w, w])
    )


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
