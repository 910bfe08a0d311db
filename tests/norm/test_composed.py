"""The norm family among other code: several norms in one compiled graph, many rows, aliased and
edited tensors, torch's dtype mixes. A single call on a small input does not show these."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass import functional, numerics, reference
from tests.norm.cases import FLOATS

NORMS = ("layer_norm", "rms_norm")
norms = pytest.mark.parametrize("name", NORMS)
adds = pytest.mark.parametrize("rms", [False, True], ids=["add_layer_norm", "add_rms_norm"])


# ---- values and gradients -----------------------------------------------------------------------


def weight_gradients(name: str, rows: int, cols: int, seed: int):
    """(ours, float64 reference, torch's) gradient of the weight."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(rows, cols, generator=generator) for _ in range(2))
    w = torch.randn(cols, generator=generator)
    g = g + 0.5

    def gradient(norm, *tensors):
        x, w, g = tensors
        w = w.clone().requires_grad_()
        return torch.autograd.grad(norm(x, (cols,), w, eps=1e-5), w, g)[0]

    definition = getattr(reference.norm, name)
    return (
        gradient(getattr(functional, name), x, w, g),
        gradient(definition, x.double(), w.double(), g.double()),
        gradient(getattr(F, name), x, w, g),
    )


# A batch of 2048 and of 16384 tokens; then more rows than any chunk count divides evenly.
# torch sums rms_norm's weight gradient in a cascade, with an error that hardly grows with the rows.
MANY_ROWS = [(2048, 96), (16_384, 64), (100_003, 3)]


@pytest.mark.parametrize(
    "name, rows, cols",
    [(name, *size) for name, size in itertools.product(NORMS, MANY_ROWS)],
)
def test_weight_gradients_over_many_rows(name, rows, cols):
    draws = [weight_gradients(name, rows, cols, seed) for seed in range(6 if cols < 16 else 2)]
    numerics.assert_close(*zip(*draws, strict=True), f"{name} {rows} x {cols}: dweight")


@norms
def test_one_tensor_as_both_input_and_residual(name):
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    gradients = []
    for module in (functional, reference.norm):
        y, stream = getattr(module, f"add_{name}")(x, x, 8, eps=1e-5)
        gradients.append(torch.autograd.grad(y.pow(3).sum() + stream.pow(2).sum(), x)[0])
    ours, ref = gradients
    numerics.assert_close(ours, ref, ref)


@norms
def test_a_graph_kept_for_a_second_backward_repeats_it(name):
    x, w = torch.randn(40, 80, requires_grad=True), torch.randn(80, requires_grad=True)
    loss = getattr(functional, name)(x, 80, w).pow(2).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (x, w)), strict=True):
        assert torch.equal(one, other)


@norms
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


# ---- torch --------------------------------------------------------------------------------------


@norms
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


class Block(torch.nn.Module):
    """The skeleton of a pre-norm transformer block: norms and dropouts in one graph."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.second = onepass.nn.LayerNorm(width, 1), onepass.nn.RMSNorm(width, 1e-5)
        self.third, self.linear = onepass.nn.RMSNorm(width, 1), torch.nn.Linear(width, width)
        self.dropout = onepass.nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.linear(self.first(x)))
        return self.third(x + self.dropout(self.linear(self.second(x))))


def test_several_norms_in_one_dynamic_graph():
    """dynamic=True makes symbolic floats of eps and of weight_offset's default."""
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        gradients = []
        for function in (block, compiled):
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            torch.manual_seed(2)
            gradients.append(torch.autograd.grad(function(x).pow(2).sum(), x)[0])
        torch.testing.assert_close(*gradients)


def test_weight_offset_in_a_dynamic_graph():
    w = torch.randn(16)

    def function(x, offset):
        for _ in range(2):
            x = functional.rms_norm(x, (16,), w, weight_offset=offset)
        return x

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for offset in (1.0, 0.25, 0.0):
        x = torch.randn(4, 16, requires_grad=True)
        torch.testing.assert_close(compiled(x, offset), function(x, offset))
