"""The norm family inside torch: modules, gradients of gradients, what is saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional

# ---- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_add_modules(name):
    module = getattr(onepass.nn, name)(16, dropout_p=0.5, residual_dtype=torch.float32)
    assert list(module.state_dict()) == list(getattr(torch.nn, name[3:])(16).state_dict())
    assert "dropout_p=0.5" in repr(module)
    x, r = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    torch.manual_seed(1)
    y, stream = module(x, r)
    assert y.dtype is torch.bfloat16 and stream.dtype is torch.float32
    assert ((stream - r) == 0).any() and not torch.equal(stream, r)
    module.eval()
    _, stream = module(x, r)
    assert torch.equal(stream, r + x)


# ---- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_sum_alone_gives_the_weight_no_gradient(kind):
    """None, as with torch's operators, and not zeros, which an optimizer would take for one."""
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, requires_grad=True)
    _, total = getattr(functional, f"add_{kind}_norm")(x, residual, (8,), weight)
    total.sum().backward()
    assert weight.grad is None and x.grad is not None and residual.grad is not None


def test_gradient_penalty_in_float32_and_16_bit():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 32, dtype=dtype, requires_grad=True)
        w = torch.randn(32, dtype=dtype, requires_grad=True)

        def penalty(norm, x=x, w=w):
            (g,) = torch.autograd.grad(norm(x, (32,), w).pow(2).sum(), x, create_graph=True)
            return torch.autograd.grad(g.pow(2).sum(), (x, w))

        for ours, stock in zip(penalty(functional.rms_norm), penalty(F.rms_norm), strict=True):
            assert ours.dtype == dtype
            scale = stock.abs().max()
            assert (ours - stock).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1) * scale
