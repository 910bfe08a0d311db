"""Every message of norms, modulated norms and scaled branches. Those without data, and of arguments
of wrong types, are tests of all_families."""

import pytest
import torch

import onepass
from onepass import functional
from tests.norm.cases import raw_backward, raw_forward
from tests.norm.forms import RAW
from tests.support.refused import assert_refused

X, W, S, R = torch.randn(2, 4, 6), torch.ones(6), torch.randn(2, 6), torch.ones(2)
ROWS, SEED = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
FLOAT = "have dtype float32, bfloat16, float16 or float64, got"
BESIDE = "have dtype float32, bfloat16 or float16 beside"
META = "on the device of input, cpu, got meta"
KINDS = ("layer_norm", "rms_norm")
kinds = pytest.mark.parametrize("kind", KINDS)


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


NORM = {
    "input must end in normalized_shape (5,), got shape (2, 4, 6)": dict(normalized_shape=5),
    "input must end in normalized_shape (1, 2, 4, 6), got shape (2, 4, 6)": (
        dict(normalized_shape=(1, 2, 4, 6))
    ),
    "normalized_shape must have at least one dimension, got ()": dict(normalized_shape=()),
    f"input must {FLOAT} int64": dict(input=X.long()),
    "weight must have shape (6,), got (5,)": dict(weight=W[:5]),
    f"weight must {FLOAT} int32": dict(weight=W.int()),
    f"weight must {BESIDE} input, got float64": dict(weight=W.double()),
    "weight must have dtype float64 like input, got float32": dict(input=X.double()),
    f"weight must be {META}": dict(weight=meta(W)),
}
BIAS = {"bias must have shape (6,), got (2, 6)": dict(bias=S)}
RESIDUAL = {
    "residual must have shape (2, 4, 6), got (4, 6)": dict(residual=X[0]),
    f"residual must be {META}": dict(residual=meta(X)),
}
OF_DTYPE = {f"residual_dtype must {FLOAT} int64": dict(residual_dtype=torch.int64)}
BRANCH = {
    "column_scale must have shape (6,), got (2,)": dict(column_scale=R),
    "column_scale must have shape (6,), got (2, 4, 6)": dict(column_scale=X),
    f"column_scale must {FLOAT} int64": dict(column_scale=W.long()),
    f"column_scale must {BESIDE} input, got float64": dict(column_scale=W.double()),
    f"column_scale must be {META}": dict(column_scale=meta(W)),
    "row_scale must have shape (2,), got (6,)": dict(row_scale=W),
    "row_scale must have shape (2,), got (2, 1)": dict(row_scale=R[:, None]),
    "row_scale must have dtype float32, got bfloat16": dict(row_scale=R.bfloat16()),
    "row_scale must have dtype float64 like input, got float32": (
        dict(input=X.double(), residual=X.double(), weight=None, column_scale=None)
    ),
    "row_scale must not require a gradient, got one that does": (
        dict(row_scale=R.clone().requires_grad_())
    ),
    f"row_scale must be {META}": dict(row_scale=meta(R)),
}


@kinds
def test_norms(kind):
    norm, add = getattr(functional, kind), getattr(functional, f"add_{kind}")
    right = dict(input=X, normalized_shape=6, weight=W)
    assert_refused(norm, kind, right, NORM | (BIAS if kind == "layer_norm" else {}))
    right |= dict(residual=X)
    assert_refused(add, f"add_{kind}", right, RESIDUAL | OF_DTYPE)
    assert_refused(add, f"add_{kind}", right | dict(column_scale=W, row_scale=R), BRANCH)
    assert_refused(add, f"add_{kind}", right | dict(row_scale=R), RESIDUAL)
    with pytest.raises(ValueError, match=f"add_{kind}: dropout_p must lie between 0 and 1, got 1"):
        add(X, X, 6, dropout_p=1.5)


def test_branches_alone():
    def add_dropout(weight=None, **tensors):
        return functional.add_dropout(**tensors, p=0.0)

    right = dict(input=X, residual=X, column_scale=W, row_scale=R)
    assert_refused(add_dropout, "add_dropout", right, RESIDUAL | BRANCH)
    with pytest.raises(ValueError, match="add_dropout: p must lie between 0 and 1, got 2"):
        functional.add_dropout(X, X, 2, column_scale=W)
    for p in (-0.1, 1.5, float("nan")):
        message = f"drop_path_scale: drop_prob must lie between 0 and 1, got {p}"
        with pytest.raises(ValueError, match=message):
            functional.drop_path_scale(X, p)
    one = torch.ones(())
    message = "^add_dropout: column_scale must not be given for one element, got one"
    with pytest.raises(RuntimeError, match=message):
        functional.add_dropout(one, one, 0.0, column_scale=one[None])


PER = "must have shape (2, 6), (2, 1, 6) or (2, 4, 6), got"


@kinds
def test_modulated_norms(kind):
    right = dict(input=X, normalized_shape=6, scale=S, shift=S, residual=X, gate=S)
    wrong = {
        "input must end in normalized_shape (5,), got shape (2, 4, 6)": dict(normalized_shape=5),
        f"input must {FLOAT} int64": dict(input=X.long()),
        f"scale {PER} (6,)": dict(scale=W),
        f"scale {PER} (1, 6)": dict(scale=S[:1]),
        "scale must have shape (2, 6), got (6,)": dict(
            input=X[:, 0], residual=None, gate=None, scale=W
        ),
        f"scale must {FLOAT} int32": dict(scale=S.int()),
        f"scale must be {META}": dict(scale=meta(S)),
        "shift must have shape (2, 6), got (2, 1, 6)": dict(shift=S[:, None]),
        f"shift must {BESIDE} input, got float64": dict(shift=S.double()),
        "gate must have shape (2, 6), got (2, 4, 6)": dict(gate=X),
        "gate must have dtype float64 like input, got float32": (
            dict(input=X.double(), residual=X.double(), scale=S.double(), shift=None)
        ),
        "gate must not be given without a residual, got one": dict(residual=None),
        "residual must have shape (2, 4, 6), got (4, 6)": dict(residual=X[0]),
    }
    op = f"modulated_{kind}"
    assert_refused(getattr(functional, op), op, right, wrong)


# ---- errors that only a direct call of the operators can make ------------------------------------


def refused_kind(op, right: dict) -> None:
    name, message = "norm: kind must be 0 (layer) or 1 (RMS), got 2".split(": ")
    assert_refused(op, name, right, {message: dict(kind=2)})


def test_the_operators_of_norms():
    right = dict(input=X, weight=W, kind=1)
    seed = "seed must be a dense int64 tensor of shape (2,) on cpu, got (3,) of float32 on cpu"
    wrong = {
        "bias must not be given, got one": dict(bias=W),
        "dropout_p must be 0 without a residual, got 0.5": dict(dropout_p=0.5, seed=SEED),
        f"out_dtype must {FLOAT} int8": dict(out_dtype=torch.int8),
    }
    assert_refused(raw_forward, "rms_norm", right, wrong)
    wrong = {
        "dropout_p must lie between 0 and 1, got 2": dict(dropout_p=2.0, seed=SEED),
        "seed must be given with dropout_p > 0 only, got none": dict(dropout_p=0.5),
        seed: dict(dropout_p=0.5, seed=torch.zeros(3)),
    }
    assert_refused(raw_forward, "add_rms_norm", right | dict(residual=X), wrong)
    refused_kind(raw_forward, right)
    right = dict(doutput=X, x=X, weight=W, bias=W, mean=ROWS, rstd=ROWS)
    wrong = {
        f"x must {FLOAT} int64": dict(x=X.long()),
        "x must end in normalized_shape (5,), got shape (2, 4, 6)": dict(normalized_shape=[5]),
        f"input_dtype must {FLOAT} int32": dict(input_dtype=torch.int32),
        f"input_dtype must {BESIDE} x, got float64": dict(input_dtype=torch.float64),
        f"residual_dtype must {FLOAT} bool": dict(residual_dtype=torch.bool),
        "weight must have shape (6,), got (5,)": dict(weight=W[:5]),
        "bias must have shape (6,), got (1, 6)": dict(bias=W[None]),
        "dropout_p must lie between 0 and 1, got -1": dict(dropout_p=-1.0),
        "doutput must have shape (2, 4, 6), got (6,)": dict(doutput=W),
        "dresidual_out must have dtype float32 like x, got bfloat16": (
            dict(dresidual_out=X.bfloat16())
        ),
        "rstd must have shape (2, 4), got (6,)": dict(rstd=W),
        "mean must have dtype float32, got bfloat16": dict(mean=ROWS.bfloat16()),
        "seed must be given with dropout_p > 0 only, got one": dict(seed=SEED),
    }
    assert_refused(raw_backward, "layer_norm_backward", right, wrong)


def test_the_operators_of_modulated_norms():
    right = dict(input=X, scale=None, shift=None, residual=X, gate=W, normalized_shape=[6], kind=0)
    right |= dict(eps=1e-5, out_dtype=None, save_statistics=True, weight_offset=0.0, shared=True)
    for name, wrong in {
        "add_layer_norm": {
            "column_scale must not be given without a residual, got one": dict(residual=None),
            "row_scale must not be given without a residual, got one": (
                dict(residual=None, gate=None, row_scale=R)
            ),
            "seed must be given with dropout_p > 0 only, got one": dict(seed=SEED),
            "weight must have shape (6,), got (2,)": dict(scale=R),
        },
        "add_rms_norm": {"bias must not be given, got one": dict(shift=W, kind=1)},
        "modulated_layer_norm": {
            "scale must be given, got none": dict(gate=None, shared=False),
            "row_scale must not be given without a residual, got one": (
                dict(scale=S, gate=None, residual=None, row_scale=R, shared=False)
            ),
        },
    }.items():
        assert_refused(RAW.modulated_norm_forward, name, right, wrong)
    right = dict.fromkeys(("dresidual_out", "shift", "branch", "gate"))
    right |= dict.fromkeys(("input_dtype", "residual_dtype"))
    right |= dict(x=X, scale=S, doutput=X, mean=ROWS, rstd=ROWS)
    right |= dict(normalized_shape=[6], kind=0, grad_mask=31)
    wrong = {
        "doutput must have shape (2, 4, 6), got (2, 6)": dict(doutput=S),
        f"scale {PER} (4, 6)": dict(scale=X[0]),
        "scale must be given, got none": dict(scale=None),
        "branch must have shape (2, 4, 6), got (2, 6)": dict(branch=S, gate=S),
        "branch must be given with a gate only, got one": dict(branch=X),
        "branch must be given with a gate only, got none": dict(gate=S),
        "dresidual_out must have dtype float32 like x, got bfloat16": (
            dict(dresidual_out=X.bfloat16())
        ),
        "rstd must have shape (2, 4), got (2,)": dict(rstd=R),
    }
    backward = RAW.modulated_norm_backward
    assert_refused(backward, "modulated_layer_norm_backward", right, wrong)
    refused_kind(backward, right)


def test_the_operators_of_branches():
    right = dict(column_scale=W, row_scale=R, seed=None, p=0.0)
    wrong = {
        "p must lie between 0 and 1, got 1.5": dict(p=1.5),
        "seed must be given with p > 0 only, got none": dict(p=0.5),
        "seed must be given with p > 0 only, got one": dict(seed=SEED),
        f"out_dtype must {BESIDE} input, got float64": dict(out_dtype=torch.float64),
    }
    forward = right | dict(input=X, residual=X, out_dtype=None)
    assert_refused(RAW.branch_forward, "add_dropout", forward, wrong)
    wrong = {
        "column_scale must be given for its gradient, got none": dict(column_scale=None),
        "branch must be given for column_scale's gradient, got none": dict(branch=None),
        "branch must have shape (2, 4, 6), got (4, 6)": dict(branch=X[0]),
        "row_scale must have shape (2,), got (6,)": dict(row_scale=W),
    }
    backward = right | dict(doutput=X, branch=X, input_dtype=None, grad_mask=3)
    assert_refused(RAW.branch_backward, "add_dropout_backward", backward, wrong)


# ---- other ------------------------------------------------------------------------------------


def test_an_offset_needs_a_weight():
    for op, tensors in (("rms_norm", (X,)), ("add_rms_norm", (X, X))):
        message = f"^{op}: weight_offset must be 0 without a weight, got 1.0"
        with pytest.raises(ValueError, match=message):
            getattr(functional, op)(*tensors, 6, weight_offset=1.0)
    with pytest.raises(ValueError, match="weight_offset must be 0 without a weight"):
        onepass.nn.AddRMSNorm(6, elementwise_affine=False, weight_offset=1.0)(X, X)


def test_a_parameter_on_meta_is_checked_like_any_tensor():
    parameter = torch.nn.Parameter(meta(X))
    with pytest.raises(RuntimeError, match="^add_dropout: residual must have shape"):
        functional.add_dropout(parameter, meta(R), 0.5)
    for kind in KINDS:
        with pytest.raises(RuntimeError, match=rf"^{kind}: input must end in normalized_shape \(5"):
            getattr(functional, kind)(parameter, 5)
