"""The norm family inside torch: modules, what a residual is, gradients of gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional
from tests.norm.cases import FLOATS

names = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])

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
    assert torch.equal(module(x, r)[1], r + x)
    for one, other in zip(module(x, None), module(x, torch.zeros_like(r)), strict=True):
        assert torch.equal(one, other)


# ---- without a residual --------------------------------------------------------------------------


@names
@pytest.mark.parametrize("how", ["", "dropout", "scaled"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_residual_out_is_a_tensor_of_its_own(name, how, needs_grad):
    """A write into it, as by `stream += branch`, reaches neither the input nor a gradient."""
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -1e-40, 2.0]).repeat(3, 1)
    x.requires_grad_(needs_grad)
    before, state = x.detach().clone(), torch.get_rng_state()
    more = {
        "": {},
        "dropout": {"dropout_p": 0.5, "training": False},
        "scaled": {"column_scale": torch.ones(6)},
    }[how]
    _, stream = getattr(functional, f"add_{name}")(x, None, 6, **more)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(stream.view(torch.int32), before.view(torch.int32))  # signs of zeros too
    assert stream.is_contiguous() and not stream._is_view()
    assert stream.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    with torch.no_grad():
        stream += 1
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_add_dropout_of_nothing():
    x = torch.randn(3, 8)
    assert functional.add_dropout(x, None, 0.5, training=False) is x
    torch.manual_seed(1)
    kept = functional.add_dropout(x, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(kept, functional.dropout(x, 0.5))


# ---- derivatives --------------------------------------------------------------------------------


@names
def test_the_sum_alone_gives_the_weight_no_gradient(name):
    """None, as with torch's operators, and not zeros, which an optimizer would take for one."""
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, requires_grad=True)
    getattr(functional, f"add_{name}")(x, residual, (8,), weight)[1].sum().backward()
    assert weight.grad is None and x.grad is not None and residual.grad is not None


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
def test_gradient_penalty(dtype, bound):
    x, w = torch.randn(6, 32).to(dtype).requires_grad_(), torch.randn(32).to(dtype).requires_grad_()

    def penalty(norm):
        (g,) = torch.autograd.grad(norm(x, (32,), w).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), (x, w))

    for ours, stock in zip(penalty(functional.rms_norm), penalty(F.rms_norm), strict=True):
        assert ours.dtype == dtype and (ours - stock).abs().max() <= bound * stock.abs().max()


# ---- among other code ----------------------------------------------------------------------------


@names
def test_editing_what_the_backward_needs_raises(name):
    x, r = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y, stream = getattr(functional, f"add_{name}")(x, r, 8)
    stream.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = getattr(functional, f"add_{name}")(x, r, 8)
    y.mul_(3)  # the output is not needed
    (found,) = torch.autograd.grad(y.sum(), x)
    y, _ = getattr(functional, f"add_{name}")(x, r, 8)
    (expected,) = torch.autograd.grad(y.sum(), x, torch.tensor(3.0))
    torch.testing.assert_close(found, expected)


@names
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes_are_torchs_for_every_mix(name, autocast):
    mixes = 0
    for dtype, weight_dtype in [*itertools.product(FLOATS, FLOATS), (torch.float64,) * 2]:
        x, w = torch.randn(2, 8).to(dtype), torch.randn(8).to(weight_dtype)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            ours = getattr(functional, name)(x, (8,), w)
            try:
                stock = getattr(F, name)(x, (8,), w)
            except RuntimeError:  # torch's layer_norm does not take every mix on CPU
                assert ours.dtype == dtype
                continue
        assert ours.dtype == stock.dtype, f"{dtype} with weight {weight_dtype}"
        mixes += 1
    assert mixes >= 4


def test_numbers_in_a_dynamic_graph():
    """dynamic=True makes symbolic floats of eps and of weight_offset's default."""
    first, last = onepass.nn.LayerNorm(16, 1), onepass.nn.RMSNorm(16, 1e-5)

    def function(x, offset):
        return last(functional.rms_norm(first(x), (16,), last.weight, weight_offset=offset))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, offset in ((5, 1.0), (9, 0.25), (9, 0.0)):
        x = torch.randn(rows, 16, requires_grad=True)
        pair = [torch.autograd.grad(f(x, offset).pow(2).sum(), x)[0] for f in (compiled, function)]
        torch.testing.assert_close(*pair)
