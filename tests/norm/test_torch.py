"""The norm family inside torch: errors, modules, autograd's second derivative, fakes, compile,
export, autocast."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import onepass
from onepass import functional
from tests.norm.cases import kinds, make, raw_backward, raw_forward

# ---- errors: `<op>: <argument> must <rule>, got <value>`, with data and without ------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_messages(device, rms):
    check_messages(device, rms)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 6)
        some = x[x[:, 0] > 0]
        y, out = functional.add_rms_norm(some, some, (6,), torch.ones(6))
    assert y.shape == out.shape == some.shape and some.shape[0].node.hint is None


def check_messages(device, rms, devices=True):
    op = "rms_norm" if rms else "layer_norm"
    norm, add_norm = getattr(functional, op), getattr(functional, f"add_{op}")
    x = torch.randn(4, 6, device=device)
    other = "meta" if device == "cpu" else "cpu"
    wrong = {
        rf"{op}: input must end in normalized_shape \(5,\), got shape \(4, 6\)": lambda: norm(x, 5),
        rf"{op}: input must end in normalized_shape \(1, 4, 6\), got shape \(4, 6\)": (
            lambda: norm(x, (1, 4, 6))
        ),
        rf"{op}: normalized_shape must have at least one dimension, got \(\)": lambda: norm(x, ()),
        rf"{op}: weight must have shape \(6,\), got \(5,\)": (
            lambda: norm(x, 6, torch.ones(5, device=device))
        ),
        rf"{op}: input must have dtype float32, bfloat16, float16 or float64, got int64": (
            lambda: norm(x.long(), 6)
        ),
        rf"{op}: weight must have dtype float32, bfloat16, float16 or float64, got int32": (
            lambda: norm(x, 6, torch.ones(6, device=device, dtype=torch.int32))
        ),
        rf"{op}: weight must have dtype float32, bfloat16 or float16 beside input, got float64": (
            lambda: norm(x, 6, torch.ones(6, device=device).double())
        ),
        rf"{op}: weight must have dtype float64 like input, got float32": (
            lambda: norm(x.double(), 6, torch.ones(6, device=device))
        ),
        rf"{op}: weight must be on the device of input, {device}, got {other}": (
            lambda: norm(x, 6, torch.ones(6, device=other))
        ),
        rf"add_{op}: residual must have shape \(4, 6\), got \(3, 6\)": (
            lambda: add_norm(x, x[:3], 6)
        ),
        rf"add_{op}: residual must be on the device of input, {device}, got {other}": (
            lambda: add_norm(x, torch.ones(4, 6, device=other), 6)
        ),
        rf"add_{op}: residual_dtype must have dtype float32, .* got int64": (
            lambda: add_norm(x, x, 6, residual_dtype=torch.int64)
        ),
    }
    if not rms:
        wrong[r"layer_norm: bias must have shape \(6,\), got \(2, 6\)"] = lambda: norm(
            x, 6, None, torch.ones(2, 6, device=device)
        )
    for message, call in wrong.items():
        if "on the device of" in message and not devices:
            continue
        if "meta" in message and "cpu" in message and device == "cpu":
            message = message.replace("device of input, cpu, got meta", "device of input, .*")
        with pytest.raises(RuntimeError, match=f"^{message}"):
            call()


def test_raw_op_messages():
    """Errors that only a direct call of the raw ops can make."""
    x, w, seed = torch.randn(4, 6), torch.ones(6), torch.zeros(2, dtype=torch.int64)
    statistics = torch.zeros(4)
    right = dict(doutput=x, x=x, weight=w, mean=statistics, rstd=statistics)

    def forward(**changes):
        return raw_forward(**{"input": x, "weight": w, "kind": 1} | changes)

    def backward(**changes):
        return raw_backward(**right | changes)

    wrong = {
        "rms_norm: bias must not be given, got one": lambda: forward(bias=w),
        r"norm: kind must be 0 \(layer\) or 1 \(RMS\), got 2": lambda: forward(kind=2),
        "rms_norm: dropout_p must be 0 without a residual, got 0.5": lambda: forward(
            dropout_p=0.5, seed=seed
        ),
        "add_rms_norm: dropout_p must lie between 0 and 1, got 2": lambda: forward(
            residual=x, dropout_p=2.0, seed=seed
        ),
        "add_rms_norm: seed must be given with dropout_p > 0 only, got none": lambda: forward(
            residual=x, dropout_p=0.5
        ),
        r"add_rms_norm: seed must be a dense int64 tensor of shape \(2,\) on cpu, got \(3,\)": (
            lambda: forward(residual=x, dropout_p=0.5, seed=torch.zeros(3))
        ),
        "rms_norm: out_dtype must have dtype float32, bfloat16, float16 or float64, got int8": (
            lambda: forward(out_dtype=torch.int8)
        ),
        r"layer_norm_backward: doutput must have shape \(4, 6\), got \(6,\)": lambda: backward(
            doutput=w
        ),
        "layer_norm_backward: dresidual_out must have dtype float32 like x, got bfloat16": (
            lambda: backward(dresidual_out=x.bfloat16())
        ),
        r"layer_norm_backward: rstd must have shape \(4,\), got \(6,\)": lambda: backward(rstd=w),
        r"layer_norm_backward: mean must have dtype float32, got bfloat16": lambda: backward(
            mean=statistics.bfloat16()
        ),
        "layer_norm_backward: seed must be given with dropout_p > 0 only, got one": lambda: (
            backward(seed=seed)
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=f"^{message}"):
            call()


def test_dropout_p_out_of_range_is_a_value_error():
    x = torch.randn(2, 4)
    for op in ("add_layer_norm", "add_rms_norm"):
        with pytest.raises(ValueError, match=f"{op}: dropout_p must lie between 0 and 1, got 1.5"):
            getattr(functional, op)(x, x, 4, dropout_p=1.5)


# ---- modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("keywords", [{}, {"elementwise_affine": False}, {"eps": 1e-3}])
def test_modules_are_torchs(name, keywords):
    stock = getattr(torch.nn, name)((3, 8), **keywords)
    ours = getattr(onepass.nn, name)((3, 8), **keywords)
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(ours) == repr(stock)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(ours(x), stock(x))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours)
        assert torch.equal(twin(x), ours(x))


def test_layer_norm_module_without_bias():
    ours = onepass.nn.LayerNorm(8, bias=False)
    assert list(ours.state_dict()) == ["weight"]
    x = torch.randn(5, 8)
    torch.testing.assert_close(ours(x), F.layer_norm(x, (8,), ours.weight))


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_add_modules(name):
    module = getattr(onepass.nn, name)(16, dropout_p=0.5, residual_dtype=torch.float32)
    assert list(module.state_dict()) == list(getattr(torch.nn, name[3:])(16).state_dict())
    assert "dropout_p=0.5" in repr(module)
    x, r = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    torch.manual_seed(1)
    y, stream = module(x, r)
    assert y.dtype is torch.bfloat16 and stream.dtype is torch.float32
    assert ((stream - r) == 0).any() and not torch.equal(stream, r)
    module.eval()
    _, stream = module(x, r)
    assert torch.equal(stream, r + x)


# ---- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_sum_alone_gives_the_weight_no_gradient(kind):
    """None, as with torch's operators, and not zeros, which an optimizer would take for one."""
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, requires_grad=True)
    _, total = getattr(functional, f"add_{kind}_norm")(x, residual, (8,), weight)
    total.sum().backward()
    assert weight.grad is None and x.grad is not None and residual.grad is not None


def test_gradient_penalty_in_float32_and_16_bit():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 32, dtype=dtype, requires_grad=True)
        w = torch.randn(32, dtype=dtype, requires_grad=True)

        def penalty(norm, x=x, w=w):
            (g,) = torch.autograd.grad(norm(x, (32,), w).pow(2).sum(), x, create_graph=True)
            return torch.autograd.grad(g.pow(2).sum(), (x, w))

        for ours, stock in zip(penalty(functional.rms_norm), penalty(F.rms_norm), strict=True):
            assert ours.dtype == dtype
            scale = stock.abs().max()
            assert (ours - stock).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1) * scale


@kinds
def test_saved_for_backward(rms, residual):
    """One tensor of rows, the weight, one or two statistics per row and a seed: no mask."""
    saved = []
    case = make(rms, 100, 64, residual=residual)
    tensors = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}
    case.dropout_p = 0.1 if residual else 0.0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = case.ours(**tensors)
    own = {id(t) for t in tensors.values()} | {t.data_ptr() for t in (*tensors.values(), *outputs)}
    extra = sum(t.numel() for t in saved if id(t) not in own and t.data_ptr() not in own)
    assert extra <= 2 * 100 + 2
