"""Optimizers on several processes: replicas, shards of FSDP2, norms over all ranks."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import onepass
from onepass import numerics
from tests.distributed.dtensors import mesh_of, whole
from tests.distributed.ranks import distributed, run
from tests.optim.cases import FLAGS, MODES, assert_same, made, members, ours, same, snapshot, steps
from tests.support.dtypes import BF16, F32, F64

pytestmark = distributed

SHARDED = ((5, 7), (3, 4), (1, 6), (9,))  # numbers of rows that two ranks do not divide evenly
SHARDED_MODES = {mode: MODES[mode] for mode in ("own state", "fp32", "remainder16")}
SHARDED_MODES["averages"] = {"master": "fp32", "ema_decay": 0.9}


def trained(name, dtype, sharded):
    """Parameters and norms of steps that are clipped by the norm of the whole model."""
    torch.manual_seed(40)
    layers = torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    model, part = torch.nn.Sequential(*layers).to(dtype), slice(None)
    if sharded:
        for module in (model[0], model):
            fully_shard(module, mesh=mesh_of((2,)))
        rank = torch.distributed.get_rank()
        part = slice(4 * rank, 4 * rank + 4)
    options = FLAGS[name] | {"max_grad_norm": 0.1}
    if "ns_dtype" in options and dtype is F64:
        options["ns_dtype"] = None
    muons = name == "MuonWithAdamW"
    params = onepass.optim.muon_groups(model) if muons else model.parameters()
    optimizer, norms = ours(name)(params, **options), []
    for number in range(5):
        batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(number)).to(dtype)
        optimizer.zero_grad()
        model(batch[part]).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.clone())
    return [whole(p) for p in model.parameters()], norms


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "MuonWithAdamW"])
def test_a_fully_sharded_run_is_the_run_of_one_process(name):
    (found, norms), (other, other_norms) = run(2, trained, name, F32, True)
    assert all(same(one, two) for one, two in zip(found + norms, other + other_norms, strict=True))
    (ref, exact), (base, _) = (trained(name, dtype, False) for dtype in (F64, F32))
    for norm, right in zip(norms, exact, strict=True):
        assert norm.shape == () and norm.dtype == F32
        assert right > 0.1 and abs(norm / right - 1) < 1e-5
    for results in zip(found, ref, base, strict=True):
        numerics.assert_close(*results)


def body_of_shards(name, shapes, mode, dimension=0):
    """The same gradients for parameters whole and in shards."""
    reference, mesh = made(name, shapes, BF16, **SHARDED_MODES[mode]), mesh_of((2,))
    params = [
        torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dimension)]))
        for p in members(reference)
    ]
    optimizer = ours(name)(params, **FLAGS[name], **SHARDED_MODES[mode])
    for number in range(3):
        steps(reference, 1, first=number)
        for p, q in zip(params, members(reference), strict=True):
            p.grad = distribute_tensor(q.grad, mesh, [Shard(dimension)])
        optimizer.step()
    found = {
        (index, key): whole(value)
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    found.update({(index, "param"): whole(p) for index, p in enumerate(params)})
    assert_same(found, {k: v for k, v in snapshot(reference).items() if k[1] != "grad"})
    if mode != "averages":
        return
    with optimizer.swap_ema(), reference.swap_ema():
        for p, q in zip(params, members(reference), strict=True):
            assert same(whole(p), q.detach())
    for index, p in enumerate(params):
        assert same(whole(p), found[index, "param"])


def test_shards_are_bitwise_parts_of_the_whole():
    """The other modes: test_pairs_of_placements_step_as_whole_parameters."""
    run(2, body_of_shards, "AdamW", SHARDED, "averages")


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("mode", SHARDED_MODES)
def test_shards_of_matrices_are_bitwise_parts_of_the_whole(mode, dimension):
    """Muon's products are of whole matrices, and the same ones."""
    run(2, body_of_shards, "Muon", ((5, 7), (7, 5), (1, 6), (5, 7)), mode, dimension)


def body_of_moved_shards(mode):
    """A parameter that moves is as one that is written: its steps begin from what is there."""
    reference = made("AdamW", SHARDED, BF16, **SHARDED_MODES[mode])
    mesh = mesh_of((2,))
    parts = [distribute_tensor(p.detach(), mesh, [Shard(0)]) for p in members(reference)]
    params = [torch.nn.Parameter(part) for part in parts]
    optimizer = ours("AdamW")(params, **FLAGS["AdamW"], **SHARDED_MODES[mode])
    for number in range(4):
        if number == 2:  # as when a model is moved
            torch.nn.ParameterList(params)._apply(torch.clone)
            with torch.no_grad():
                torch._foreach_mul_(members(reference), 1)
        steps(reference, 1, first=number)
        for p, q in zip(params, members(reference), strict=True):
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        optimizer.step()
    for p, q in zip(params, members(reference), strict=True):
        assert same(whole(p), q.detach())


@pytest.mark.parametrize("mode", ["own state", "fp32"])
def test_shards_in_new_memory_are_stepped_there(mode):
    run(2, body_of_moved_shards, mode)
