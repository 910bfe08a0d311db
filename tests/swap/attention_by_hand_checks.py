"""Checks of modules that compute attention by hand."""

from __future__ import annotations

import copy

import torch

import onepass
from onepass import numerics
from tests.swap import attention_by_hand as cases


def swapped(cls, **options):
    """(stock, swapped), with equal parameters."""
    stock = cls(**options)
    ours = copy.deepcopy(stock)
    report = onepass.swap(ours, kinds=("attention",))
    assert [entry["name"] for entry in report.swapped] == [""], report
    return stock, ours


def tokens(batch: int = 4, dtype=torch.float32):
    return torch.randn(batch, cases.TOKENS, cases.WIDTH, dtype=dtype)


def outcome(module, x, **autocast) -> dict[str, torch.Tensor]:
    """Output and gradients for the same upstream gradient."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        y = module(x)
    named = dict(module.named_parameters())
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [x, *named.values()], upstream, allow_unused=True)
    names = ["dx", *(f"d {name}" for name in named)]
    found = {"output": y.detach(), **dict(zip(names, gradients, strict=True))}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_same(stock, ours, inputs, **autocast):
    """Draws are judged together."""
    double = copy.deepcopy(stock).double()
    refs = [outcome(double, x.double()) for x in inputs]
    bases = [outcome(stock, x, **autocast) for x in inputs]
    found = [outcome(ours, x, **autocast) for x in inputs]
    for name in refs[0]:
        ref, base, mine = ([tensors[name] for tensors in side] for side in (refs, bases, found))
        assert mine[0].dtype is base[0].dtype, name
        assert mine[0].stride() == base[0].stride(), name
        numerics.assert_close(mine, ref, base, name)
