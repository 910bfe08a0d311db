"""Both losses with torch: compile, vmap, autocast, checkpoints, copies, `explain`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import functional, numerics
from tests.loss.cases import OPTIONS, dtypes, leaves, make, make_linear, results, small
from tests.support.dtypes import BF16, F16


def test_in_place_has_no_effect_under_compile():
    def step(x, target):
        return functional.cross_entropy(x, target, inplace_backward=True)

    case = make(4, 16)
    leaf = leaves(case)["input"]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(leaf, case.target), leaf, case.dloss)
    assert torch.equal(leaf, case.input)
    assert torch.equal(gradient, results(case.ours, case)["dinput"])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("option", ["mean", "all"])
@small
def test_vmap_over_targets_too(small, option):
    case = small(**OPTIONS[option])
    x = torch.stack([case.input, case.input.sin()])
    targets = torch.stack([case.target, case.target.flip(0)])
    layer = {name: t for name, t in case.operands.items() if name != "input"}
    more = {} if layer else {"inplace_backward": True}

    def loss(x, target, of="ours", **more):
        moved = copy.copy(case)
        moved.target = target
        return getattr(moved, of)(x, **layer, weight=case.weight, **more).sum()

    def gradients(**of):
        return torch.func.vmap(torch.func.grad(lambda x, t: loss(x, t, **of)))(x, targets)

    torch.testing.assert_close(gradients(**more), gradients(of="formula"))
    values = [torch.func.vmap(lambda x, t: loss(x, t, of=of))(x, targets)
              for of in ("ours", "formula")]  # fmt: skip
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_in_place(use_reentrant):
    layer, target = torch.nn.Linear(8, 12), torch.tensor([3, 11, -100, 0])
    loss = onepass.nn.CrossEntropyLoss(inplace_backward=True)
    found = []

    def module(x, target):
        return loss(layer(x), target)

    for call in (module, lambda *x: checkpoint(module, *x, use_reentrant=use_reentrant)):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        call(x, target).backward()
        found.append(x.grad)
    assert torch.equal(*found)


@small
def test_saved_tensors_elsewhere(small):
    """Hooks give the backward a copy, and it overwrites that copy."""
    case = small()
    operands = leaves(case)
    more = {} if len(operands) > 1 else {"inplace_backward": True}
    with torch.autograd.graph.save_on_cpu():
        loss = case.ours(**{n: t * 1.0 for n, t in operands.items()}, **more)
    gradients = torch.autograd.grad(loss, list(operands.values()), case.dloss)
    expected = results(case.ours, case)
    for name, gradient in zip(operands, gradients, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name


@dtypes
@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
@pytest.mark.parametrize("option", ["smoothed", "none"])
@pytest.mark.grid(2)
def test_autocast(option, dtype, cast):
    """torch's dtypes; errors of that dtype, of gradients too, which are not rounded to it."""
    draws = []
    for seed in range(6):
        case = make_linear(40, 16, 30, dtype, seed=seed, **OPTIONS[option])
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


def test_tensors_with_products_of_their_own():
    """Their logits are made whole."""

    class Own(torch.Tensor):
        pass

    case = make_linear(30, 8, 40)
    plain = case.linear_weight
    found = case.ours(case.input, plain.as_subclass(Own))
    exact = case.formula(case.input.double(), plain.double())
    numerics.assert_close(found.as_subclass(torch.Tensor), exact, case.torchs(case.input, plain))


# ---- as modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"weight": torch.arange(1.0, 10.0)}, {"ignore_index": 2, "label_smoothing": 0.1},
     {"reduction": "sum"}, {"size_average": False}, {"reduce": False}],
    ids=lambda arguments: ", ".join(arguments) or "none",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_modules_are_torchs(arguments):
    ours, torchs = (nn.CrossEntropyLoss(**arguments) for nn in (onepass.nn, torch.nn))
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    x, target = torch.randn(6, 9), torch.randint(9, (6,))
    base, exact = torchs(x, target), torchs.double()(x.double(), target)
    numerics.assert_close(ours(x, target), exact, base)


def test_modules_with_options():
    case = make(6, 40, softcap=2.0, z_loss=0.1)
    module = onepass.nn.CrossEntropyLoss(softcap=2.0, z_loss=0.1, inplace_backward=True)
    assert repr(module) == "CrossEntropyLoss(softcap=2.0, z_loss=0.1, inplace_backward=True)"
    x = case.input.clone().requires_grad_() * 1.0
    loss = module(x, case.target)
    assert torch.equal(loss, case.ours(case.input))
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.data_ptr() == x.data_ptr()


def test_modules_leave_to_torch_what_is_torchs():
    x, target = torch.randn(6, 9, 4), torch.randint(9, (6, 4))
    probabilities = torch.rand(6, 9)
    for logits, of in ((x, target), (x[..., 0], probabilities)):
        found = onepass.nn.CrossEntropyLoss()(logits, of)
        assert torch.equal(found, F.cross_entropy(logits, of))
    with pytest.raises(RuntimeError, match="cross_entropy: target must have dtype int64"):
        onepass.nn.CrossEntropyLoss(softcap=2.0)(x[..., 0], probabilities)
    with pytest.raises(RuntimeError, match="cross_entropy: input must have shape"):
        onepass.nn.CrossEntropyLoss(z_loss=0.1)(x, target)


def test_modules_with_a_layer():
    options = dict(weight=torch.rand(9), label_smoothing=0.1, ignore_index=2, bias=True)
    ours = onepass.nn.LinearCrossEntropyLoss(5, 9, **options)
    logits = torch.nn.CrossEntropyLoss(options["weight"], ignore_index=2, label_smoothing=0.1)
    assert list(ours.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    x, target = torch.randn(6, 5), torch.randint(9, (6,))
    base = logits(ours.linear(x), target)
    exact = logits.double()(ours.double().linear(x.double()), target)
    numerics.assert_close(ours.float()(x, target), exact, base)
    more = {"softcap": 2.0, "z_loss": 0.1, "reduction": "none"}
    capped = onepass.nn.LinearCrossEntropyLoss(5, 9, **more)
    expected = functional.linear_cross_entropy(x, capped.linear.weight, target, **more)
    assert torch.equal(capped(x, target), expected)


def test_ignore_index_is_torchs_by_default():
    """None, of the function as of the module: rows of -100 do not count."""
    hidden, target = torch.randn(5, 8), torch.tensor([1, -100, 3, 0, -100])
    layer = onepass.nn.LinearCrossEntropyLoss(8, 6, ignore_index=-100)
    expected = layer(hidden, target)
    for given in ({}, {"ignore_index": None}):
        module = onepass.nn.LinearCrossEntropyLoss(8, 6, **given)
        module.load_state_dict(layer.state_dict())
        weight = layer.linear.weight
        found = functional.linear_cross_entropy(hidden, weight, target, **given)
        assert torch.equal(module(hidden, target), expected) and torch.equal(found, expected)
        rows = functional.linear_cross_entropy(hidden, weight, target, reduction="none", **given)
        assert (rows == 0).tolist() == [False, True, False, False, True]
