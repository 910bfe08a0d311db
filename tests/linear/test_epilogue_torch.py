"""Epilogues of linear under torch: opcheck, second derivatives, checkpoints, transforms, autocast,
errors."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.linear.cases import make

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def test_what_an_epilogue_saves():
    """Without gradients nothing; for a frozen layer only the tensors that it needs."""
    case = make(6, 8, 10)
    x, w, b = case.tensors().values()
    residual = torch.randn(6, 10)

    def saved(*wrt, activation="gelu", p=0.0):
        leaves = [t.detach().requires_grad_(name in wrt) for name, t in case.tensors().items()]
        stream = residual.detach().requires_grad_("residual" in wrt)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
        ):
            functional.linear(*leaves, activation=activation, dropout_p=p, residual=stream)
        return sorted(kept)

    assert saved() == []
    assert saved("input", "weight", "bias") == [(6, 8), (6, 10), (10, 8)]
    assert saved("input") == [(6, 10), (10, 8)]
    assert saved("bias", activation=None) == []
    assert saved("bias", activation=None, p=0.5) == [(2,)]
    assert saved("residual", activation=None) == saved("residual", p=0.5) == []


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_autocast_of_epilogues(activation):
    case = make(6, 8, 10)
    with torch.autocast("cpu", BF16):
        output = functional.linear(*case.tensors().values(), activation=activation, dropout_p=0.1)
        stream = functional.linear(
            *case.tensors().values(), activation=activation, residual=case.doutput
        )
    assert output.dtype is BF16 and stream.dtype is F32
