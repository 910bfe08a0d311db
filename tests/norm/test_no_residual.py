"""`residual=None`: residual_out is dropout(input), y its norm."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass import functional, numerics

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
names = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


def composed(name, x, weight, p, residual_dtype):
    """The two steps, by functions that have tests of their own."""
    dtype = residual_dtype or x.dtype
    zeros = torch.zeros(x.shape, dtype=dtype)
    stream = functional.add_dropout(x, zeros, p) if p else x.to(dtype)
    return getattr(functional, name)(stream, x.shape[-1:], weight).to(x.dtype), stream


@names
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize(
    "dtype, residual_dtype", [(F32, None), (BF16, None), (BF16, F32), (F64, None)], ids=str
)
def test_values_and_gradients(name, p, dtype, residual_dtype):
    x = torch.randn(5, 24, dtype=dtype, requires_grad=True)
    weight = torch.rand(24, dtype=F64 if dtype is F64 else F32, requires_grad=True)
    upstream = torch.randn(2, 5, 24)

    def ours(name, x, weight, p, residual_dtype):
        more = {"dropout_p": p, "residual_dtype": residual_dtype}
        return getattr(functional, f"add_{name}")(x, None, x.shape[-1:], weight, **more)

    def results(function, *leaves, residual_dtype):
        torch.manual_seed(3)
        found = function(name, *leaves, p, residual_dtype)
        upstreams = [d.to(t.dtype) for d, t in zip(upstream.to(dtype), found, strict=True)]
        return (*(t.detach() for t in found), *torch.autograd.grad(found, leaves, upstreams))

    wide = (t.detach().double().requires_grad_() for t in (x, weight))
    found = results(ours, x, weight, residual_dtype=residual_dtype)
    base = results(composed, x, weight, residual_dtype=residual_dtype)
    ref = results(composed, *wide, residual_dtype=None)
    for mine, right, stock in zip(found, ref, base, strict=True):
        assert mine.dtype == stock.dtype
        numerics.assert_close(mine, right, stock)


@names
@pytest.mark.parametrize("kind", ["", "dropout", "scaled"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_residual_out_is_a_tensor_of_its_own(name, kind, needs_grad):
    """A write into it, as by `stream += branch`, reaches neither the input nor a gradient."""
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -1e-40, 2.0]).repeat(3, 1)
    x.requires_grad_(needs_grad)
    before, state = x.detach().clone(), torch.get_rng_state()
    more = {
        "": {},
        "dropout": {"dropout_p": 0.5, "training": False},
        "scaled": {"column_scale": torch.ones(6)},
    }[kind]
    y, stream = getattr(functional, f"add_{name}")(x, None, 6, **more)
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


@pytest.mark.parametrize("cls", [onepass.nn.AddLayerNorm, onepass.nn.AddRMSNorm])
def test_modules(cls):
    x, module = torch.randn(3, 8), cls(8)
    y, out = module(x, None)
    again, _ = module(torch.zeros_like(x), x)
    assert torch.equal(out, x) and torch.equal(y, again)
