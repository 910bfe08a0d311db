"""The norm family inside torch: modules, gradients of gradients, what is saved."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional
from tests.norm.cases import kinds, make

# ---- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("keywords", [{}, {"elementwise_affine": False}, {"eps": 1e-3}])
def test_modules_are_torchs(name, keywords):
    stock = getattr(torch.nn, name)((3, 8), **keywords)
    ours = getattr(onepass.nn, name)((3, 8), **keywords)
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(ours) == repr(stock)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(ours(x), stock(x))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours)
        assert torch.equal(twin(x), ours(x))


def test_layer_norm_module_without_bias():
    ours = onepass.nn.LayerNorm(8, bias=False)
    assert list(ours.state_dict()) == ["weight"]
    x = torch.randn(5, 8)
    torch.testing.assert_close(ours(x), F.layer_norm(x, (8,), ours.weight))


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


@kinds
def test_saved_for_backward(rms, residual):
    """One tensor of rows, the weight, one or two statistics per row and a seed: no mask."""
    saved = []
    case = make(rms, 100, 64, residual=residual)
    tensors = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}
    case.dropout_p = 0.1 if residual else 0.0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = case.ours(**tensors)
    own = {id(t) for t in tensors.values()} | {t.data_ptr() for t in (*tensors.values(), *outputs)}
    extra = sum(t.numel() for t in saved if id(t) not in own and t.data_ptr() not in own)
    assert extra <= 2 * 100 + 2
