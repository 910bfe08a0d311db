"""What torch promises of writes in place, for every function and module that writes into its
arguments: leaves are refused untouched, and values saved for a gradient are not lost unnoticed."""

import pytest
import torch

import onepass
from onepass import functional
from tests.support.calls import CALLS

FAMILIES = ("functional.", "nn.")
NAMES = [name for name, call in CALLS.items() if call.written and name.startswith(FAMILIES)]
WRITES = [(name, argument) for name in NAMES for argument in CALLS[name].written]
FLOATS = [(name, n) for name, n in WRITES if CALLS[name].tensors()[n].is_floating_point()]
LEAVES = {
    "leaf": lambda leaf: leaf,
    "view": lambda leaf: leaf.view(leaf.shape),
    "one of several views": lambda leaf: leaf.unsqueeze(0).unbind()[0],
}


def loss(x):
    target = torch.arange(len(x)) % x.shape[-1]
    return functional.cross_entropy(x, target, inplace_backward=True)


@pytest.mark.parametrize("view", LEAVES)
@pytest.mark.parametrize("name, argument", FLOATS)
def test_leaves_are_refused(name, argument, view):
    call = CALLS[name]
    given = call.tensors()
    before = given[argument].clone()
    leaf = given[argument].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf|modified inplace|must not require gradients"):
        call.run(**{**given, argument: LEAVES[view](leaf)})
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("view", LEAVES)
def test_leaves_are_refused_before_the_backward(view):
    leaf = torch.randn(6, 40, requires_grad=True)
    for write in (loss, onepass.nn.LayerScale(40, inplace=True)):
        before = leaf.detach().clone()
        with pytest.raises(RuntimeError, match="leaf|modified inplace"):
            write(LEAVES[view](leaf))
        assert torch.equal(leaf, before)


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("name, argument", WRITES)
def test_saved_values_are_not_lost_unnoticed(name, argument, needs_grad):
    """The version of a written tensor moves on, of one without a gradient too."""
    call = CALLS[name]
    given = call.tensors()
    if needs_grad and name.startswith("functional.attention_with_kv_cache"):
        pytest.skip("refuses gradients")
    x = given[argument].requires_grad_() * 1.0 if needs_grad else given[argument]
    factor = torch.ones((), requires_grad=True)
    saved = (factor * x).sum()
    call.run(**{**given, argument: x})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_saved_logits_are_not_lost_unnoticed():
    x = torch.randn(6, 40, requires_grad=True) * 1.0
    factor = torch.ones((), requires_grad=True)
    saved = (factor * x).sum()
    loss(x).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
