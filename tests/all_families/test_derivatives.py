"""Derivatives of every operator: against difference quotients, of one argument, of any order."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support.calls import CALLS, SAMPLES
from tests.support.results import bits

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Modules of several operators have the derivatives of these.
NAMES = [n for n, call in SAMPLES.items() if not (call.composed and n.startswith("nn."))]
samples = pytest.mark.parametrize("name", NAMES)
FEWER = [name for name in NAMES if name in CALLS or name.startswith("attention")]


def differentiable(call, dtype=F64, but=()):
    """(a function of the tensors that get a gradient, and these)"""
    given = call.typed(dtype)
    names = [name for name in call.wanted(given) if name not in but]

    def function(*tensors):
        return tuple(call.results(given | dict(zip(names, tensors, strict=True))))

    return function, [given[name].requires_grad_() for name in names], names


@samples
def test_gradcheck(name):
    """First and second, through all results; slopes are float32, too coarse for a quotient."""
    function, leaves, _ = differentiable(SAMPLES[name], but=("alibi_slopes",))

    def together(*leaves):
        return torch.cat([y.flatten() for y in function(*leaves)])

    assert gradcheck(together, leaves, fast_mode=True)
    assert gradgradcheck(lambda *leaves: together(*leaves) ** 2, leaves, fast_mode=True)


@pytest.mark.parametrize("name", FEWER)
def test_third_derivatives(name):
    function, leaves, _ = differentiable(SAMPLES[name], but=("alibi_slopes",))

    def gradients(*leaves):
        value = sum(y.pow(3).sum() for y in function(*leaves) if y.requires_grad)
        return torch.autograd.grad(value, leaves, create_graph=True)

    assert gradgradcheck(gradients, leaves, fast_mode=True)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@samples
def test_gradients_are_the_same_whatever_is_asked_for(name, dtype):
    """To the bit: by a second backward, with create_graph=True, and of each argument alone."""
    call = SAMPLES[name]
    function, leaves, names = differentiable(call, dtype)
    outputs = function(*leaves)
    upstream = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) for y in outputs]
    expected = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    for one, other in zip(torch.autograd.grad(outputs, leaves, upstream), expected, strict=True):
        assert torch.equal(bits(one), bits(other))
    trained = [one.clone().requires_grad_() for one in upstream]
    again = torch.autograd.grad(function(*leaves), leaves, trained, create_graph=True)
    for one, other, leaf in zip(again, expected, leaves, strict=True):
        assert one.requires_grad and one.dtype is leaf.dtype and one.shape == leaf.shape
        if call.composed:
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(bits(one), bits(other))
    for name, gradient in zip(names, expected, strict=True):
        alone = [t.detach().requires_grad_(n == name) for n, t in zip(names, leaves, strict=True)]
        pairs = zip(function(*alone), upstream, strict=True)
        of, weights = zip(*((y, u) for y, u in pairs if y.requires_grad), strict=True)
        (found,) = torch.autograd.grad(of, alone[names.index(name)], weights)
        assert torch.equal(bits(found), bits(gradient)), name


def several(name: str) -> bool:
    call = SAMPLES[name]
    return len(call.results(call.tensors())) > 1


@pytest.mark.parametrize("name", [name for name in NAMES if several(name)])
def test_a_result_that_nobody_uses(name):
    """Its gradient is not given to the backward, which takes it for zeros."""
    function, leaves, _ = differentiable(SAMPLES[name], but=("alibi_slopes",))
    outputs = function(*leaves)
    for used in range(len(outputs)):
        upstream = [y.detach() * (number == used) for number, y in enumerate(outputs)]
        options = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(outputs[used], leaves, upstream[used], **options)
        expected = torch.autograd.grad(outputs, leaves, upstream, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.zeros_like(other) if one is None else one, other)
        if name in FEWER:

            def one(*leaves, used=used):
                return function(*leaves)[used] ** 2

            assert gradgradcheck(one, leaves, fast_mode=True)
