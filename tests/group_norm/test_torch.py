"""Group norm inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

from __future__ import annotations

import copy
import pickle

import torch
import torch._dynamo.testing

import onepass
from onepass import functional
from tests.group_norm.cases import (
    BF16,
    make,
)


def test_only_input_weights_and_statistics_are_kept():
    saved = []
    leaves = [t.requires_grad_() for t in make((2, 8, 5, 6), 2).tensors]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.group_norm(leaves[0], 2, *leaves[1:], activation="silu")
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in leaves]
    assert [t.shape for t in saved[3:]] == [(2, 2)] * 2


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
