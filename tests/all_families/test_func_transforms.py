"""torch.func over the operators (vmap, grad, vjp, jacrev) and batched gradients, as over torch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch._vmap_internals import _vmap
from torch.func import grad, jacrev, vjp, vmap

from onepass import functional, numerics
from onepass._ops import optimizer
from onepass.reference import rotary
from tests.support.calls import CALLS, SAMPLES
from tests.support.seeds import set_seed
from tests.test_conventions import declared_ops

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

NAMES = [name for name, call in CALLS.items() if call.differentiable]
WEIGHT = torch.linspace(0.5, 1.5, 8)
WEIGHTS = torch.linspace(-1.0, 1.0, 64).view(8, 8).sin()


def weight(x):
    return WEIGHT.to(x.dtype)


def tables(x):
    return [table.to(x.dtype) for table in (WEIGHTS[: x.shape[-2]].cos(), WEIGHTS[: x.shape[-2]])]


def rows_of(loss, x):
    target = torch.arange(x.shape[:-1].numel()) % x.shape[-1]
    return x * loss(x.flatten(0, -2), target, reduction="none").view(*x.shape[:-1], 1)


def of_layer(loss):
    return lambda x, *rest, **options: loss(x, WEIGHTS.to(x.dtype), *rest, **options)


FUNCTIONS = {
    "layer_norm": (
        lambda x: functional.layer_norm(x, (8,), weight(x), weight(x)),
        lambda x: F.layer_norm(x, (8,), weight(x), weight(x)),
    ),
    "rms_norm": (
        lambda x: functional.rms_norm(x, (8,), weight(x)),
        lambda x: F.rms_norm(x, (8,), weight(x)),
    ),
    "add_layer_norm": (
        lambda x: functional.add_layer_norm(x, x.sin(), (8,), weight(x))[0],
        lambda x: F.layer_norm(x + x.sin(), (8,), weight(x)),
    ),
    "modulated_layer_norm": (
        lambda x: functional.modulated_layer_norm(x, (8,), x.sin(), x.cos()),
        lambda x: F.layer_norm(x, (8,)) * (1 + x.sin()) + x.cos(),
    ),
    "add_dropout": (
        lambda x: functional.add_dropout(x, x.sin(), 0.0),
        lambda x: x + x.sin(),
    ),
    "add_layer_norm of a scaled branch": (
        lambda x: functional.add_layer_norm(x, x.sin(), (8,), column_scale=weight(x))[0],
        lambda x: F.layer_norm(x * weight(x) + x.sin(), (8,)),
    ),
    "add_dropout of a scaled branch": (
        lambda x: functional.add_dropout(x, x.sin(), 0.0, column_scale=weight(x)),
        lambda x: x * weight(x) + x.sin(),
    ),
    "rotary_embedding": (
        lambda x: functional.rotary_embedding(x, None, *tables(x))[0],
        lambda x: rotary.rotary_embedding(x, None, *tables(x))[0],
    ),
    "silu_mul": (
        lambda x: functional.silu_mul(x, x.sin()),
        lambda x: F.silu(x) * x.sin(),
    ),
    "group_norm": (
        lambda x: functional.group_norm(x.reshape(-1, 8), 2, weight(x)).reshape(x.shape),
        lambda x: F.group_norm(x.reshape(-1, 8), 2, weight(x)).reshape(x.shape),
    ),
    "cross_entropy": (
        lambda x: rows_of(functional.cross_entropy, x),
        lambda x: rows_of(F.cross_entropy, x),
    ),
    "linear_cross_entropy": (
        lambda x: rows_of(of_layer(functional.linear_cross_entropy), x),
        lambda x: rows_of(
            of_layer(lambda x, w, *rest, **kw: F.cross_entropy(F.linear(x, w), *rest, **kw)), x
        ),
    ),
    "linear": (
        lambda x: functional.linear(x, WEIGHTS.to(x.dtype), weight(x)),
        lambda x: F.linear(x, WEIGHTS.to(x.dtype), weight(x)),
    ),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x.cos(), is_causal=True),
        lambda x: F.scaled_dot_product_attention(x, x, x.cos(), is_causal=True),
    ),
}
SHAPE = (3, 2, 2, 4, 8)  # vmap maps over the first dimension


@pytest.fixture(params=FUNCTIONS)
def functions(request):
    return FUNCTIONS[request.param]


def both(transform, functions, x):
    """Ours, transformed, is as exact as torch's function under the same transform."""
    ours, stock = functions
    base, ref = (transform(stock)(given).detach() for given in (x, x.detach().double()))
    numerics.assert_close(transform(ours)(x).detach(), ref, base)


@pytest.mark.parametrize("enabled", [False, True])
def test_vmap(functions, enabled):
    with torch.set_grad_enabled(enabled):
        both(vmap, functions, torch.randn(SHAPE))
        both(lambda f: vmap(f, in_dims=1, out_dims=1), functions, torch.randn(SHAPE))
        both(lambda f: vmap(vmap(f)), functions, torch.randn(2, *SHAPE))


def test_a_backward_through_vmap(functions):
    """Inside vmap a tensor does not show that it requires a gradient; none may be lost."""

    def gradient(function):
        def of(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(vmap(function)(x).pow(2).sum(), x)[0]

        return of

    both(gradient, functions, torch.randn(SHAPE))


def test_a_parameter_beside_vmap():
    """The input that is mapped over needs no gradient, the weight does."""
    x = torch.randn(SHAPE)

    def gradient(norm):
        def of(weight):
            weight = weight.clone().requires_grad_()
            given = x.to(weight.dtype)
            vmap(lambda x: norm(x, (8,), weight, eps=1e-6))(given).sin().sum().backward()
            return weight.grad

        return of

    both(gradient, (functional.rms_norm, F.rms_norm), WEIGHT)


def test_gradients_per_sample(functions):
    def of(function):
        return vmap(grad(lambda x: function(x).pow(2).sum()))

    both(of, functions, torch.randn(SHAPE))


def test_jacrev(functions):
    both(jacrev, functions, torch.randn(1, 1, 2, 8))


def test_vjp(functions):
    both(lambda f: lambda x: vjp(f, x)[1](torch.ones_like(x))[0], functions, torch.randn(SHAPE[1:]))


def test_dropout_under_vmap():
    x = torch.ones(4, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: functional.dropout(x, 0.5))(x)
    y = vmap(lambda x: functional.dropout(x, 0.5), randomness="different")(x)
    assert not torch.equal(y[0], y[1])
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, y)
    y = vmap(lambda x: functional.dropout(x, 0.5), randomness="same")(x)
    assert torch.equal(y[0], y[1])


# ---- every operator ------------------------------------------------------------------------------


def test_every_function_is_here():
    """Except those without a gradient."""
    without = {"attention_with_kv_cache", "drop_path_scale"}
    found = {name.split(" ")[0].removeprefix("functional.") for name in NAMES}
    assert set(functional.__all__) - found == without


def tensors_of(call):
    """In float64 where the call takes it, and which of them are differentiated."""
    given = call.typed(torch.float64)
    return given, call.wanted(given)


def drawn(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def seeded(call, given):
    """(a function of the differentiated tensors, which draws the same each time; these tensors)"""
    tensors, wanted = given

    def run(some):
        set_seed(3)
        return [r for r in call.run(**{**tensors, **some}) if r.is_floating_point()]

    return run, {name: tensors[name] for name in wanted}


def close(found, expected):
    """By the numerics rule, with the plain call as what is right: float64 within 1e-11 of its
    largest element, float32 within a unit in the last place of that."""
    for one, two in zip(found, expected, strict=True):
        assert one.dtype is two.dtype
        numerics.assert_close(one, two.double(), two)


@pytest.mark.parametrize("name", [name for name in SAMPLES if "in place" not in name])
def test_every_operator_under_vmap(name):
    """Slices, and their gradients, are those of plain calls."""
    call = SAMPLES[name]
    run, x = seeded(call, tensors_of(call))
    slices = [x, {name: drawn(tensor, 5) for name, tensor in x.items()}]
    stacked = {name: torch.stack([one[name] for one in slices]) for name in x}
    for function in (run, grad(lambda x: sum(r.sin().sum() for r in run(x)))):
        found = vmap(function, randomness="same")(stacked)
        for number, one in enumerate(slices):
            plain = function(one)
            values = (found, plain) if function is run else (found.values(), plain.values())
            close([tensor[number] for tensor in values[0]], values[1])


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_under_grad_and_jacrev(name):
    call = CALLS[name]
    run, x = seeded(call, tensors_of(call))

    def last(x):
        """Few numbers of each result: a row of the Jacobian is a backward."""
        return torch.cat([r.flatten()[-3:].double() for r in run(x)])

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    few = last(leaves)
    rows = [
        torch.autograd.grad(number, [*leaves.values()], retain_graph=True, materialize_grads=True)
        for number in few
    ]
    expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    assert any(column.any() for column in expected)
    close(jacrev(last)(x).values(), expected)
    close(grad(lambda x: last(x).sum())(x).values(), [column.sum(0) for column in expected])


# ---- the older vmap, of batched gradients --------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_batched_gradients(name):
    """`is_grads_batched=True` gives what backwards one by one give, with create_graph=True too."""
    call = CALLS[name]
    run, x = seeded(call, tensors_of(call))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    results = [result for result in run(leaves) if result.requires_grad]
    upstreams = [drawn(r.expand(3, *r.shape), 5) for r in results]

    def gradients(upstreams, **options):
        options |= {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(results, [*leaves.values()], upstreams, **options)

    one_by_one = [gradients([upstream[number] for upstream in upstreams]) for number in range(3)]
    expected = [torch.stack(column) for column in zip(*one_by_one, strict=True)]
    for create_graph in (False, True):
        found = gradients(upstreams, is_grads_batched=True, create_graph=create_graph)
        close([gradient.detach() for gradient in found], expected)


def test_batched_gradients_are_not_written_over_the_logits():
    x = torch.randn(4, 8, requires_grad=True)
    logits, target = x * 1.0, torch.arange(4)
    before, upstream = logits.detach().clone(), torch.randn(3, 4)
    losses = [
        functional.cross_entropy(logits, target, reduction="none", inplace_backward=inplace)
        for inplace in (True, False)
    ]
    options = {"is_grads_batched": True, "retain_graph": True}
    found, expected = (torch.autograd.grad(loss, x, upstream, **options)[0] for loss in losses)
    assert torch.equal(found, expected) and torch.equal(logits, before)


def test_vectorized_jacobians_and_hessians():
    """Where the outer derivative is taken in forward mode, one vmap runs inside another."""
    x, other = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8)

    def last(query, attention=functional.scaled_dot_product_attention):
        return attention(query, other.to(query.dtype), other.to(query.dtype))[..., -3:]

    def stock(query):  # torch's own function has no second derivative
        return last(query, lambda q, k, v: torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v)

    taken = functools.partial(torch.autograd.functional.jacobian, vectorize=True)
    both(lambda f: lambda x: taken(f, x), (last, stock), x)
    for strategy in ("reverse-mode", "forward-mode"):
        options = {"vectorize": True, "outer_jacobian_strategy": strategy}
        taken = functools.partial(torch.autograd.functional.hessian, **options)
        both(lambda f: lambda x: taken(lambda x: f(x).sin().sum(), x), (last, stock), x)


OF_OPTIMIZERS = {op._schema.name for op in vars(optimizer).values() if isinstance(op, OpOverload)}


@pytest.mark.parametrize("vmap", [vmap, _vmap], ids=["func", "older"])
@pytest.mark.parametrize("name", sorted({*declared_ops()} - OF_OPTIMIZERS))
def test_every_declared_operator_is_mapped_or_refuses(name, vmap):
    """Each argument mapped alone: results are the stacked ones of plain calls."""
    call = CALLS[f"ops.{name.removeprefix('onepass::')}"]
    for argument in call.tensors():
        given = call.tensors()
        stack = torch.stack([given[argument]] * 2)

        def run(one, given=given, argument=argument):
            return (*call.run(**{**given, argument: one}), one)

        if call.written:
            with pytest.raises(RuntimeError, match=" must not be mapped over by vmap, got one"):
                vmap(run)(stack)
            continue
        expected = call.run(**call.tensors())
        for found, plain in zip(vmap(run)(stack), expected, strict=False):
            assert torch.equal(found, torch.stack([plain] * 2)), argument


@pytest.mark.parametrize("key", ["FuncTorchBatched", "Batched"])
def test_operators_of_optimizers_refuse(key):
    """Their calls take lists, and refuse at the first mapped one."""
    for name in OF_OPTIMIZERS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), name
