"""The linear family under torch.func: samples, gradients per sample, functional calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import onepass
from onepass import _dispatch_log, functional, numerics


def held(function, *tensors) -> None:
    """function(linear, *tensors) is as exact with ours as with torch's."""
    base = function(F.linear, *tensors)
    ref = function(F.linear, *(t.double() for t in tensors))
    numerics.assert_close(function(functional.linear, *tensors), ref, base)


def test_vmap():
    x, w, b = torch.randn(6, 9, 20), torch.randn(6, 16, 20), torch.randn(6, 16)
    vmap = torch.func.vmap
    held(lambda f, x, w, b: vmap(f, (0, None, None))(x, w, b), x, w[0], b[0])
    held(lambda f, x, w, b: vmap(f, (1, None, None), 1)(x, w, b), x, w[0], b[0])
    held(lambda f, x, w, b: vmap(f)(x, w, b), x, w, b)  # an ensemble
    held(lambda f, x, w, b: vmap(f, (None, 0, 0))(x, w, b), x[0], w, b)
    held(lambda f, x, w, b: vmap(f, (None, None, 0))(x, w, b), x[0], w[0], b)


def test_samples_are_rows_of_one_product():
    """If the weight is shared, with the same bits. Otherwise each sample is a call."""
    x, w, b = torch.randn(6, 9, 20, requires_grad=True), torch.randn(16, 20), torch.randn(16)
    residual = torch.randn(9, 6, 16)
    epilogue = {"activation": "silu"}

    def calls_of(function) -> int:
        with _dispatch_log.record() as calls:
            function()
        return len(calls)

    def both(x, r=None):
        return functional.linear(x, w, b, residual=r, **epilogue)

    for mapped, whole in (
        (lambda: torch.vmap(functional.linear, (0, None, None))(x, w, b),
         lambda: functional.linear(x, w, b)),
        (lambda: torch.vmap(both, (1, 0), 1)(x, residual),
         lambda: both(x, residual.transpose(0, 1))),
        (lambda: torch.vmap(lambda x: both(x, residual[:, 0]))(x),
         lambda: both(x, residual[:, 0].expand(6, 9, 16))),
        (lambda: torch.vmap(torch.vmap(both))(x), lambda: both(x)),
        (lambda: torch.autograd.grad(torch.vmap(both)(x).sum(), x)[0],
         lambda: torch.autograd.grad(both(x).sum(), x)[0]),
    ):  # fmt: skip
        assert torch.equal(mapped(), whole()) and calls_of(mapped) == calls_of(whole)
    assert calls_of(lambda: torch.vmap(functional.linear)(x, w.expand(6, 16, 20))) == 6
    dropped = torch.vmap(
        lambda x: functional.linear(x, w, dropout_p=0.5), randomness="same"
    )(x.detach().abs() + 1)  # fmt: skip
    assert all(torch.equal(one == 0, dropped[0] == 0) for one in dropped)


def test_gradients_per_sample():
    x, w = torch.randn(6, 9, 20), torch.randn(16, 20)

    def per_sample(linear, x, w):
        gradient = torch.func.grad(lambda w, x: linear(x, w).pow(2).sum())
        return torch.func.vmap(gradient, (None, 0))(w, x)

    held(per_sample, x, w)
    held(lambda f, x, w: torch.func.jacrev(f, 1)(x, w), x[0, :3], w)
    held(lambda f, x, w: torch.func.vjp(f, x, w)[1](torch.ones(9, 16, dtype=x.dtype))[0], x[0], w)


def test_functional_call():
    module, x = onepass.nn.Linear(8, 5), torch.randn(4, 8)
    other = {"weight": torch.randn(5, 8), "bias": torch.randn(5)}
    found = torch.func.functional_call(module, other, (x,))
    assert torch.equal(found, functional.linear(x, **other))

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x,)).pow(2).sum()

    gradients = torch.func.grad(loss)(other)
    expected = torch.func.grad(lambda p: F.linear(x, **p).pow(2).sum())(other)
    torch.testing.assert_close(gradients, expected)
