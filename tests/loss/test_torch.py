"""With torch: gradcheck, derivatives of any order, opcheck, compile, export, vmap, autocast."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import functional
from tests.loss.cases import (
    OPTIONS,
    make,
    results,
)


def leaves(case):
    return case.input.detach().clone().requires_grad_()


def test_what_is_kept_is_three_numbers_of_a_row():
    saved = []
    case = make(30, 200, weighted=True)
    leaf = leaves(case)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        case.ours(leaf, case.weight)
    own = {leaf.data_ptr(), case.target.data_ptr(), case.weight.data_ptr()}
    assert sum(t.numel() for t in saved if t.data_ptr() not in own) == 3 * 30 + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_place_has_no_effect_under_compile(backend):
    def step(x, target):
        return functional.cross_entropy(x, target, inplace_backward=True)

    case = make(4, 16)
    leaf = leaves(case)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    (gradient,) = torch.autograd.grad(compiled(leaf, case.target), leaf, case.dloss)
    assert torch.equal(leaf, case.input)
    assert torch.equal(gradient, results(case.ours, case)["dinput"])


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(8, 12)
        self.loss = onepass.nn.CrossEntropyLoss(**options)

    def forward(self, x, target):
        return self.loss(self.layer(x), target)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("option", ["mean", "all"])
def test_vmap(option):
    case = make(4, 8, **OPTIONS[option])
    x = torch.stack([case.input, case.input.sin()])
    targets = torch.stack([case.target, case.target.flip(0)])

    def loss(x, target, function=functional.cross_entropy, **options):
        return function(x, target, case.weight, **case.options, **options).sum()

    def torchs(x, target):
        return loss(x, target, onepass.reference.loss.cross_entropy)

    mapped = torch.func.vmap(torch.func.grad(lambda x, t: loss(x, t, inplace_backward=True)))
    expected = torch.func.vmap(torch.func.grad(torchs))(x, targets)
    torch.testing.assert_close(mapped(x, targets), expected)
    torch.testing.assert_close(
        torch.func.vmap(loss)(x, targets), torch.func.vmap(torchs)(x, targets)
    )
    outside = torch.func.grad(lambda x: torch.func.vmap(loss)(x, targets).sum())
    torch.testing.assert_close(outside(x), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_activation_checkpointing(inplace, use_reentrant):
    module, target = Model(inplace_backward=inplace), torch.tensor([3, 11, -100, 0])
    found = []
    for call in (module, lambda *x: checkpoint(module, *x, use_reentrant=use_reentrant)):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        call(x, target).backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_saved_tensors_elsewhere():
    """Hooks give the backward a copy, and it overwrites that copy."""
    case = make(4, 20)
    leaf = leaves(case)
    with torch.autograd.graph.save_on_cpu():
        loss = functional.cross_entropy(leaf * 1.0, case.target, inplace_backward=True)
    loss.backward(case.dloss)
    assert torch.equal(leaf.grad, results(case.ours, case)["dinput"])


def test_copies_of_the_module():
    module = onepass.nn.CrossEntropyLoss(torch.rand(8), softcap=2.0, z_loss=0.1)
    case = make(3, 8)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(case.input, case.target), module(case.input, case.target))
        assert (twin.softcap, twin.z_loss) == (2.0, 0.1)


def test_explain_names_the_kernels():
    leaf, target = torch.randn(64, 64, requires_grad=True), torch.zeros(64, dtype=torch.int64)
    ce = functional.cross_entropy
    text = str(onepass.explain(lambda: ce(leaf, target, label_smoothing=0.1).backward()))
    assert "loss_forward_kernel" in text and "loss_backward_kernel" in text
    assert "cross_entropy (64 x 64, float32, mean, label_smoothing 0.1)" in text
    text = str(onepass.explain(lambda: ce(leaf * 1.0, target, inplace_backward=True).backward()))
    assert "cross_entropy_backward_inplace (64 x 64, float32, mean)" in text
    plain = F.cross_entropy(leaf, target)
    assert "loss" not in str(onepass.explain(lambda: plain + 1))
