"""The numerics rule applied to a whole module."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from onepass import numerics


def assert_computes_the_same(module: nn.Module, stock: nn.Module, input: Tensor) -> None:
    """module(input) is right if it is at most as wrong as stock(input) may be; in eval mode."""
    with torch.no_grad():
        ours, base = module(input), stock(input)
        with torch.autocast(input.device.type, enabled=False):
            ref = copy.deepcopy(stock).double()(input.double())
    assert ours.dtype == base.dtype
    numerics.assert_close(ours, ref, base)
