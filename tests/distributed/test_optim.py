"""Optimizers on several processes: replicas, shards of FSDP2, norms over all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import onepass
from onepass import numerics
from tests.distributed.dtensors import mesh_of, whole
from tests.distributed.ranks import distributed, run
from tests.optim.cases import (
    FLAGS,
    MODES,
    assert_same,
    made,
    members,
    ours,
    same,
    snapshot,
    steps,
    stock,
)
from tests.support.dtypes import BF16, F32, F64

pytestmark = distributed

SHARDED = ((5, 7), (3, 4), (1, 6), (9,))  # numbers of rows that two ranks do not divide evenly
SHARDED_MODES = {mode: MODES[mode] for mode in ("own state", "fp32", "remainder16")}
SHARDED_MODES["averages"] = {"master": "fp32", "ema_decay": 0.9}


def rank():
    return torch.distributed.get_rank()


def network(dtype=F32):
    torch.manual_seed(40)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(
        dtype
    )


def batch(number, dtype=F32):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 7, generator=generator).to(dtype)


def body_of_fsdp(name):
    """Steps clipped by the norm of the whole model."""
    model, mesh = network(), mesh_of((2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ours(name)(model.parameters(), **FLAGS[name], max_grad_norm=0.1)
    norms = []
    for number in range(5):
        optimizer.zero_grad()
        model(batch(number)[4 * rank() : 4 * rank() + 4]).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.clone())
    return [whole(p) for p in model.parameters()], norms


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_fully_sharded_run_is_the_run_of_one_process(name):
    (found, norms), (other, other_norms) = run(2, body_of_fsdp, name)
    assert all(same(one, two) for one, two in zip(found + norms, other + other_norms, strict=True))
    assert all(norm.shape == () and norm.dtype == F32 for norm in norms)
    weights, expected_norms = [], []
    for dtype in (F64, F32):
        model = network(dtype)
        optimizer = stock(name)(model.parameters(), **FLAGS[name])
        expected_norms.append([])
        for number in range(5):
            optimizer.zero_grad()
            model(batch(number, dtype)).square().mean().backward()
            expected_norms[-1].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(norm > 0.1 for norm in expected_norms[0])
    for one, two in zip(norms, expected_norms[0], strict=True):
        assert abs(one / two - 1) < 1e-5
    for one, ref, base in zip(found, *weights, strict=True):
        numerics.assert_close(one, ref, base)


def trained_by_muon(model, dtype, part):
    """Muon for the matrices, AdamW for the biases, clipped together."""
    groups = onepass.optim.muon_groups(model)
    options = {"max_grad_norm": 0.1, "ns_dtype": None if dtype is F64 else "float32"}
    optimizer = onepass.optim.MuonWithAdamW(groups, lr=1e-2, **options)
    for number in range(5):
        optimizer.zero_grad()
        model(batch(number, dtype)[part]).square().mean().backward()
        optimizer.step()
    return [whole(p) for p in model.parameters()]


def body_of_muon():
    model, mesh = network(), mesh_of((2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained_by_muon(model, F32, slice(4 * rank(), 4 * rank() + 4))


def test_a_fully_sharded_run_of_muon_is_that_of_one_process():
    found, other = run(2, body_of_muon)
    assert all(same(one, two) for one, two in zip(found, other, strict=True))
    ref, base = (trained_by_muon(network(dtype), dtype, slice(None)) for dtype in (F64, F32))
    for one, definition, stock_run in zip(found, ref, base, strict=True):
        numerics.assert_close(one, definition, stock_run)


def sharded_parameters(optimizer, placements):
    """The optimizer's parameters as distributed tensors."""
    mesh = mesh_of((2,))
    params = [
        torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
        for p in members(optimizer)
    ]
    return params, mesh


def body_of_shards(name, shapes, mode, dimension=0):
    """The same gradients for parameters whole and in shards."""
    reference = made(name, shapes, BF16, **SHARDED_MODES[mode])
    params, mesh = sharded_parameters(reference, [Shard(dimension)])
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
