"""The numerics rule applied to a whole module."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from onepass import numerics


def assert_computes_the_same(module: nn.Module, stock: nn.Module, input: Tensor) -> None:
    """module(input) by the numerics rule, with stock(input) as its base; in eval mode."""
    with torch.no_grad():
        ours, base = module(input), stock(input)
        with torch.autocast(input.device.type, enabled=False):
            ref = copy.deepcopy(stock).double()(input.double())
    assert ours.dtype == base.dtype
    numerics.assert_close(ours, ref, base)


def per_sample(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the parameters for each row of x separately."""

    def loss(parameters, row):
        return torch.func.functional_call(module, parameters, (row,)).square().sum()

    parameters = dict(module.named_parameters())
    return list(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x).values())
