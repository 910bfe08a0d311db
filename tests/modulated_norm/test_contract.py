"""Every message, with data and without."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onepass import functional
from tests.modulated_norm.cases import RAW, raw_backward

OPS = ("modulated_layer_norm", "modulated_rms_norm")


def check_messages(op: str, device: str, devices: bool = True):
    norm = getattr(functional, op)
    x, s = torch.randn(2, 4, 6, device=device), torch.randn(2, 6, device=device)
    wrong = {
        r"input must end in normalized_shape \(5,\), got shape \(2, 4, 6\)": lambda: norm(x, 5, s),
        r"scale must have shape \(2, 6\), \(2, 1, 6\) or \(2, 4, 6\), got \(6,\)": (
            lambda: norm(x, 6, s[0])
        ),
        r"scale must have shape \(2, 6\), \(2, 1, 6\) or \(2, 4, 6\), got \(1, 6\)": (
            lambda: norm(x, 6, s[:1])
        ),
        r"scale must have shape \(2, 6\), got \(6,\)": lambda: norm(x[:, 0], 6, s[0]),
        r"shift must have shape \(2, 6\), got \(2, 1, 6\)": lambda: norm(x, 6, s, s[:, None]),
        r"gate must have shape \(2, 6\), got \(2, 4, 6\)": (
            lambda: norm(x, 6, s, residual=x, gate=x)
        ),
        r"residual must have shape \(2, 4, 6\), got \(4, 6\)": (
            lambda: norm(x, 6, s, residual=x[0])
        ),
        "gate must not be given without a residual, got one": lambda: norm(x, 6, s, gate=s),
        "input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: norm(x.long(), 6, s)
        ),
        "scale must have dtype float32, bfloat16, float16 or float64, got int32": (
            lambda: norm(x, 6, s.int())
        ),
        "shift must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: norm(x, 6, s, s.double())
        ),
        "gate must have dtype float64 like input, got float32": (
            lambda: norm(x.double(), 6, s.double(), residual=x.double(), gate=s)
        ),
    }
    if devices:
        other = torch.ones(2, 6, device="meta" if device == "cpu" else "cpu")
        wrong["scale must be on the device of input"] = lambda: norm(x, 6, other)
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
            call()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device, op):
    check_messages(op, device)


def test_messages_of_the_backward():
    x, s, r = torch.randn(2, 4, 6), torch.randn(2, 6), torch.ones(2, 4)
    call = dict(x=x, scale=s, doutput=x, mean=r, rstd=r)
    wrong = {
        r"doutput must have shape \(2, 4, 6\), got \(2, 6\)": {"doutput": s},
        r"scale must have shape \(2, 6\), \(2, 1, 6\) or \(2, 4, 6\), got \(4, 6\)": {
            "scale": x[0]
        },
        r"branch must have shape \(2, 4, 6\), got \(2, 6\)": {"branch": s, "gate": s},
        "branch must be given with a gate only, got one": {"branch": x},
        "branch must be given with a gate only, got none": {"gate": s},
        "dresidual_out must have dtype float32 like x, got bfloat16": {
            "dresidual_out": x.bfloat16()
        },
        r"rstd must have shape \(2, 4\), got \(2,\)": {"rstd": r[:, 0]},
        "scale must be given, got none": {"scale": None},
    }
    raw_backward(**call)
    for message, changes in wrong.items():
        with pytest.raises(RuntimeError, match=f"^modulated_layer_norm_backward: {message}"):
            raw_backward(**call | changes)
    with pytest.raises(RuntimeError, match="^norm: kind must be 0 .layer. or 1 .RMS., got 2"):
        raw_backward(**call, kind=2)


def test_python_arguments():
    x, s = torch.ones(2, 3, 4), torch.ones(2, 4)
    norm = functional.modulated_layer_norm
    with pytest.raises(TypeError, match="modulated_layer_norm: scale must be a tensor, got float"):
        norm(x, 4, 1.0)
    with pytest.raises(TypeError, match="modulated_layer_norm: eps must be a number, got NoneType"):
        norm(x, 4, s, s, None)
    with pytest.raises(TypeError, match="modulated_rms_norm: gate must be a tensor or None"):
        functional.modulated_rms_norm(x, 4, s, residual=x, gate=0.5)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x, s = torch.randn(4, 3, 6), torch.randn(4, 6)
        chosen = x[:, 0, 0] > 0
        some, scale = x[chosen], torch.randn(4, 3, 6)[chosen]
        y = functional.modulated_layer_norm(some, 6, scale)
    assert y.shape == some.shape and s.shape == (4, 6)


def test_checks_are_operators_of_every_device():
    x, s = torch.ones(2, 3, 4, device="meta"), torch.ones(2, 4, device="meta")
    check = RAW.modulated_norm_forward_check
    check(x, s, None, None, None, [4], 0, 1e-5, None, False)
    with pytest.raises(RuntimeError, match="^modulated_rms_norm: scale must have shape"):
        check(x, x[0], None, None, None, [4], 1, 1e-5, None, False)
