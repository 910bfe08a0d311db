"""Every message, with data and without."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import onepass
from onepass import functional
from tests.group_norm.cases import RAW

OP = "group_norm"


def check_messages(device: str, devices: bool = True):
    norm = functional.group_norm
    x, w = torch.randn(2, 6, 3, device=device), torch.ones(6, device=device)
    wrong = {
        r"input must have at least 2 dimensions, got shape \(6,\)": lambda: norm(w, 2),
        "num_groups must be positive, got 0": lambda: norm(x, 0),
        "num_groups must be positive, got -2": lambda: norm(x, -2),
        "input must have a number of channels that num_groups divides, got 6 and 4": (
            lambda: norm(x, 4)
        ),
        r"weight must have shape \(6,\), got \(3,\)": lambda: norm(x, 2, w[:3]),
        r"bias must have shape \(6,\), got \(6, 1\)": lambda: norm(x, 2, w, w[:, None]),
        "input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: norm(x.long(), 2)
        ),
        "weight must have dtype float32, bfloat16, float16 or float64, got complex64": (
            lambda: norm(x, 2, w.to(torch.complex64))
        ),
        "weight must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: norm(x, 2, w.double())
        ),
        "bias must have dtype float64 like input, got float32": (
            lambda: norm(x.double(), 2, w.double(), w)
        ),
    }
    if devices:
        other = "meta" if device == "cpu" else "cpu"
        wrong["weight must be on the device of input"] = lambda: norm(
            x, 2, torch.ones(6, device=other)
        )
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device):
    check_messages(device)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation_kind": 1}, r"activation_kind must be 0 \(none\) or 2 \(silu\), got 1"),
        ({"activation_kind": 8}, r"activation_kind must be 0 \(none\) or 2 \(silu\), got 8"),
        (
            {"channels_last": True},
            "channels_last must be False unless input has 4 or 5 dimensions, got True for 3",
        ),
        ({"num_groups": 5}, "input must have a number of channels that num_groups divides"),
        ({"input": None}, "input must be given, got none"),
    ],
    ids=str,
)
def test_messages_of_raw_operators(changes, message):
    x, w, saved = torch.ones(3, 6, 5), torch.ones(6), torch.ones(3, 2)
    given = dict(input=x, weight=w, bias=w, num_groups=2, activation_kind=2, channels_last=False)
    ahead = dict(eps=1e-5, out_dtype=None, save_statistics=True)
    for op in (RAW.group_norm_forward, RAW.group_norm_forward_check):
        op(**given, **ahead)
        with pytest.raises(RuntimeError, match=f"^{OP}: {message}"):
            op(**(given | changes), **ahead)
    back = dict(doutput=x, mean=saved, rstd=saved, grad_mask=7)
    for op in (RAW.group_norm_backward, RAW.group_norm_backward_check):
        op(**given, **back)
        with pytest.raises(RuntimeError, match=f"^{OP}_backward: {message}"):
            op(**(given | changes), **back)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"doutput": torch.ones(6)}, r"doutput must have shape \(3, 6, 5\), got \(6,\)"),
        ({"doutput": torch.ones(3, 6, 5).double()}, "doutput must have dtype float32, bfloat16"),
        (
            {"doutput": torch.ones(3, 6, 5, device="meta")},
            "doutput must be on the device of input",
        ),
        ({"mean": torch.ones(3, 3)}, r"mean must have shape \(3, 2\), got \(3, 3\)"),
        ({"rstd": torch.ones(6)}, r"rstd must have shape \(3, 2\), got \(6,\)"),
        ({"rstd": torch.ones(3, 2).half()}, "rstd must have dtype float32, got float16"),
    ],
    ids=str,
)
def test_messages_of_the_backward(changes, message):
    x, w, saved = torch.ones(3, 6, 5), torch.ones(6), torch.ones(3, 2)
    given = dict(doutput=x, input=x, weight=w, bias=w, mean=saved, rstd=saved, num_groups=2)
    given |= dict(activation_kind=2, channels_last=False, grad_mask=7)
    with pytest.raises(RuntimeError, match=f"^{OP}_backward: {message}"):
        RAW.group_norm_backward(**given | changes)


def test_out_dtype():
    with pytest.raises(RuntimeError, match=f"^{OP}: out_dtype must have dtype float32, bfloat16"):
        RAW.group_norm_forward(
            torch.ones(2, 4), None, None, 2, 1e-5, 0, False, torch.float64, False
        )


def test_python_arguments():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match="group_norm: activation must be None or 'silu', got 'x'"):
        functional.group_norm(x, 2, activation="x")
    with pytest.raises(ValueError, match="GroupNorm: activation must be None or 'silu', got 'x'"):
        onepass.nn.GroupNorm(2, 4, activation="x")
    with pytest.raises(ValueError, match="divisible"):
        onepass.nn.GroupNorm(3, 4)
    with pytest.raises(TypeError, match="group_norm: activation must be a string or None, got"):
        functional.group_norm(x, 2, activation=["silu"])
    with pytest.raises(TypeError, match="group_norm: input must be a tensor, got list"):
        functional.group_norm([1.0, 2.0], 1)
    with pytest.raises(TypeError, match="group_norm: num_groups must be a whole number, got float"):
        functional.group_norm(x, 2.0)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 6, 5)
        some = x[x[:, 0, 0] > 0]
        y = functional.group_norm(some, 2)
    assert y.shape == some.shape and some.shape[0].node.hint is None
