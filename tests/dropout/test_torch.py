"""Dropout's rounding, in-place calls and shared storage, beside torch's own dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, reference
from tests.support.seeds import drawn_seed

functions = pytest.mark.parametrize("function", [functional.dropout, F.dropout])


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.77])
def test_16_bit_results_are_rounded_once(dtype, p):
    """The scale stays in float32. torch rounds it to the tensor's dtype: 0.16 % at p = 0.1,
    which a bound from torch's own error does not see."""
    x = torch.randn(10_007).to(dtype)  # no multiple of a vector or a block
    factor = reference.dropout.keep_scale(drawn_seed(5), x.numel(), p)
    torch.manual_seed(5)
    assert torch.equal(functional.dropout(x, p), (x.float() * factor).to(dtype))
    torch.manual_seed(5)
    residual = torch.zeros(x.shape)
    assert torch.equal(functional.add_dropout(x, residual, p), x.float() * factor)


# Ours must pass the same test as torch's.


@functions
def test_in_place_on_a_strided_view_writes_the_view_alone(function):
    x = torch.ones(3, 8)
    view = x[:, ::2]
    assert function(view, 1.0, True, True) is view
    assert torch.equal(x[:, ::2], torch.zeros(3, 4)) and torch.equal(x[:, 1::2], torch.ones(3, 4))


@functions
def test_in_place_on_an_expanded_tensor_is_refused(function):
    x = torch.ones(1, 4).expand(3, 4)
    with pytest.raises(RuntimeError):
        function(x, 0.5, True, True)
    assert torch.equal(x, torch.ones(3, 4))


@functions
@pytest.mark.parametrize("p, training", [(0.5, False), (0.5, True), (1.0, True)])
def test_in_place_on_a_leaf_that_requires_grad(function, p, training):
    x = torch.ones(3, requires_grad=True)
    if training:
        with pytest.raises(RuntimeError, match="leaf Variable"):
            function(x, p, training, True)
        assert torch.equal(x, torch.ones(3))
    else:
        assert function(x, p, training, True) is x


@functions
def test_in_place_on_a_view_of_a_hidden_tensor_reaches_its_gradient(function):
    leaf = torch.ones(4, 4, requires_grad=True)
    hidden = leaf * 2
    function(hidden[1], 1.0, True, True)
    hidden.sum().backward()
    expected = torch.full((4, 4), 2.0)
    expected[1] = 0
    assert torch.equal(leaf.grad, expected)


@functions
def test_in_place_on_what_a_backward_needs_raises(function):
    hidden = (torch.randn(100, requires_grad=True) * 1).exp()  # exp saves its output
    y = function(hidden, 0.5, True, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_share_no_storage_with_the_upstream_gradient():
    x, r = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    g = torch.randn(4, 8)
    functional.add_dropout(x, r, 0.5).backward(g)
    assert r.grad.data_ptr() != g.data_ptr() and x.grad.data_ptr() != g.data_ptr()
    assert torch.equal(r.grad, g)


@pytest.mark.parametrize("cls", [onepass.nn.Dropout, torch.nn.Dropout])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "format, shape",
    [(torch.channels_last, (2, 3, 4, 5)), (torch.channels_last_3d, (2, 3, 4, 5, 6))],
    ids=["4-D", "5-D"],
)
def test_modules_keep_channels_last(cls, inplace, format, shape):
    leaf = torch.randn(shape).to(memory_format=format).requires_grad_()
    x = leaf * 1
    module = cls(0.5, inplace)
    y = module(x)
    assert y.is_contiguous(memory_format=format) and not y.is_contiguous()
    assert (y is x) == inplace
    y.sum().backward()
    assert leaf.grad.is_contiguous(memory_format=format)
    kept = y != 0
    assert torch.equal(leaf.grad[kept], (y / leaf)[kept].round()) and not leaf.grad[~kept].any()
    assert module.eval()(leaf) is leaf
    compiled = torch.compile(cls(0.5), backend="eager", fullgraph=True)
    assert compiled(leaf).is_contiguous(memory_format=format)


def test_vmap_of_samples_that_are_not_contiguous():
    model = onepass.nn.Dropout(0.5)
    x = torch.ones(3, 2, 4, 5, 6).transpose(2, 3)
    y = torch.vmap(model, randomness="different")(x)
    assert y.shape == x.shape and 0 < int((y == 0).sum()) < y.numel()
