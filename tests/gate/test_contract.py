"""Every message, with data and without."""

import pytest
import torch

import onepass
from onepass import functional
from tests.gate.cases import RAW
from tests.support.refused import assert_refused

OP = "gated_activation"
X, VECTOR = torch.ones(3, 6), torch.ones(6)
FLOAT = "have dtype float32, bfloat16, float16 or float64, got"
BESIDE = "have dtype float32, bfloat16 or float16 beside gate, got float64"
HALVES = "gate must have a last dimension of two halves where up is not given, got"
KIND = "activation_kind must be one of 1 to 7, got"
RIGHT = dict(gate=X, up=X, activation_kind=2, gate_last=False)
WRONG = {
    "up must have shape (3, 6), got (1, 6)": dict(up=X[:1]),
    "up must have shape (3, 6), got (6,)": dict(up=VECTOR),
    f"{HALVES} (3, 5)": dict(gate=X[:, :5], up=None),
    f"{HALVES} ()": dict(gate=X[0, 0], up=None),
    f"gate must {FLOAT} int64": dict(gate=X.long()),
    f"up must {FLOAT} complex64": dict(up=X.to(torch.complex64)),
    f"up must {BESIDE}": dict(up=X.double()),
    "up must have dtype float64 like gate, got float32": dict(gate=X.double()),
    "up must be on the device of gate, cpu, got meta": dict(up=X.to("meta")),
    "gate_last must be False where up is given, got True": dict(gate_last=True),
    f"{KIND} 0": dict(activation_kind=0),
    f"{KIND} 8": dict(activation_kind=8),
    "gate must be given, got none": dict(gate=None),
}


def test_messages():
    for op in (RAW.gate_forward, RAW.gate_forward_check):
        assert_refused(op, OP, RIGHT, WRONG)
    right = RIGHT | dict(doutput=X, grad_mask=3)
    same = ("gate_last", "activation_kind", "gate must")
    wrong = {text: changes for text, changes in WRONG.items() if text.startswith(same)}
    wrong = {text: changes for text, changes in wrong.items() if "dtype" not in text}
    for op in (RAW.gate_backward, RAW.gate_backward_check):
        assert_refused(op, f"{OP}_backward", right, wrong)


@pytest.mark.parametrize("up", [None, X], ids=["halves", "two"])
def test_messages_of_the_upstream_gradient(up):
    right = RIGHT | dict(gate=torch.ones(3, 12) if up is None else X, up=up, doutput=X, grad_mask=3)
    wrong = {
        "doutput must have shape (3, 6), got (6,)": dict(doutput=VECTOR),
        "doutput must have shape (3, 6), got (3, 12)": dict(doutput=torch.ones(3, 12)),
        f"doutput must {BESIDE}": dict(doutput=X.double()),
        f"doutput must {FLOAT} int32": dict(doutput=X.int()),
        "doutput must be on the device of gate, cpu, got meta": dict(doutput=X.to("meta")),
    }
    assert_refused(RAW.gate_backward, f"{OP}_backward", right, wrong)


def test_python_arguments():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match="gated_activation: activation must be one of 'relu', "):
        functional.gated_activation(x, x, activation="tanh")
    with pytest.raises(ValueError, match="GatedMLP: activation must be one of .*, got 'tanh'$"):
        onepass.nn.GatedMLP(8, 24, "tanh")
    with pytest.raises(ValueError, match="gelu_mul: approximate must be 'none' or 'tanh', got 'x'"):
        functional.gelu_mul(x, x, "x")
