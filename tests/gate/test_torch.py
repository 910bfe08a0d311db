"""Gated activations inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

from __future__ import annotations

import copy
import pickle

import torch
import torch._dynamo.testing
import torch.nn.functional as F

import onepass
from onepass import functional, reference
from tests.gate.cases import make
from tests.support.dtypes import BF16, F64


def test_only_the_factors_are_kept():
    saved = []
    leaves = [t.requires_grad_() for t in make(30, 40).factors]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.silu_mul(*leaves)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in leaves]


def test_copies_of_the_module():
    module = onepass.nn.GatedMLP(8, 24, "gelu", bias=True, dtype=BF16)
    x = torch.randn(3, 8, dtype=BF16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x)) and twin.activation == "gelu"
    assert onepass.nn.GatedMLP(8, 24, device="meta").gate_proj.weight.device.type == "meta"


def test_explain_names_the_kernels():
    gate, up = (t.requires_grad_() for t in make(64, 64).factors)
    text = str(onepass.explain(lambda: functional.gelu_mul(gate, up).sum().backward()))
    assert "gate_forward_kernel" in text and "gate_backward_kernel" in text
    assert "gelu of 64 x 64, contiguous, gate float32, up float32" in text
    text = str(onepass.explain(functional.silu_mul, gate.detach()))
    assert "silu of 64 x 32, halves of one tensor, gate float32" in text


def test_the_reference_is_torchs():
    x = torch.randn(50, dtype=F64)
    found = {name: f(x) for name, f in reference.gate.ACTIVATIONS.items()}
    expected = {
        "relu": x.clamp(min=0), "silu": x / (1 + (-x).exp()),
        "gelu": x * torch.distributions.Normal(0, 1).cdf(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"), "sigmoid": 1 / (1 + (-x).exp()),
        "relu2": x.clamp(min=0) ** 2, "quick_gelu": x / (1 + (-1.702 * x).exp()),
    }  # fmt: skip
    torch.testing.assert_close(found, expected)
