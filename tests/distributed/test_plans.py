"""Plans of calls on DTensors: a call whose plan is known is what it is without one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import checkpoint

from onepass import functional, numerics
from onepass._dtensor import plans
from tests.distributed import dtensors
from tests.distributed.dtensors import mesh_of
from tests.distributed.ranks import distributed, on_ranks, run
from tests.distributed.test_operators import CASES, S0, S1, R, drawn, listed, upstream

pytestmark = distributed


# Parts of these are not computed by the entry alone, or a plain target has to be cut.
WITHOUT = {
    "causal attention of more queries than keys", "merge_attention_states", "cross_entropy",
    "cross_entropy, summed", "cross_entropy of each row", "cross_entropy of classes in parts",
    "linear_cross_entropy", "linear_cross_entropy of each row",
    "linear_cross_entropy of classes in parts", "add_rms_norm without a residual",
}  # fmt: skip


def spread(value, place, mesh=None):
    return dtensors.spread(value, mesh or mesh_of((2,)), [place])


def facts(outputs: list[torch.Tensor]) -> list[tuple]:
    return [
        (o.placements, o.shape, o.stride(), o.dtype, o.device_mesh, o.requires_grad, o._spec)
        for o in outputs
    ]


def parts(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [o.detach().to_local() for o in outputs]


def are_equal(found: tuple, others: tuple) -> bool:
    return found[0] == others[0] and all(
        a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(found[1], others[1], strict=True)
    )


def called(case, place, differentiable: bool):
    """Facts and values of outputs and gradients, and what was sent."""
    given = {
        name: spread(value, place.get(name, R)).requires_grad_(differentiable)
        for name, value in drawn(case, torch.float32).items()
    }
    torch.manual_seed(5)
    with CommDebugMode() as counted:
        outputs = found = listed(case.call(**given))
        if differentiable:
            wanted = list(map(dtensors.placed_as, outputs, upstream(outputs)))
            found = [*outputs, *torch.autograd.grad(outputs, list(given.values()), wanted)]
    # A gradient's stride follows its part; torch's, of unequal parts, may not be that of a whole.
    same = [(x.placements, x.shape, x.dtype, x.device_mesh) for x in found[len(outputs) :]]
    return (facts(outputs), same, counted.get_comm_counts()), parts(found)


def body_of_case(name: str) -> int:
    case, kept = CASES[name], 0
    for place in case.places:
        for differentiable in (False, True):
            plans.known.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(plans, "key_of", lambda *given: None)
                without = called(case, place, differentiable)
            assert not plans.known
            for _ in range(2):  # the first makes the plan
                assert are_equal(called(case, place, differentiable), without), (name, place)
            kept += len(plans.known)
    return kept


@pytest.mark.parametrize("name", CASES)
def test_a_call_with_a_plan_is_the_call_without(name):
    kept = run(2, body_of_case, name)
    assert kept[0] == kept[1] and bool(kept[0]) == (name not in WITHOUT)


def norm(shape, normalized, place, mesh=None):
    x = torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape).square()
    return lambda: functional.rms_norm(spread(x, place, mesh), normalized)


def of_part(placement):
    """Of the same parts, which are the whole, or add up to it."""
    x = torch.linspace(-1, 2, 32).reshape(4, 8)
    return lambda: functional.rms_norm(
        DTensor.from_local(x, mesh_of((2,)), [placement], run_check=False), 8, eps=1.0
    )


def loss(reduction):
    x, target = torch.eye(8), torch.arange(8)
    return lambda: functional.cross_entropy(spread(x, S0), spread(target, S0), reduction=reduction)


DIFFERENT = {  # two calls that differ in this alone
    "placements": lambda: (of_part(R), of_part(Partial())),
    "sizes": lambda: (norm((4, 6, 8), 8, S0), norm((2, 6, 8), 8, S0)),
    "numbers": lambda: (loss("none"), loss("mean")),
    "mesh": lambda: (norm((4, 8), 8, S0), norm((4, 8), 8, S0, init_device_mesh("cpu", (2,)))),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_ranks(2)
def test_calls_that_differ_have_plans_of_their_own(name):
    """In alternation they are what each is without plans."""

    def found(call):
        outputs = listed(call())
        return (facts(outputs), [id(o.device_mesh) for o in outputs]), parts(outputs)

    calls, cold = DIFFERENT[name](), []
    for call in calls:
        plans.known.clear()
        cold.append(found(call))
    plans.known.clear()
    for _ in range(2):
        for call, expected in zip(calls, cold, strict=True):
            assert are_equal(found(call), expected)


@on_ranks(2)
def test_modes_and_gradients_of_planned_calls():
    x = spread(torch.randn(4, 8), S0).requires_grad_()
    weight = torch.randn(8, requires_grad=True)
    functional.rms_norm(x, 8)
    with torch.no_grad():
        assert not functional.rms_norm(x, 8, weight).requires_grad
    with pytest.raises(RuntimeError, match="weight must be a DTensor beside others"):
        functional.rms_norm(x, 8, weight)
    for _ in range(3):
        assert functional.rms_norm(x, 8).requires_grad
        with torch.no_grad():
            assert not functional.rms_norm(x, 8).requires_grad
        with torch.inference_mode():
            assert functional.rms_norm(x, 8).to_local().is_inference()
        with torch.autocast("cpu", torch.bfloat16):
            y = functional.linear(x, spread(torch.eye(8), R))
        assert y.dtype == y.to_local().dtype == torch.bfloat16
        assert functional.linear(x, spread(torch.eye(8), R)).dtype is torch.float32

    # The gradient's own gradient needs the plan's functions.
    def second(norm, x):
        (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)[0]

    def stock(x):
        return torch.rms_norm(x, [8])

    plain = x.full_tensor().detach()
    numerics.assert_close(
        second(lambda x: functional.rms_norm(x, 8), x).full_tensor(),
        second(stock, plain.double().requires_grad_()),
        second(stock, plain.requires_grad_()),
    )
    # An output's gradient that lies elsewhere, and one that is a part of a sum.
    y = functional.rms_norm(x, 8)
    for place in (R, S1):
        (moved,) = torch.autograd.grad(y, x, spread(torch.ones(4, 8), place), retain_graph=True)
        (right,) = torch.autograd.grad(y, x, spread(torch.ones(4, 8), S0), retain_graph=True)
        assert isinstance(moved, DTensor) and torch.equal(moved.to_local(), right.to_local())


@on_ranks(2)
def test_selective_checkpointing_sees_the_same_operators_twice():
    x, y, z = (spread(torch.randn(4, 8), S0) for _ in range(3))

    def layer(x):  # of y and z no gradient is wanted
        return functional.rms_norm(functional.gelu_mul(functional.silu_mul(x, y), z), 8)

    def gradient(call):
        (found,) = torch.autograd.grad(call(leaf).exp().sum(), leaf)
        return found.to_local()

    def policy(context, function, *args, **kwargs):
        is_view = function is torch.ops.aten.view.default
        kinds = checkpoint.CheckpointPolicy
        return kinds.MUST_SAVE if is_view else kinds.PREFER_RECOMPUTE

    def checkpointed(x):
        def contexts():
            return checkpoint.create_selective_checkpoint_contexts(policy)

        return checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    leaf = x.requires_grad_()
    expected = gradient(layer)
    plans.known.clear()
    for _ in range(3):
        assert torch.equal(gradient(checkpointed), expected)


@on_ranks(2)
def test_gradients_that_are_equal_add_up_apart():
    for call in (
        lambda x, y: functional.add_dropout(x, y, 0.0),
        lambda x, y: functional.add_rms_norm(x, y, 8)[1],
    ):
        x, y, z = (spread(torch.ones(4, 8), S0).requires_grad_() for _ in range(3))
        given = spread(torch.ones(4, 8), S0)
        for count in range(1, 5):
            torch.autograd.backward(call(x, y) + z, given)
            for leaf in (x, y, z):
                assert torch.equal(leaf.grad.to_local(), torch.full((2, 8), float(count)))
            torch.autograd.backward(call(x, y), -given)
            torch.autograd.backward(call(x, y), given)
            assert torch.equal(given.to_local(), torch.ones(2, 8))


@on_ranks(2)
def test_the_cache_is_bounded():
    plans.known.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "MOST", 4)
        for rows in range(1, 20):
            functional.rms_norm(spread(torch.ones(2 * rows, 8), S0), 8)
            assert 0 < len(plans.known) <= 4
            assert all(len(plan.specs) <= 4 for plan in plans.known.values())
