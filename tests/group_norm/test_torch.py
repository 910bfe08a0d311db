"""Group norm inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

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
from tests.group_norm.cases import (
    BF16,
    F16,
    F32,
    make,
    orders,
)


def test_only_input_weights_and_statistics_are_kept():
    saved = []
    leaves = [t.requires_grad_() for t in make((2, 8, 5, 6), 2).tensors]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.group_norm(leaves[0], 2, *leaves[1:], activation="silu")
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in leaves]
    assert [t.shape for t in saved[3:]] == [(2, 2)] * 2


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@orders
def test_vmap(last):
    case = make((10, 8, 5, 6), 2, last=last)
    x = case.input.unflatten(0, (5, 2))

    def loss(x, w, b):
        return case.ours(x, w, b).pow(3).sum()

    per_part = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None))
    found = per_part(x, *case.tensors[1:])
    for i in range(5):
        leaves = [t.detach().requires_grad_() for t in (x[i], *case.tensors[1:])]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close([g[i] for g in found], list(expected))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_autocast_leaves_dtypes_as_torch_does(dtype):
    x, w = torch.randn(2, 8, 3).to(dtype), torch.ones(8)
    with torch.autocast("cpu", dtype=BF16):
        found, expected = (f(x, 2, w, w) for f in (functional.group_norm, F.group_norm))
    assert found.dtype is expected.dtype is dtype


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    module, x = onepass.nn.GroupNorm(2, 8, activation="silu"), torch.randn(5, 8, 4)
    found = []
    for call in (module, lambda t: checkpoint(module, t, use_reentrant=use_reentrant)):
        leaf = x.clone().requires_grad_()
        call(leaf).pow(3).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_copies_of_the_module():
    module = onepass.nn.GroupNorm(2, 8, activation="silu", dtype=BF16)
    x = torch.randn(3, 8, 5, dtype=BF16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x)) and twin.activation == "silu"
    assert onepass.nn.GroupNorm(2, 8, device="meta").weight.device.type == "meta"
    torchs = torch.nn.GroupNorm(2, 8)
    module = onepass.nn.GroupNorm(2, 8)
    module.load_state_dict(torchs.state_dict())


def test_explain_names_the_kernels():
    case = make((2, 8, 5, 6), 2, last=True)
    leaves = [t.requires_grad_() for t in case.tensors]
    text = str(onepass.explain(lambda: case.ours(*leaves).sum().backward()))
    assert "group_norm_forward_kernel" in text and "group_norm_backward_kernel" in text
    assert "2 x 8 x 30, 2 groups, channels last, input float32, weight float32, silu" in text
