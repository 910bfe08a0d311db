"""linear_cross_entropy with torch: gradcheck, opcheck, compile, export, vmap, autocast."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing

import onepass
from onepass import functional, numerics
from tests.loss.cases import BF16, F16, F32, OPTIONS, dtypes
from tests.loss.linear_cases import check, make, results

SOME = pytest.mark.parametrize("option", ["mean", "all", "none"])


def leaves(case):
    return {name: t.detach().clone().requires_grad_() for name, t in case.operands.items()}


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(8, 6)
        self.loss = onepass.nn.LinearCrossEntropyLoss(6, 12, bias=True, **options)

    def forward(self, x, target):
        return self.loss(self.layer(x), target)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@SOME
def test_vmap(option):
    case = make(5, 4, 8, **OPTIONS[option])
    x = torch.stack([case.input, case.input.sin()])
    targets = torch.stack([case.target, case.target.flip(0)])
    layer = (case.linear_weight, case.linear_bias)

    def loss(x, target, function=functional.linear_cross_entropy):
        of = dict(linear_bias=layer[1], weight=case.weight, **case.options)
        return function(x, layer[0], target, **of).sum()

    def formula(x, target):
        logits = x @ layer[0].t() + layer[1]
        loss = onepass.reference.loss.cross_entropy
        return loss(logits, target, case.weight, **case.options).sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(x, targets)
    expected = torch.func.vmap(torch.func.grad(formula))(x, targets)
    torch.testing.assert_close(mapped, expected)
    torch.testing.assert_close(
        torch.func.vmap(loss)(x, targets), torch.func.vmap(formula)(x, targets)
    )
    outside = torch.func.grad(lambda x: torch.func.vmap(loss)(x, targets).sum())
    torch.testing.assert_close(outside(x), expected)


@dtypes
@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
@pytest.mark.parametrize("option", ["smoothed", "none"])
def test_autocast(option, dtype, cast):
    """torch's dtypes; errors of that dtype, of gradients too, which are not rounded to it."""
    draws = []
    for seed in range(6):
        case = make(40, 16, 30, dtype, seed=seed, **OPTIONS[option])
        found = [results(case.formula, case, double=True)]
        for function in (case.ours, case.torchs):
            operands = leaves(case)
            with torch.autocast("cpu", dtype=cast):
                loss = function(**operands)
            gradients = torch.autograd.grad(loss, operands.values(), case.dloss.to(loss.dtype))
            found.append(dict(zip(found[0], [loss.detach(), *gradients], strict=True)))
        draws.append(found)
    for name in draws[0][0]:
        exact, ours, base = ([draw[which][name] for draw in draws] for which in range(3))
        assert ours[0].dtype == base[0].dtype, name
        numerics.assert_close(ours, exact, base, name)


def test_saved_tensors_elsewhere():
    case = make(40, 8, 20)
    operands = leaves(case)
    with torch.autograd.graph.save_on_cpu():
        loss = case.ours(**operands)
    gradients = torch.autograd.grad(loss, operands.values(), case.dloss)
    expected = results(case.ours, case)
    for name, gradient in zip(operands, gradients, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name


def test_copies_of_the_module():
    module = onepass.nn.LinearCrossEntropyLoss(4, 8, weight=torch.rand(8), softcap=2.0, z_loss=0.1)
    case = make(3, 4, 8)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(case.input, case.target), module(case.input, case.target))
        assert (twin.softcap, twin.z_loss) == (2.0, 0.1)


def test_tensors_with_products_of_their_own():
    """Their logits are made whole."""

    class Own(torch.Tensor):
        pass

    case = make(30, 8, 40)
    plain = case.linear_weight
    case.linear_weight = plain.as_subclass(Own)
    found = case.ours(case.input, case.linear_weight)
    case.linear_weight = plain
    exact = case.formula(case.input.double(), plain.double())
    numerics.assert_close(found.as_subclass(torch.Tensor), exact, case.torchs(case.input, plain))


def test_explain_names_the_kernels():
    case = make(600, 16, 64)
    text = str(onepass.explain(lambda: results(case.ours, case)))
    for line in (
        "3 x linear (200 x 16 by 16 x 64, float32 by float32, output float32)",
        "3 x cross_entropy (200 x 64, float32, none)",
        "3 x cross_entropy_backward_inplace (200 x 64, float32, none)",
        "3 x linear_backward: dinput (200 x 64 by 64 x 16",
        "3 x linear_backward: dweight (64 x 200 by 200 x 16",
    ):
        assert line in text, text


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients_are_accumulated(dtype):
    case = make(600, 16, 64, dtype)
    expected = results(case.ours, case)
    layer = case.linear_weight.clone().requires_grad_()
    for _ in range(2):
        case.ours(case.input, layer, case.linear_bias).backward(case.dloss)
    assert torch.equal(layer.grad, 2 * expected["dlinear_weight"])


def test_modules_of_a_model():
    check(make(30, 16, 64, F32, bias=False))
    module = Model()
    x, target = torch.randn(9, 8), torch.arange(9)
    module(x, target).backward()
    logits = module.loss.linear(module.layer(x))
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, target), list(module.parameters())
    )
    torch.testing.assert_close([p.grad for p in module.parameters()], list(expected))


def test_ignore_index_is_torchs_by_default():
    """None, of the function as of the module: rows of -100 do not count."""
    hidden, target = torch.randn(5, 8), torch.tensor([1, -100, 3, 0, -100])
    layer = onepass.nn.LinearCrossEntropyLoss(8, 6, ignore_index=-100)
    expected = layer(hidden, target)
    for given in ({}, {"ignore_index": None}):
        module = onepass.nn.LinearCrossEntropyLoss(8, 6, **given)
        module.load_state_dict(layer.state_dict())
        found = functional.linear_cross_entropy(hidden, layer.linear.weight, target, **given)
        assert torch.equal(module(hidden, target), expected)
        assert torch.equal(found, expected)
        rows = functional.linear_cross_entropy(
            hidden, layer.linear.weight, target, reduction="none", **given
        )
        assert (rows == 0).tolist() == [False, True, False, False, True]
