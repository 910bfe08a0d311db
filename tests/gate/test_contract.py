"""Every message, with data and without."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import onepass
from onepass import functional
from tests.gate.cases import RAW

OP = "gated_activation"


def check_messages(device: str, devices: bool = True):
    gated = functional.gated_activation
    x, odd = torch.randn(4, 6, device=device), torch.randn(4, 5, device=device)
    halves = "gate must have a last dimension of two halves where up is not given"
    wrong = {
        r"up must have shape \(4, 6\), got \(3, 6\)": lambda: gated(x, x[:3]),
        r"up must have shape \(4, 6\), got \(6,\)": lambda: functional.silu_mul(x, x[0]),
        rf"{halves}, got \(4, 5\)": lambda: gated(odd),
        rf"{halves}, got \(\)": lambda: functional.gelu_mul(x[0, 0]),
        "gate must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: gated(x.long(), x)
        ),
        "up must have dtype float32, bfloat16, float16 or float64, got complex64": (
            lambda: gated(x, x.to(torch.complex64))
        ),
        "up must have dtype float32, bfloat16 or float16 beside gate, got float64": (
            lambda: gated(x, x.double())
        ),
        "up must have dtype float64 like gate, got float32": lambda: gated(x.double(), x),
        "gate_last must be False where up is given, got True": (
            lambda: gated(x, x, gate_last=True)
        ),
    }
    if devices:
        other = "meta" if device == "cpu" else "cpu"
        wrong["up must be on the device of gate"] = lambda: gated(x, torch.ones(4, 6, device=other))
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device):
    check_messages(device)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation_kind": 0}, "activation_kind must be one of 1 to 7, got 0"),
        ({"activation_kind": 8}, "activation_kind must be one of 1 to 7, got 8"),
        ({"gate_last": True}, "gate_last must be False where up is given, got True"),
        ({"up": None}, "gate must have a last dimension of two halves where up is not given"),
        ({"gate": None}, "gate must be given, got none"),
    ],
    ids=str,
)
def test_messages_of_raw_operators(changes, message):
    given = dict(gate=torch.ones(3, 5), up=torch.ones(3, 5), activation_kind=2, gate_last=False)
    more = dict(doutput=torch.ones(3, 5), grad_mask=3)
    for op in (RAW.gate_forward, RAW.gate_forward_check):
        op(**given)
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            op(**(given | changes))
    for op in (RAW.gate_backward, RAW.gate_backward_check):
        op(**given, **more)
        with pytest.raises(RuntimeError, match=f"^{OP}_backward: {message}"):
            op(**(given | changes), **more)


@pytest.mark.parametrize(
    "doutput, message",
    [
        (torch.ones(5), r"doutput must have shape \(3, 5\), got \(5,\)"),
        (torch.ones(3, 10), r"doutput must have shape \(3, 5\), got \(3, 10\)"),
        (torch.ones(3, 5).double(), "doutput must have dtype float32, bfloat16 or float16 beside"),
        (torch.ones(3, 5).int(), "doutput must have dtype float32, bfloat16, float16 or float64"),
        (torch.ones(3, 5, device="meta"), "doutput must be on the device of gate"),
    ],
    ids=["vector", "both halves", "float64", "int32", "meta"],
)
@pytest.mark.parametrize("halves", [False, True])
def test_messages_of_the_upstream_gradient(halves, doutput, message):
    gate = torch.ones(3, 10 if halves else 5)
    up = None if halves else torch.ones(3, 5)
    with pytest.raises(RuntimeError, match=f"^{OP}_backward: {message}"):
        RAW.gate_backward(doutput, gate, up, 2, False, 3)


def test_python_arguments():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match="gated_activation: activation must be one of 'relu', "):
        functional.gated_activation(x, x, activation="tanh")
    with pytest.raises(ValueError, match="GatedMLP: activation must be one of .*, got 'tanh'$"):
        onepass.nn.GatedMLP(8, 24, "tanh")
    with pytest.raises(ValueError, match="gelu_mul: approximate must be 'none' or 'tanh', got 'x'"):
        functional.gelu_mul(x, x, "x")
    with pytest.raises(TypeError, match="gated_activation: gate_last must be True or False"):
        functional.gated_activation(x, gate_last=1)
    with pytest.raises(TypeError, match="silu_mul: gate must be a tensor, got list"):
        functional.silu_mul([1.0, 2.0])
    with pytest.raises(TypeError, match="gelu_mul: up must be a tensor or None, got float"):
        functional.gelu_mul(x, 2.0)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 6)
        some = x[x[:, 0] > 0]
        y = functional.silu_mul(some, some)
        halves = functional.silu_mul(some)
    assert y.shape == some.shape and some.shape[0].node.hint is None
    assert halves.shape == (some.shape[0], 3)
