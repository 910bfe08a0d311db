"""Special gradients on several processes: late, mixed, scaled, not finite, refused."""

import copy

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onepass
from onepass import numerics
from tests.distributed.dtensors import mesh_of, pairs, spread, whole
from tests.distributed.dtensors import sixteenths as drawn
from tests.distributed.ranks import distributed, on_ranks, run
from tests.optim.cases import FLAGS, NAMES, assert_same, ours, same, snapshot
from tests.support.dtypes import BF16, F32

pytestmark = distributed

PLACES = ((Replicate(),), (Shard(0),), (Shard(1),))


def parameters(mesh, places, shape=(5, 4), dtype=F32):
    """One of each placement."""
    return [
        torch.nn.Parameter(spread(drawn(shape, n).to(dtype), mesh, place))
        for n, place in enumerate(places)
    ]


@on_ranks(2)
def test_clip_grad_norm_is_torchs():
    mesh = mesh_of((2,))
    for norm_type in (2.0, 1.0, float("inf")):
        found, expected = [], []
        for by, params in ((onepass.optim, found), (torch.nn.utils, expected)):
            for n, (place, of_gradient) in enumerate(pairs(1)):
                p = torch.nn.Parameter(spread(drawn((6, 4), n), mesh, place))
                p.grad = spread(drawn((6, 4), 100 + n), mesh, of_gradient)
                params.append(p)
            params.append(by.clip_grad_norm_(params, 0.5, norm_type))
        assert same(whole(found.pop()), whole(expected.pop()))
        for p, q in zip(found, expected, strict=True):
            assert p.grad.placements == q.grad.placements
            assert same(whole(p.grad), whole(q.grad))


@on_ranks(4)
def test_the_norm_is_of_all_shards_of_shards():
    """FSDP2 over tensor parallelism: torch calls the shards of shards neither sharded nor whole."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["t"], plan)
    fully_shard(model, mesh=mesh["d"])
    models = (model, plain, wide)
    optimizers = [onepass.optim.AdamW(m.parameters(), lr=0.1, max_grad_norm=0.01) for m in models]
    for number in range(3):
        batch = drawn((8, 8), number)
        half = 4 * mesh.get_local_rank("d")
        parts = batch[half : half + 4], batch, batch.double()
        for m, given in zip(models, parts, strict=True):
            m.zero_grad()
            m(given).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        found, expected, _ = (optimizer.grad_norm for optimizer in optimizers)
        assert expected > 0.01 and abs(found / expected - 1) < 1e-5, (found, expected)
    for found, base, ref in zip(*(m.parameters() for m in models), strict=True):
        numerics.assert_close(whole(found), ref, base)


@pytest.mark.parametrize("how", ["found_inf", "norm"])
@on_ranks(2)
def test_ranks_skip_a_step_together(how):
    """Scaled gradients, zeroed in any case; one rank says that they are not finite."""
    mesh, rank = mesh_of((2,)), torch.distributed.get_rank()
    params = parameters(mesh, PLACES)
    options = {"max_grad_norm": 1.0} if how == "norm" else {}
    optimizer = onepass.optim.AdamW(params, lr=0.1, zero_grads=True, **options)
    for number in range(2):
        for n, p in enumerate(params):
            p.grad = spread(drawn((5, 4), 10 * number + n), mesh, [Partial()])
        before = [whole(p) for p in params]
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(float(number == 1 and rank == 1 and how == "found_inf"))
        if how == "norm" and number == 1 and rank == 1:
            params[1].grad.to_local().fill_(float("nan"))
        optimizer.step()
        for p, was in zip(params, before, strict=True):
            assert torch.equal(whole(p), was) == (number == 1)
            assert p.grad.placements == (Partial(),) and not p.grad.to_local().any()
        for entry in optimizer.state.values():
            assert entry["step"] == 1


@on_ranks(2)
def test_grad_scaler_scales_gradients_in_any_placement():
    """torch's GradScaler, gradients in every placement: the steps of gradients without a scale."""
    mesh = mesh_of((2,))
    results = []
    for scaled in (True, False):
        params = parameters(mesh, [place for place, _ in pairs(1)])
        optimizer = onepass.optim.AdamW(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        scaler.scale(torch.zeros(()))
        for number in range(3):
            for n, (p, (_, place)) in enumerate(zip(params, pairs(1), strict=True)):
                scale = scaler.get_scale() if scaled else 1.0
                p.grad = spread(scale * drawn((5, 4), 100 * number + n), mesh, place)
            if number == 1:
                params[0].grad.to_local()[0, 0] = float("inf")
                if not scaled:
                    continue
            scaler.step(optimizer)
            scaler.update()
        assert not scaled or scaler.get_scale() == 4.0
        results.append([whole(p) for p in params])
    for one, two in zip(*results, strict=True):
        assert same(one, two)


@on_ranks(2)
def test_gradients_of_collectives_are_waited_for():
    """Gradients whose collectives are still running when they are read first."""
    mesh, group = mesh_of((2,)), mesh_of((2,)).get_group()
    results = []
    for late in (True, False):
        params = [*parameters(mesh, PLACES), torch.nn.Parameter(drawn((5, 4), 9))]
        optimizer = onepass.optim.AdamW(params, lr=0.1, max_grad_norm=0.5, zero_grads=True)
        for number in range(3):
            for n, p in enumerate(params[:-1]):
                gradient = spread(drawn((5, 4), 10 * number + n), mesh, [Partial()])
                p.grad = gradient.redistribute(mesh, [Replicate()], async_op=late)
            total = all_reduce(drawn((5, 4), 10 * number + 9), "sum", group)
            params[-1].grad = total if late else total.wait()
            if late:
                locals_ = [params[0].grad._local_tensor, params[-1].grad]
                assert all(isinstance(one, AsyncCollectiveTensor) for one in locals_)
            optimizer.step()
            assert not any(whole(p.grad).any() for p in params)
        results.append([whole(p) for p in params] + [optimizer.grad_norm])
    for one, two in zip(*results, strict=True):
        assert same(one, two)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_gradients_that_torch_refuses_are_refused(name):
    """They are refused as by torch, before anything changes."""
    mesh = mesh_of((2,))
    sharded, plain = parameters(mesh, [(Shard(0),)])[0], torch.nn.Parameter(drawn((5, 4), 3))
    given = spread(drawn((5, 4), 4), mesh, [Shard(0)])
    partial = torch.nn.Parameter(spread(drawn((5, 4), 5), mesh, [Partial()]))
    mixed = "mixed torch.Tensor and DTensor"
    cases = [
        ([plain], [given], mixed), ([sharded, plain], [given, given], mixed),
        ([sharded, plain], [given.to_local(), drawn((5, 4), 6)], mixed),
        ([partial], [given], "Partial"),
    ]  # fmt: skip
    if name != "SGD":
        cases.append(([partial], [spread(drawn((5, 4), 7), mesh, [Partial()])], "partial"))
    for params, gradients, message in cases:
        optimizer = ours(name)(params, **FLAGS[name])
        before = [whole(p) for p in params]
        try:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = None
                p.grad = gradient
        except RuntimeError:  # torch's own, of another size
            continue
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert not optimizer.state
        assert all(same(whole(p), was) for p, was in zip(params, before, strict=True))


def stepped(cls, place):
    p = torch.nn.Parameter(place(drawn((5, 4), 1)))
    optimizer = cls([p], **FLAGS["SGD"])
    for number in range(3):
        p.grad = place(drawn((5, 4), 2 + number))
        optimizer.step()
    return whole(p)


@on_ranks(2)
def test_sgd_steps_partial_parameters():
    """SGD is linear: each rank steps with its own part of the sum, as torch's does.

    The exact result is that of ordinary tensors: for a `Partial` in float64 torch's ranks do not
    agree on a collective.
    """
    mesh = mesh_of((2,))
    results = []
    for cls in (onepass.optim.SGD, torch.optim.SGD):
        results.append(stepped(cls, lambda t: spread(t, mesh, [Partial()])))
    exact = stepped(torch.optim.SGD, torch.Tensor.double)
    numerics.assert_close(results[0], exact, results[1])


def body_of_noise():
    """Replicas round alike where other dimensions of the mesh are sharded; shards do not."""
    place, ones = (mesh_of((2, 2)), (Replicate(), Shard(0))), torch.ones(4096, dtype=BF16)
    p = torch.nn.Parameter(DTensor.from_local(ones.clone(), *place))
    optimizer = onepass.optim.SGD([p], lr=2.0**-12, master="stochastic")
    p.grad = DTensor.from_local(ones, *place)
    optimizer.step()
    return p.to_local()


def test_replicas_of_shards_round_alike():
    one, two, three, four = run(4, body_of_noise)
    assert same(one, three) and same(two, four)
    assert not same(one, two) and 0.02 < (one != 1).float().mean() < 0.2


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@on_ranks(2)
def test_states_are_placed_like_their_parameters(name):
    """States of one placement into parameters of another; a whole state into shards."""
    mesh = mesh_of((2,))
    source = ours(name)(parameters(mesh, PLACES), **FLAGS[name])
    for n, p in enumerate(source.param_groups[0]["params"]):
        p.grad = spread(drawn((5, 4), n), mesh, [Replicate()])
    source.step()
    saved = source.state_dict()
    expected = {
        (index, key): whole(v) for index, e in saved["state"].items() for key, v in e.items()
    }
    gathered = copy.deepcopy(saved)
    gathered["state"] = {
        index: {key: whole(value) for key, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    for given in (saved, gathered):
        other = ours(name)(parameters(mesh, PLACES[1:] + PLACES[:1]), **FLAGS[name])
        other.load_state_dict(given)
        found = other.state_dict()["state"]
        for (index, key), value in expected.items():
            assert same(whole(found[index][key]), value), (index, key)
            if value.dim():
                p = other.param_groups[0]["params"][index]
                assert found[index][key].placements == p.placements
    plain = ours(name)([torch.zeros(5, 4, requires_grad=True) for _ in PLACES], **FLAGS[name])
    plain.load_state_dict(saved)
    states = {k: v for k, v in snapshot(plain).items() if k[1] not in ("param", "grad")}
    assert_same(states, expected)
