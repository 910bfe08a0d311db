"""torch.func over the operators, and batched gradients: what plain calls give."""

import pytest
import torch
from torch._ops import OpOverload
from torch._vmap_internals import _vmap
from torch.func import grad, jacfwd, jacrev, vmap

from onepass import functional, numerics
from onepass._ops import optimizer
from tests.support.calls import CALLS, SAMPLES
from tests.support.seeds import set_seed
from tests.test_conventions import declared_ops

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

NAMES = [name for name, call in CALLS.items() if call.differentiable]


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
    # Which write their state.
    without |= {"causal_conv1d_update", "selective_state_update", "delta_rule_update"}
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


@pytest.mark.parametrize("name", [name for name in NAMES if "nn." not in name])
def test_ways_to_map_one_argument(name):
    """Over its last dimension, in a vmap inside another, and with a backward outside, where other
    arguments, which show no gradient inside, get the sum over the slices."""
    call = CALLS[name]
    run, x = seeded(call, tensors_of(call))
    first = next(iter(x))
    slices = [drawn(x[first], seed) for seed in range(4)]
    stacked, leaves = torch.stack(slices), {n: t.clone().requires_grad_() for n, t in x.items()}

    def of(tensor, others=x):
        return run(others | {first: tensor})

    plain = [torch.stack(results) for results in zip(*map(of, slices), strict=True)]
    close(vmap(of, randomness="same")(stacked), plain)
    close(vmap(of, -1, randomness="same")(stacked.movedim(0, -1)), plain)
    nested = vmap(vmap(of, randomness="same"), randomness="same")(stacked.unflatten(0, (2, 2)))
    close([result.flatten(0, 1) for result in nested], plain)

    del leaves[first]
    gradients = []
    for mapped in (False, True):
        given = stacked.clone().requires_grad_()
        results = (
            vmap(lambda tensor: of(tensor, leaves), randomness="same")(given)
            if mapped
            else [y for tensor in given for y in of(tensor, leaves)]
        )
        loss = sum(result.sin().sum() for result in results)
        gradients.append(torch.autograd.grad(loss, [given, *leaves.values()]))
    close(*gradients[::-1])


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


def draws(function, *arguments) -> bool:
    """Random numbers, which the older vmap refuses."""
    function(*arguments)
    after = torch.get_rng_state()
    set_seed(3)
    return not torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("name", [name for name in NAMES if "nn." not in name])
def test_jacobians_and_hessians(name):
    """In either mode, one inside another, and vectorized, where one vmap may run inside another: of
    three numbers, which are added to the last of the first argument."""
    call = CALLS[name]
    run, x = seeded(call, tensors_of(call))
    first = next(iter(x))

    def sums(steps):
        more = torch.cat([steps.new_zeros(x[first].numel() - 3), steps])
        results = run(x | {first: x[first] + more.view(x[first].shape)})
        return torch.stack([r.sin().sum() for r in results])

    def total(steps):
        return sums(steps).square().sum()

    at, same = torch.zeros(3, dtype=torch.float64), {"randomness": "same"}
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    of_first, of_second = jacobian(sums, at), hessian(total, at)
    assert of_first.any() and of_second.any()
    firsts = [jacfwd(sums, **same)(at)]
    seconds = [jacfwd(jacrev(total), **same)(at), jacrev(jacfwd(total, **same))(at)]
    if not draws(sums, at):
        firsts.append(jacobian(sums, at, vectorize=True, strategy="forward-mode"))
        for mode in ("reverse-mode", "forward-mode"):
            own = {"vectorize": True, "outer_jacobian_strategy": mode}
            seconds.append(hessian(total, at, **own))
    for found in firsts:
        close([found], [of_first])
    for found in seconds:
        close([found], [of_second])


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
