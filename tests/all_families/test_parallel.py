"""Which calls spread over threads: those with enough work for each, counted by regions entered."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass import _C
from tests.attention.cases import int32
from tests.support.calls import flat

OPS = torch.ops.onepass
F32, F64 = torch.float32, torch.float64


def norm(rows, residual=None):
    x, w = torch.randn(rows, 64), torch.ones(64)
    return lambda: OPS.norm_forward(
        x, residual, w, w, None, [64], 0, 1e-5, 0.0, 0.0, None, None, True
    )


def norm_backward(rows):
    x, w, s = torch.randn(rows, 64), torch.ones(64), torch.ones(rows)
    return lambda: OPS.norm_backward(
        x, None, x, w, w, None, s, s, [64], 0, 0.0, 0.0, None, None, 15
    )


def modulated_norm(rows):
    x, scale = torch.randn(8, rows // 8, 64), torch.ones(8, 64)
    rest = ([64], 0, 1e-5, None, True)
    return lambda: OPS.modulated_norm_forward(x, scale, scale, None, None, *rest)


def modulated_norm_backward(rows):
    x, scale, s = torch.randn(8, rows // 8, 64), torch.ones(8, 64), torch.ones(8, rows // 8)
    rest = (s, s, [64], 0, None, None, 13)
    return lambda: OPS.modulated_norm_backward(x, None, x, scale, scale, None, None, *rest)


def dropout(rows):
    x, seed = torch.randn(rows, 64), torch.tensor([3, 0])
    return lambda: OPS.dropout_forward(x, None, seed, 0.5, None)


def add(rows):
    x = torch.randn(rows, 64)
    return lambda: OPS.dropout_forward(x, x, None, 0.0, None)


def branch(rows):
    x, factors = torch.randn(8, rows // 8, 64), torch.ones(8)
    return lambda: OPS.branch_forward(x, x, x[0, 0], factors, None, 0.0, None)


def branch_backward(rows):
    x, factors = torch.randn(8, rows // 8, 64), torch.ones(8)
    return lambda: OPS.branch_backward(x, x, x[0, 0], factors, None, 0.0, None, 3)


def rotary(tokens):
    x, table = torch.randn(1, 2, tokens, 32), torch.randn(tokens, 32)
    return lambda: OPS.rotary_forward(x, x, table, table, None, 32, False, False, False, False)


def rotary_backward(tokens):
    x, table, weight = torch.randn(1, 2, tokens, 32), torch.randn(tokens, 32), torch.ones(32)
    rest = (None, 32, False, False, False, weight, weight, 1e-6, 0.0, 15)
    return lambda: OPS.rotary_backward(x, x, x, x, table, table, *rest)


def gate(rows):
    x = torch.randn(rows, 64)
    return lambda: OPS.gate_forward(x, x, 2, False)


def gate_backward(rows):
    x = torch.randn(rows, 64)
    return lambda: OPS.gate_backward(x, x, x, 2, False, 3)


def group_norm(pixels):
    x = torch.randn(1, 16, pixels)
    return lambda: OPS.group_norm_forward(x, None, None, 4, 1e-5, 2, False, None, False)


def group_norm_backward(pixels):
    x, saved = torch.randn(1, 16, pixels), torch.ones(1, 4)
    rest = None, None, saved, saved, 4, 2, False, 7
    return lambda: OPS.group_norm_backward(x, x, *rest)


def causal_conv(tokens):
    x, weight = torch.randn(1, 16, tokens), torch.randn(16, 4)
    return lambda: OPS.causal_conv1d_forward(x, weight, None, None, None, True, False)


def causal_conv_backward(tokens):
    x, weight = torch.randn(1, 16, tokens), torch.randn(16, 4)
    return lambda: OPS.causal_conv1d_backward(x, x, weight, None, None, None, True, False, 15)


def loss(rows):
    x, target = torch.randn(rows, 64), torch.zeros(rows, dtype=torch.int64)
    return lambda: OPS.loss_forward(x, target, None, -100, 0.0, 0.0, 1, 0.0, None)


def loss_backward(rows):
    x, target = torch.randn(rows, 64), torch.zeros(rows, dtype=torch.int64)
    saved = torch.ones(3, rows), torch.ones(())
    upstream = torch.ones(()), *saved
    return lambda: OPS.loss_backward(x, target, None, -100, 0.0, 0.0, 1, *upstream)


def linear_loss(rows):
    x, w, target = torch.randn(rows, 64), torch.randn(64, 64), torch.zeros(rows).long()
    rest = (target, None, None, -100, 0.0, 0.0, 0.0, torch.ones(rows), 7)
    return lambda: OPS.linear_loss(x, w, *rest)


def linear(rows):
    x, w = torch.randn(rows, 64), torch.randn(64, 64)
    return lambda: OPS.linear_forward(x, w, None, None)


def linear_backward(rows):
    x, w = torch.randn(rows, 64), torch.randn(64, 64)
    return lambda: OPS.linear_backward(x, x, w, F32, F32, F32)


def linear_epilogue_backward(rows):
    x, seed = torch.randn(rows, 64), torch.tensor([3, 0])
    return lambda: OPS.linear_epilogue_backward(x, x, seed, 0.5, 3, None)


def attention(queries, dtype=torch.float32):
    q = torch.randn(2, 4, queries, 16, dtype=dtype)
    return lambda: OPS.attention_forward(q, q, q, scale=0.25)


def attention_backward(queries, dtype=torch.float32):
    q = torch.randn(2, 4, queries, 16, dtype=dtype)
    output, lse, rest = OPS.attention_forward(q, q, q, scale=0.25)
    return lambda: OPS.attention_backward(
        q, None, q, q, q, output, lse, rest, scale=0.25, grad_mask=7
    )


def plain(queries):
    return attention(queries, F64)


def plain_backward(queries):
    return attention_backward(queries, F64)


def decode(keys):
    q, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 4, keys, 16)
    return lambda: OPS.attention_decode(
        q, cache, cache, cache_seqlens=int32([keys] * 2), scale=0.25
    )


def gradients(elements):
    return [torch.randn(elements), torch.randn(4)]


def gradient_norm(elements):
    list_ = gradients(elements)
    return lambda: OPS.gradient_norm(list_)


def clip(elements):
    list_ = gradients(elements)
    return lambda: OPS.clip_grad_norm(list_, 1e-3, 2.0, False)


def optimizer(name):
    def make(elements):
        parameters = [torch.nn.Parameter(g) for g in gradients(elements)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made = getattr(onepass.optim, name)(parameters, lr=1e-3)
        made.step()  # states are there from now on
        return made.step

    make.__name__ = name
    return make


# operator, a size that one thread does faster, a size with work for many
CALLS = [
    (norm, 16, 16384), (norm_backward, 64, 16384), (dropout, 16, 16384), (add, 16, 16384),
    (modulated_norm, 16, 16384), (modulated_norm_backward, 64, 16384),
    (branch, 16, 16384), (branch_backward, 64, 16384),
    (rotary, 16, 16384), (rotary_backward, 16, 16384),
    (gate, 16, 16384), (gate_backward, 16, 16384),
    (group_norm, 16, 65536), (group_norm_backward, 16, 65536),
    (causal_conv, 16, 65536), (causal_conv_backward, 16, 65536),
    (loss, 16, 16384), (loss_backward, 16, 16384), (linear_loss, 4, 4096),
    (linear, 4, 4096), (linear_backward, 4, 4096), (linear_epilogue_backward, 32, 65536),
    (attention, 4, 256), (attention_backward, 4, 256), (plain, 2, 64), (plain_backward, 2, 64),
    (decode, 16, 16384), (gradient_norm, 4096, 1 << 20), (clip, 4096, 1 << 20),
    *((optimizer(name), 2048, 1 << 20) for name in ("AdamW", "Adam", "SGD", "Lion")),
]  # fmt: skip


def regions(call) -> int:
    before = _C.parallel_regions()
    call()
    return _C.parallel_regions() - before


@pytest.mark.parametrize(("make", "small", "large"), CALLS, ids=lambda v: getattr(v, "__name__", v))
def test_threads_have_enough_to_do(make, small, large):
    """And their number changes no bit."""
    torch.set_num_threads(2)
    assert regions(make(small)) == 0
    found = []
    for threads in (1, 2, 3):
        torch.manual_seed(0)
        call = make(large)
        torch.set_num_threads(threads)
        assert bool(regions(lambda: found.append(flat(call())))) == (threads > 1)
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            assert torch.equal(one, expected)


def test_a_step_of_nn_linear_4_4_enters_no_region():
    torch.set_num_threads(2)
    model = torch.nn.Linear(4, 4)
    made = onepass.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    assert [regions(made.step) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("make", "small", "large"), CALLS, ids=lambda v: getattr(v, "__name__", v))
def test_the_plan_says_how_many(make, small, large):
    torch.set_num_threads(2)
    for size, threads in ((small, 1), (large, 2)):
        call = make(size)
        _C.take()
        _C.record(True)
        try:
            call()
        finally:
            _C.record(False)
        assert max(record["threads"] for record in _C.take()) == threads


def test_many_short_tensors_are_counted_by_their_elements():
    torch.set_num_threads(2)
    short = [torch.ones(4) for _ in range(200)]
    assert regions(lambda: OPS.gradient_norm(short)) == 0
