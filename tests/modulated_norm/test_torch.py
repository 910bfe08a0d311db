"""Modulated norms inside torch: derivatives, fakes, compile, export, vmap, autocast, modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing

import onepass
from onepass import functional
from tests.modulated_norm.cases import (
    BF16,
    F16,
    F32,
    make,
)


def call_of(case):
    """A function of the case's tensors in their order, and these."""
    names = list(case.tensors)
    return lambda *tensors: case.ours(**dict(zip(names, tensors, strict=True))), [
        case.tensors[name].requires_grad_() for name in names
    ]


def test_what_is_kept():
    """The sum, the branch, scale, shift, gate and statistics are kept, but no normalised rows."""
    saved = []
    function, leaves = call_of(make(False, 2, 30, 40, form="gated"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, h = function(*leaves)
    sizes = sorted(t.numel() for t in saved)
    assert sizes == sorted([h.numel(), h.numel(), 80, 80, 80, 60, 60])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16], ids=str)
def test_dtypes_under_autocast_are_the_norms(dtype, scale):
    case = make(False, 2, 3, 8, dtype, form="gated", scale_dtype=scale)
    with torch.autocast("cpu", dtype=BF16):
        y, h = case.ours(**case.tensors)
        plain = functional.layer_norm(case.tensors["input"], 8)
    assert y.dtype == plain.dtype and h.dtype == dtype


def test_copies_of_the_module():
    module = onepass.nn.ModulatedLayerNorm((8,), eps=0.5)
    x, scale = torch.randn(2, 3, 8), torch.randn(2, 8)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, scale), module(x, scale)) and twin.eps == 0.5


def test_explain_names_the_kernels():
    case = make(False, 2, 64, 64, form="gated")
    function, leaves = call_of(case)
    text = str(onepass.explain(lambda: sum(t.sum() for t in function(*leaves)).backward()))
    assert "modulated_layer_norm (128 x 64" in text and "norm_forward_kernel" in text
    assert "modulated_layer_norm_backward (128 x 64" in text and "norm_backward_kernel" in text
    assert "a scale for 64 rows, gate float32" in text
