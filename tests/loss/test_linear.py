"""linear_cross_entropy: values and gradients by the numerics rule, layouts, extremes, memory."""

import math

import pytest
import torch

import onepass
from onepass import numerics
from onepass._ops.linear_loss import on_torchs_products
from tests.loss.cases import (
    IGNORED,
    OPTIONS,
    RAW,
    check,
    dtypes,
    leaves,
    make_linear,
    options,
    results,
)
from tests.support.allocations import peak
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.results import assert_same_bits

isa = pytest.mark.isa
NAN, INF = float("nan"), float("inf")

# Of chunks: 256 rows in float32, 512 in 16 bits, 128 in float64.
ROWS = {F32: 600, BF16: 1100, F16: 1100, F64: 300}


@isa
@options
@dtypes
def test_values_and_gradients(dtype, option):
    check(*(make_linear(20, 24, 190, dtype, **OPTIONS[option], seed=seed) for seed in range(4)))


@isa
@dtypes
@pytest.mark.parametrize("option", ["mean", "none"])
def test_several_chunks(dtype, option):
    """Each adds to the gradients of the layer."""
    check(make_linear(ROWS[dtype], 40, 67, dtype, **OPTIONS[option]))


@dtypes
@pytest.mark.parametrize("rows, in_features, classes", [(1, 7, 33), (3, 1, 5), (20, 9, 1)])
def test_small_sizes(dtype, rows, in_features, classes):
    for bias in (True, False):
        sizes = (rows, in_features, classes, dtype)
        check(*(make_linear(*sizes, bias=bias, seed=seed) for seed in range(8)))


@pytest.mark.parametrize("wide", [F32, F16], ids=str)
def test_a_layer_of_another_dtype(wide):
    """torch refuses it; its gradients have the layer's dtype."""
    case = make_linear(30, 16, 50, BF16)
    base = results(case.torchs, case)
    case.linear_weight, case.linear_bias = case.linear_weight.to(wide), case.linear_bias.to(wide)
    found, exact = results(case.ours, case), results(case.formula, case, double=True)
    assert found["dlinear_weight"].dtype is wide and found["dinput"].dtype is BF16
    for name, tensor in found.items():
        numerics.assert_close(tensor, exact[name], base[name], name)


def test_small_probabilities_in_float16():
    """Gradients that float16 cannot hold without the scaler's factor."""
    case = make_linear(64, 16, 5000, F16, ignored=False)
    case.dloss = torch.tensor(32768.0)
    check(case)
    assert results(case.ours, case)["dinput"].abs().max() > 0.01


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor, z_loss", [(300.0, 0.0), (1.0, 0.5), (0.0, 1e-4)])
def test_large_gradients_in_float16(factor, z_loss, reduction):
    """Class weights and z_loss leave float16 less room for a factor."""
    case = make_linear(64, 16, 50, F16, reduction=reduction, weighted=True, z_loss=z_loss)
    case.weight *= factor
    if not factor:
        case.weight[1:] = 1
    case.weight[case.target[0]] = NAN if z_loss else INF
    case.target[case.target == case.target[0]] = IGNORED  # a class without rows
    case.input, case.dloss = case.input * 8, torch.tensor(0.25)
    check(case)
    found = results(case.ours, case)
    assert all(found[f"d{name}"].isfinite().all() for name in case.operands)


@pytest.mark.parametrize("option", ["mean", "none"])
def test_frozen_operands_cost_no_products(option):
    case = make_linear(300, 16, 50, **OPTIONS[option])
    products = {"input": "dinput", "linear_weight": "dweight", "linear_bias": "dbias"}
    for wanted in case.operands:

        def run(wanted=wanted):
            given = {n: t.detach().requires_grad_(n == wanted) for n, t in case.operands.items()}
            torch.autograd.grad(case.ours(**given), given[wanted], case.dloss)

        text = str(onepass.explain(run))
        for name, product in products.items():
            assert (f"linear_backward: {product}" in text) == (name == wanted), text
    text = str(onepass.explain(lambda: case.ours(**case.operands)))
    assert "linear (" in text and "backward" not in text


def test_a_gradient_is_what_it_is_alone():
    """An upstream gradient of 1 scales exactly."""
    case = make_linear(40, 16, 50)
    case.dloss = torch.ones(())
    one = results(case.ours, case)
    case.dloss = torch.tensor(4.0)
    found = results(case.ours, case)
    assert all(torch.equal(found[name], 4 * one[name]) for name in one if name != "loss")


def test_a_backward_frees_what_is_kept():
    case = make_linear(40, 16, 50)
    given = leaves(case)
    loss = case.ours(**given)
    torch.autograd.grad(loss, given.values(), case.dloss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given.values(), case.dloss)


@dtypes
def test_empty(dtype):
    for option in ("sum", "none"):
        case = make_linear(0, 8, 10, dtype, **OPTIONS[option])
        found, expected = results(case.ours, case), results(case.torchs, case)
        assert_same_bits(found, expected, case.text)
    case = make_linear(5, 8, 10, dtype)
    case.input, case.linear_weight = case.input[:, :0], case.linear_weight[:, :0]
    check(case)
    empty = make_linear(0, 8, 10, dtype)
    assert math.isnan(empty.ours(**empty.operands))


# ---- extremes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_ignored_rows_reach_no_loss(value):
    """And no gradient except the weight's, whose sums have 0 times the row, as torch's."""
    case = make_linear(10, 8, 30, reduction="none")
    expected = results(case.ours, case)
    case.input[case.target == IGNORED] = value
    found, torchs = results(case.ours, case), results(case.torchs, case)
    assert found.pop("dlinear_weight").isnan().all() and torchs["dlinear_weight"].isnan().all()
    del expected["dlinear_weight"]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_infinity_propagate(name, value):
    case = make_linear(10, 8, 30, ignored=False)
    getattr(case, name).view(-1)[3] = value
    found, expected = results(case.ours, case), results(case.torchs, case, double=True)
    for key, tensor in found.items():
        assert torch.equal(tensor.isnan(), expected[key].isnan()), key


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_large_and_small_logits(scale):
    case = make_linear(300, 8, 200)
    case.input = case.input * scale
    check(case)


# ---- torch's products, as on CUDA ----------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("option", ["mean", "all"])
def test_on_torchs_products(dtype, option, monkeypatch):
    """The code for CUDA tensors, run on CPU tensors."""
    monkeypatch.setattr("onepass._ops.linear_loss.CHUNK_BYTES", 0)
    case = make_linear(600, 24, 70, dtype, **OPTIONS[option])
    expected = results(case.ours, case)
    monkeypatch.setattr("onepass._ops.linear_loss._op", on_torchs_products)
    found, exact = results(case.ours, case), results(case.formula, case, double=True)
    base = results(case.torchs, case)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        numerics.assert_close(tensor, exact[name], base[name], f"{case.text}: {name}")


def test_sums_beyond_float16_on_torchs_products(monkeypatch):
    """Sums of the scaled gradients of many rows of one class."""
    monkeypatch.setattr("onepass._ops.linear_loss._op", on_torchs_products)
    case = make_linear(600, 8, 30, F16, ignored=False)
    case.input, case.target[:] = case.input.abs(), 3
    case.dloss = torch.ones((), dtype=F16)
    check(case)


# ---- memory --------------------------------------------------------------------------------------


def step(function, case):
    leaves = [tensor.detach().requires_grad_() for tensor in case.operands.values()]

    def run():
        function(*leaves).backward()

    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        held = peak(run)
    return held


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_logits_are_never_whole(dtype):
    """Memory: a chunk of logits, each thread's packed operands, and gradients in float32 until the
    backward."""
    case = make_linear(2048, 32, 4096, dtype, bias=False)
    logits, chunk = 2048 * 4096 * dtype.itemsize, 4096 * 1024
    gradients = sum(t.numel() * 4 for t in case.operands.values())
    rounded = 0 if dtype is F32 else gradients // 2
    packed = torch.get_num_threads() * (2 << 20)
    ours, torchs = step(case.ours, case), step(case.torchs, case)
    assert torchs > 3 * logits and ours < chunk + gradients + rounded + packed < logits
    if dtype is F32:
        assert ours < torchs / 10
    with torch.no_grad():
        assert peak(case.ours, *case.operands.values()) < chunk + packed


def test_losses_of_rows_are_those_of_the_raw_operator():
    case = make_linear(7, 8, 30, BF16, reduction="none")
    arguments = (case.input, case.linear_weight, case.target, case.linear_bias, None)
    loss, *gradients = RAW.linear_loss(*arguments, -100, 0.0, 0.0, 0.0, None, 0)
    assert loss.dtype is F32 and all(t.shape == (0,) for t in gradients)
    assert torch.equal(loss.bfloat16(), case.ours(*arguments[:2], case.linear_bias))


@isa
@dtypes
@pytest.mark.parametrize("option", [{}, {"z_loss": 1e-4}, {"z_loss": 1e-4, "label_smoothing": 0.1}])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.grid(2)
def test_certain_rows(reduction, option, dtype):
    """The gradient of z_loss is all there is, and p is rounded beside 1.

    By the float64 reference too, which is therefore exact enough of less certain rows alone.
    """
    draws = range(8)
    cases = [make_linear(8, 16, 2, dtype, seed=s, reduction=reduction, **option) for s in draws]
    for case in cases:
        case.linear_bias[:] = torch.tensor([8.0 if dtype is F64 else 20.0, 0.0])
        case.target[:] = 0
    check(*cases)
