"""Every message, with data and without."""

from __future__ import annotations

import pytest
import torch

from onepass import functional
from tests.branch.cases import RAW

OPS = ("add_layer_norm", "add_rms_norm", "add_dropout")


def check_messages(op: str, device: str, devices: bool = True):
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
    if devices:
        other = torch.ones(6, device="meta" if device == "cpu" else "cpu")
        wrong["column_scale must be on the device of input"] = lambda: call(column_scale=other)
        wrong["row_scale must be on the device of input"] = lambda: call(row_scale=other[:2])
    for message, wrong_call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
            wrong_call()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_messages(device, op):
    check_messages(op, device)


def test_messages_of_the_operators():
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
    x, c = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(TypeError, match="add_layer_norm: row_scale must be a tensor or None, got"):
        functional.add_layer_norm(x, x, 3, column_scale=c, row_scale=0.5)
    with pytest.raises(TypeError, match="add_dropout: column_scale must be a tensor or None, got"):
        functional.add_dropout(x, x, 0.0, column_scale=0.5)
    with pytest.raises(TypeError, match="drop_path_scale: scale_by_keep must be True or False"):
        functional.drop_path_scale(x, 0.5, True, 1)
    with pytest.raises(TypeError, match="drop_path_scale: input must be a tensor, got int"):
        functional.drop_path_scale(3, 0.5)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="drop_path_scale: drop_prob must lie between 0 and 1"):
            functional.drop_path_scale(x, p)
    with pytest.raises(ValueError, match="add_dropout: p must lie between 0 and 1, got 2"):
        functional.add_dropout(x, x, 2, column_scale=c)


def test_checks_are_operators_of_every_device():
    x, c = torch.ones(2, 4, device="meta"), torch.ones(4, device="meta")
    RAW.branch_forward_check(x, x, c, None, None, 0.0, None)
    with pytest.raises(RuntimeError, match="^add_dropout: column_scale must have shape"):
        RAW.branch_forward_check(x, x, x, None, None, 0.0, None)
    RAW.branch_backward_check(x, x, c, None, None, 0.0, None, 3)
    with pytest.raises(RuntimeError, match="^add_dropout_backward: column_scale must have shape"):
        RAW.branch_backward_check(x, x, x, None, None, 0.0, None, 3)
