"""Every message of modulated norms and scaled branches, with data and without."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onepass import functional
from tests.norm.forms import RAW

MODULATED = ("modulated_layer_norm", "modulated_rms_norm")
BRANCHES = ("add_layer_norm", "add_rms_norm", "add_dropout")


def assert_raised(op: str, wrong: dict) -> None:
    """Each call raises the message beside it."""
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
            call()


@pytest.mark.parametrize("op", MODULATED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modulated_norms(device, op):
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
    other = torch.ones(2, 6, device="meta" if device == "cpu" else "cpu")
    wrong["scale must be on the device of input"] = lambda: norm(x, 6, other)
    assert_raised(op, wrong)


@pytest.mark.parametrize("op", BRANCHES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_branches(device, op):
    x, c = torch.randn(2, 4, 6, device=device), torch.randn(6, device=device)
    r = torch.ones(2, device=device)

    def call(input=x, residual=x, **scales):
        if op == "add_dropout":
            return functional.add_dropout(input, residual, 0.0, **scales)
        return getattr(functional, op)(input, residual, 6, **scales)

    wrong = {
        r"column_scale must have shape \(6,\), got \(4,\)": lambda: call(column_scale=x[0, :, 0]),
        r"column_scale must have shape \(6,\), got \(2, 4, 6\)": lambda: call(column_scale=x),
        r"row_scale must have shape \(2,\), got \(6,\)": lambda: call(row_scale=c),
        r"row_scale must have shape \(2,\), got \(2, 1\)": lambda: call(row_scale=r[:, None]),
        "row_scale must have dtype float32, got bfloat16": lambda: call(row_scale=r.bfloat16()),
        "row_scale must have dtype float64 like input, got float32": (
            lambda: call(x.double(), x.double(), row_scale=r)
        ),
        "row_scale must not require a gradient, got one that does": (
            lambda: call(row_scale=r.clone().requires_grad_())
        ),
        "column_scale must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: call(column_scale=c.long())
        ),
        "column_scale must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: call(column_scale=c.double())
        ),
        r"residual must have shape \(2, 4, 6\), got \(4, 6\)": lambda: call(x, x[0], row_scale=r),
    }
    other = torch.ones(6, device="meta" if device == "cpu" else "cpu")
    wrong["column_scale must be on the device of input"] = lambda: call(column_scale=other)
    wrong["row_scale must be on the device of input"] = lambda: call(row_scale=other[:2])
    assert_raised(op, wrong)


def test_the_backward_of_modulated_norms():
    x, s, r = torch.randn(2, 4, 6), torch.randn(2, 6), torch.ones(2, 4)
    call = dict.fromkeys(("dresidual_out", "shift", "branch", "gate"))
    call |= dict.fromkeys(("input_dtype", "residual_dtype"))
    call |= dict(x=x, scale=s, doutput=x, mean=r, rstd=r)
    call |= dict(normalized_shape=[6], kind=0, grad_mask=31)
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
    backward = RAW.modulated_norm_backward
    backward(**call)
    for message, changes in wrong.items():
        with pytest.raises(RuntimeError, match=f"^modulated_layer_norm_backward: {message}"):
            backward(**call | changes)
    with pytest.raises(RuntimeError, match="^norm: kind must be 0 .layer. or 1 .RMS., got 2"):
        backward(**call | {"kind": 2})


def test_the_operators_of_branches():
    x, c, r = torch.randn(2, 4, 6), torch.randn(6), torch.ones(2)
    seed = torch.tensor([1, 2])

    def norm(input=x, **changes):
        call = dict(scale=None, shift=None, residual=x, gate=c, normalized_shape=[6], kind=0)
        call |= dict(eps=1e-5, out_dtype=None, save_statistics=True, weight_offset=0.0)
        RAW.modulated_norm_forward(input, **call | dict(shared=True) | changes)

    def forward(**changes):
        call = dict(residual=x, column_scale=c, row_scale=r, seed=None, p=0.0, out_dtype=None)
        RAW.branch_forward(x, **call | changes)

    def backward(**changes):
        call = dict(branch=x, column_scale=c, row_scale=r, seed=None, p=0.0, input_dtype=None)
        RAW.branch_backward(x, **call | dict(grad_mask=3) | changes)

    wrong = {
        "add_layer_norm: column_scale must not be given without a residual, got one": (
            lambda: norm(residual=None)
        ),
        "add_layer_norm: row_scale must not be given without a residual, got one": (
            lambda: norm(residual=None, gate=None, row_scale=r)
        ),
        "add_layer_norm: seed must be given with dropout_p > 0 only, got one": (
            lambda: norm(seed=seed)
        ),
        r"add_layer_norm: weight must have shape \(6,\), got \(2,\)": lambda: norm(scale=r),
        "add_rms_norm: bias must not be given, got one": lambda: norm(shift=c, kind=1),
        "modulated_layer_norm: scale must be given, got none": (
            lambda: norm(gate=None, shared=False)
        ),
        "modulated_layer_norm: row_scale must not be given without a residual, got one": (
            lambda: norm(scale=x[:, 0], gate=None, residual=None, row_scale=r, shared=False)
        ),
        "add_dropout: p must lie between 0 and 1, got 1.5": lambda: forward(p=1.5),
        "add_dropout: seed must be given with p > 0 only, got none": lambda: forward(p=0.5),
        "add_dropout: seed must be given with p > 0 only, got one": lambda: forward(seed=seed),
        "add_dropout: out_dtype must have dtype float32, bfloat16 or float16 beside input": (
            lambda: forward(out_dtype=torch.float64)
        ),
        "add_dropout_backward: column_scale must be given for its gradient, got none": (
            lambda: backward(column_scale=None)
        ),
        "add_dropout_backward: branch must be given for column_scale's gradient, got none": (
            lambda: backward(branch=None)
        ),
        r"add_dropout_backward: branch must have shape \(2, 4, 6\), got \(4, 6\)": (
            lambda: backward(branch=x[0])
        ),
        r"add_dropout_backward: row_scale must have shape \(2,\), got \(6,\)": (
            lambda: backward(row_scale=c)
        ),
    }
    norm(), forward(), backward()
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{message}"):
            call()
    one = torch.ones(())
    message = "^add_dropout: column_scale must not be given for one element, got one"
    with pytest.raises(RuntimeError, match=message):
        functional.add_dropout(one, one, 0.0, column_scale=one[None])


def test_python_arguments():
    x, c, s = torch.ones(2, 3, 4), torch.ones(4), torch.ones(2, 4)
    layer, rms = functional.modulated_layer_norm, functional.modulated_rms_norm
    add, drop = functional.add_dropout, functional.drop_path_scale
    types = {
        "modulated_layer_norm: scale must be a tensor, got float": lambda: layer(x, 4, 1.0),
        "modulated_layer_norm: eps must be a number, got NoneType": lambda: layer(x, 4, s, s, None),
        "modulated_rms_norm: gate must be a tensor or None": (
            lambda: rms(x, 4, s, residual=x, gate=0.5)
        ),
        "add_layer_norm: row_scale must be a tensor or None, got": (
            lambda: functional.add_layer_norm(x, x, 4, column_scale=c, row_scale=0.5)
        ),
        "add_dropout: column_scale must be a tensor or None, got": (
            lambda: add(x, x, 0.0, column_scale=0.5)
        ),
        "drop_path_scale: scale_by_keep must be True or False": lambda: drop(x, 0.5, True, 1),
        "drop_path_scale: input must be a tensor, got int": lambda: drop(3, 0.5),
    }
    values = {
        "add_dropout: p must lie between 0 and 1, got 2": lambda: add(x, x, 2, column_scale=c)
    }
    for p in (-0.1, 1.5, float("nan")):
        values[f"drop_path_scale: drop_prob must lie between 0 and 1, got {p}"] = lambda p=p: drop(
            x, p
        )
    for wrong, error in ((types, TypeError), (values, ValueError)):
        for message, call in wrong.items():
            with pytest.raises(error, match=message):
                call()


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x, s = torch.randn(4, 3, 6), torch.randn(4, 6)
        chosen = x[:, 0, 0] > 0
        some, scale = x[chosen], torch.randn(4, 3, 6)[chosen]
        y = functional.modulated_layer_norm(some, 6, scale)
    assert y.shape == some.shape and s.shape == (4, 6)


def test_checks_are_operators_of_every_device():
    x, s, c = (torch.ones(size, device="meta") for size in ((2, 3, 4), (2, 4), (4,)))
    norm, of_norm = RAW.modulated_norm_forward_check, (None, None, None, [4])
    norm(x, s, *of_norm, 0, 1e-5, None, False)
    forward, backward = RAW.branch_forward_check, RAW.branch_backward_check
    rest = (None, None, 0.0, None)
    forward(x, x, c, *rest)
    backward(x, x, c, *rest, 3)
    wrong = {
        "modulated_rms_norm: scale": lambda: norm(x, x[0], *of_norm, 1, 1e-5, None, False),
        "add_dropout: column_scale": lambda: forward(x, x, x, *rest),
        "add_dropout_backward: column_scale": lambda: backward(x, x, x, *rest, 3),
    }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{message} must have shape"):
            call()
