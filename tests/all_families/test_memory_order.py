"""The memory order of elementwise functions, forward and backward: stock's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass import functional

INPUTS = {
    "contiguous": lambda: torch.randn(2, 3, 8),
    "transposed": lambda: torch.randn(2, 8, 3).transpose(1, 2),
    "rotated": lambda: torch.randn(8, 2, 3).permute(1, 2, 0),
    "heads and tokens": lambda: torch.randn(2, 5, 3, 8).permute(0, 2, 1, 3),
    "reversed": lambda: torch.randn(2, 5, 3, 8).permute(3, 2, 1, 0),
    "channels last": lambda: torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(2, 16, 6)[:, :8].transpose(1, 2),
    "expanded": lambda: torch.randn(2, 8, 1).expand(2, 8, 3).transpose(1, 2),
    "strided columns": lambda: torch.randn(2, 6, 16)[..., ::2],
}


def swapped(module: nn.Module) -> nn.Module:
    holder = nn.ModuleList([module])
    assert onepass.swap(holder).swapped
    return holder[0]


CASES = {  # ours, and stock
    "dropout": (functional.dropout, F.dropout),
    "dropout of everything": (lambda x: functional.dropout(x, 1.0), lambda x: F.dropout(x, 1.0)),
    "nn.Dropout": (onepass.nn.Dropout(), nn.Dropout()),
    "swapped": (swapped(nn.Dropout()), nn.Dropout()),
    "add_dropout": (functional.add_dropout, lambda x, r: r + F.dropout(x)),
    "LayerScale": (
        lambda x: functional.add_dropout(x, None, 0.0, column_scale=torch.ones(x.shape[-1])),
        lambda x: x * torch.ones(x.shape[-1]),
    ),
    "DropPath": (
        lambda x: functional.add_dropout(x, None, 0.0, row_scale=torch.ones(len(x))),
        lambda x: x * torch.ones(len(x)).view(-1, *[1] * (x.dim() - 1)),
    ),
    "silu_mul": (functional.silu_mul, lambda g, u: F.silu(g) * u),
    "gelu_mul": (functional.gelu_mul, lambda g, u: F.gelu(g) * u),
}


def strides(function, inputs, dense: bool) -> list:
    """Strides of the result, and of gradients for an upstream one of torch's order or its own."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    upstream = torch.ones(y.shape) if dense else torch.ones_like(y)
    return [x.stride() for x in (y, *torch.autograd.grad(y, leaves, upstream))]


@pytest.mark.parametrize("dense", [False, True], ids=["same order", "dense"])
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("name", CASES)
def test_strides_are_stocks(name, layout, dense):
    ours, stock = CASES[name]
    x = INPUTS[layout]()
    pairs = [(x,)]
    if name in ("add_dropout", "silu_mul", "gelu_mul"):
        other = torch.randn(x.shape)
        pairs = [(x, x.clone()), (x, other), (other, x)]
    for inputs in pairs:
        assert strides(ours, inputs, dense) == strides(stock, inputs, dense)


@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("gate_last", [False, True])
def test_halves_of_one_tensor(layout, gate_last):
    x = INPUTS[layout]().double()
    first, second = x.chunk(2, -1)
    gate, up = (second, first) if gate_last else (first, second)
    y = functional.gated_activation(x, gate_last=gate_last)
    assert y.stride() == (F.silu(gate) * up).stride()
    assert torch.equal(y, functional.silu_mul(gate.contiguous(), up.contiguous()))


def test_a_view_after_a_swapped_dropout():
    drop, x = swapped(nn.Dropout()), torch.randn(2, 8, 3)
    y = drop(x.transpose(1, 2)).transpose(1, 2).view(-1)
    assert torch.equal(y[y != 0], (2 * x.view(-1))[y != 0])
