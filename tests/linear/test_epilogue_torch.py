"""Epilogues of linear under torch: opcheck, second derivatives, checkpoints, transforms, autocast,
errors."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.linear.cases import RAW, make

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


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"residual": torch.ones(3, 4)}, r"residual must have shape \(3, 5\), got \(3, 4\)"),
        (
            {"residual": torch.ones(3, 5, dtype=F64)},
            "residual must have dtype float32, bfloat16 or float16 beside input",
        ),
        ({"dropout_p": 1.5}, "dropout_p must lie between 0 and 1, got 1.5"),
        ({"seed": None}, "seed must be given with dropout_p > 0 only, got none"),
        ({"activation_kind": 5}, "activation_kind must be one of 0 to 4, got 5"),
        ({"activation_kind": -1}, "activation_kind must be one of 0 to 4, got -1"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v[:40],
)
def test_messages(changes, message):
    given = dict(
        make(3, 4, 5).tensors(), residual=torch.ones(3, 5), seed=torch.tensor([1, 2]),
        dropout_p=0.5, activation_kind=1, save_preactivation=False,
    )  # fmt: skip
    for op in (RAW.linear_epilogue_forward, RAW.linear_epilogue_forward_check):
        op(**given)
        with pytest.raises(RuntimeError, match=f"linear: {message}"):
            op(**(given | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"preactivation": None}, "preactivation must be given with an activation and only then"),
        ({"activation_kind": 0}, "preactivation must be given with an activation and only then"),
        ({"preactivation": torch.ones(5)}, r"preactivation must have shape \(3, 5\), got \(5,\)"),
        ({"dropout_p": -0.5}, "dropout_p must lie between 0 and 1, got -0.5"),
        ({"seed": None}, "seed must be given with dropout_p > 0 only, got none"),
        ({"out_dtype": F64}, "out_dtype must have dtype float32, bfloat16 or float16 beside"),
        ({"activation_kind": 9}, "activation_kind must be one of 0 to 4, got 9"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v[:40],
)
def test_messages_of_the_backward(changes, message):
    given = dict(
        doutput=torch.ones(3, 5), preactivation=torch.ones(3, 5), seed=torch.tensor([1, 2]),
        dropout_p=0.5, activation_kind=1, out_dtype=None,
    )  # fmt: skip
    for op in (RAW.linear_epilogue_backward, RAW.linear_epilogue_backward_check):
        op(**given)
        with pytest.raises(RuntimeError, match=f"linear_epilogue_backward: {message}"):
            op(**(given | changes))
