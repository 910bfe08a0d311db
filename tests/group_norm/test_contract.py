"""Every message. Those without data, and of arguments of wrong types, are tests of all_families."""

import pytest
import torch

import onepass
from onepass import functional
from tests.group_norm.cases import RAW
from tests.support.refused import assert_refused

X, W, SAVED = torch.ones(3, 6, 5), torch.ones(6), torch.ones(3, 2)
FLOAT = "have dtype float32, bfloat16, float16 or float64, got"
BESIDE = "have dtype float32, bfloat16 or float16 beside input, got float64"
META = "on the device of input, cpu, got meta"
RIGHT = dict(input=X, num_groups=2, weight=W, bias=W)
WRONG = {
    "input must have at least 2 dimensions, got shape (6,)": dict(input=W),
    f"input must {FLOAT} int64": dict(input=X.long()),
    "num_groups must be positive, got 0": dict(num_groups=0),
    "num_groups must be positive, got -2": dict(num_groups=-2),
    "input must have a number of channels that num_groups divides, got 6 and 4": (
        dict(num_groups=4)
    ),
    "weight must have shape (6,), got (3,)": dict(weight=W[:3]),
    f"weight must {FLOAT} complex64": dict(weight=W.to(torch.complex64)),
    f"weight must {BESIDE}": dict(weight=W.double()),
    f"weight must be {META}": dict(weight=W.to("meta")),
    "bias must have shape (6,), got (6, 1)": dict(bias=W[:, None]),
    "bias must have dtype float64 like input, got float32": (
        dict(input=X.double(), weight=W.double())
    ),
}
OF_OPERATORS = {
    "activation_kind must be 0 (none) or 2 (silu), got 1": dict(activation_kind=1),
    "activation_kind must be 0 (none) or 2 (silu), got 8": dict(activation_kind=8),
    "channels_last must be False unless input has 4 or 5 dimensions, got True for 3": (
        dict(channels_last=True)
    ),
    "input must have a number of channels that num_groups divides, got 6 and 5": (
        dict(num_groups=5)
    ),
    "input must be given, got none": dict(input=None),
}
OF_BACKWARD = {
    "doutput must have shape (3, 6, 5), got (6,)": dict(doutput=W),
    f"doutput must {BESIDE}": dict(doutput=X.double()),
    f"doutput must be {META}": dict(doutput=X.to("meta")),
    "mean must have shape (3, 2), got (3, 3)": dict(mean=torch.ones(3, 3)),
    "rstd must have shape (3, 2), got (6,)": dict(rstd=W),
    "rstd must have dtype float32, got float16": dict(rstd=SAVED.half()),
}


def test_messages():
    assert_refused(functional.group_norm, "group_norm", RIGHT, WRONG)
    right = RIGHT | dict(activation_kind=2, channels_last=False)
    ahead = right | dict(eps=1e-5, out_dtype=None, save_statistics=True)
    wrong = OF_OPERATORS | {f"out_dtype must {BESIDE}": dict(out_dtype=torch.float64)}
    for op in (RAW.group_norm_forward, RAW.group_norm_forward_check):
        assert_refused(op, "group_norm", ahead, wrong)
    back = right | dict(doutput=X, mean=SAVED, rstd=SAVED, grad_mask=7)
    for op in (RAW.group_norm_backward, RAW.group_norm_backward_check):
        assert_refused(op, "group_norm_backward", back, OF_OPERATORS | OF_BACKWARD)


def test_python_arguments():
    message = "activation must be None or 'silu', got 'x'"
    with pytest.raises(ValueError, match=f"group_norm: {message}"):
        functional.group_norm(X, 2, activation="x")
    with pytest.raises(ValueError, match=f"GroupNorm: {message}"):
        onepass.nn.GroupNorm(2, 4, activation="x")
    with pytest.raises(ValueError, match="divisible"):
        onepass.nn.GroupNorm(3, 4)
    with pytest.raises(TypeError, match="group_norm: activation must be a string or None, got"):
        functional.group_norm(X, 2, activation=["silu"])
