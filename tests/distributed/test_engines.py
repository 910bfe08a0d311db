"""Swapped models and our optimizers inside the other engines of torch.distributed."""

import hashlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass._dispatch_log import record
from onepass._policy import small_calls
from tests.distributed.dtensors import mesh_of, whole
from tests.distributed.networks import SETTINGS, STEPS, check, in_one_process, network, trained
from tests.distributed.ranks import distributed, run

pytestmark = [*distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def made(optimizer_class, swapped=True):
    """A network, swapped where the optimizer is ours."""
    model = network()
    if swapped and optimizer_class is onepass.optim.AdamW:
        assert {entry["kind"] for entry in onepass.swap(model).swapped} >= {"norm"}
    return model


def same(losses, parameters, other_losses, other_parameters):
    """Bit for bit."""
    pairs = zip(parameters, other_parameters, strict=True)
    return torch.equal(losses, other_losses) and all(torch.equal(one, two) for one, two in pairs)


# ---- engines, each of which makes a network one of several processes -----------------------------


def sharded(model, **options):
    for part in (*model.blocks, model):
        fully_shard(part, **{"mesh": mesh_of((2,)), **options})
    return model


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(model, mesh=mesh)


def checkpointed(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return sharded(model)


def offloaded(model):
    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_low_precision(model):
    """bfloat16 inside, losses as close to float64's as stock's are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(model, mp_policy=policy)


def in_columns_and_rows(model):
    plan = {}
    for number in range(2):
        plan[f"blocks.{number}.up"] = ColwiseParallel()
        plan[f"blocks.{number}.down"] = RowwiseParallel()
    return parallelize_module(model, mesh_of((2,)), plan)


def in_sequences(model):
    """Norms get parts of the tokens, and their gradients are partial sums."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(2):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    mesh = mesh_of((torch.distributed.get_world_size(),))
    return parallelize_module(model, mesh, plan)


def redundant_nowhere(parameters, of=onepass.optim.AdamW):
    """ZeRO: each rank holds the state of a part of the parameters."""
    return ZeroRedundancyOptimizer(parameters, optimizer_class=of, **SETTINGS)


def body_of_training(parallel, steps, swapped=True, redundant=False):
    """Ours and torch's optimizer in the same engine; rows of the batch are shared out."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    has_parts = parallel not in (in_columns_and_rows, in_sequences)
    rows = slice(rank * 4 // size, (rank + 1) * 4 // size) if has_parts else slice(None)
    results = []
    for cls in (onepass.optim.AdamW, torch.optim.AdamW):
        model = parallel(made(cls, swapped))
        parameters = list(model.parameters())
        optimizer = redundant_nowhere(parameters, cls) if redundant else cls(parameters, **SETTINGS)
        with mock.patch.dict(small_calls.LEAST_NORM, clear=True), record() as calls:
            results.append(trained(model, optimizer, steps, rows, average=has_parts))
        ran = sum(call["op"] == "layer_norm" and "torch" not in call["level"] for call in calls)
        assert bool(ran) == (swapped and cls is onepass.optim.AdamW), calls
        if parallel is in_sequences:
            assert {p.grad.placements for p in model.norm.parameters()} == {(Partial(),)}
            assert model.norm.weight.placements == (Replicate(),)
        for p, entry in () if redundant else optimizer.state.items():
            assert entry["exp_avg"].dtype is p.dtype is torch.float32
            assert getattr(entry["exp_avg"], "placements", 0) == getattr(p, "placements", 0)
    check(*results, in_one_process(steps))


ENGINES = {
    "replicas": (2, DistributedDataParallel),
    "shards": (2, sharded),
    "shards of a network that is not swapped": (2, sharded, False),
    "shards, recomputed": (2, checkpointed),
    "shards, offloaded": (2, offloaded),
    "shards in low precision": (2, in_low_precision),
    "columns and rows": (2, in_columns_and_rows),
    "sequences": (2, in_sequences),
    "sequences on four, not swapped": (4, in_sequences, False),
    "replicas, states in shards": (2, DistributedDataParallel, True, True),
    "replicas of shards": (4, hybrid),
}


@STEPS
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("on four" in n)) for n in ENGINES]
)
def test_an_engine_trains_as_with_torchs_optimizer(name, steps):
    size, parallel, *options = ENGINES[name]
    run(size, body_of_training, parallel, steps, *options)


def body_of_consolidation():
    """Every rank has the same batch."""
    model = DistributedDataParallel(made(onepass.optim.AdamW))
    optimizer = redundant_nowhere(model.parameters())
    trained(model, optimizer, 3)
    optimizer.consolidate_state_dict(to=0)
    weights = [whole(p) for p in model.parameters()]
    return weights, optimizer.state_dict() if torch.distributed.get_rank() == 0 else None


def body_of_going_on(weights, state):
    model, resumed = made(onepass.optim.AdamW), made(onepass.optim.AdamW)
    optimizer = onepass.optim.AdamW(model.parameters(), **SETTINGS)
    trained(model, optimizer, 3)
    with torch.no_grad():
        for parameter, weight in zip(resumed.parameters(), weights, strict=True):
            parameter.copy_(weight)
    other = onepass.optim.AdamW(resumed.parameters(), **SETTINGS)
    other.load_state_dict(state)
    return same(*trained(model, optimizer, 3), *trained(resumed, other, 3))


def test_a_consolidated_state_is_that_of_one_process():
    """One process continues from it, bit for bit."""
    weights, state = run(2, body_of_consolidation)[0]
    assert run(1, body_of_going_on, weights, state) == [True]


def body_of_replicas_of_shards():
    """Processes with the same shard have the same bits, and the two shards form the whole."""
    model = hybrid(made(onepass.optim.AdamW))
    optimizer = onepass.optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    rank = torch.distributed.get_rank()
    trained(model, optimizer, 8, slice(rank, rank + 1))
    return [p.to_local().detach().clone() for p in model.parameters()], optimizer.grad_norm


def test_replicas_of_shards_are_the_same():
    (a, norm), (b, _), (c, other), (d, _) = run(4, body_of_replicas_of_shards)
    norms = torch.as_tensor(norm), torch.as_tensor(other)
    assert same(norms[0], a, norms[1], c) and same(norms[0], b, norms[0], d)
    assert not same(norms[0], a, norms[0], b)


# ---- replicas stay equal -------------------------------------------------------------------------


def digest(model):
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(whole(parameter).flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def body_of_replicas(options):
    """Digests of the parameters, and what dropout kept; each rank has its own seed and batches."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(3)
    layers = nn.Linear(64, 256), nn.Dropout(0.3), nn.LayerNorm(256), nn.Linear(256, 64)
    model = nn.Sequential(*layers).bfloat16()
    assert len(onepass.swap(model, kinds=("norm", "dropout")).swapped) == 2
    torch.manual_seed(100 + rank)
    parallel = DistributedDataParallel(model)
    optimizer = onepass.optim.AdamW(parallel.parameters(), lr=1e-3, **options)
    digests = []
    for step in range(30):
        x = torch.randn(8, 64).bfloat16()
        (parallel(x).float() - x.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            digests.append(digest(model))
    return digests, model[1](torch.ones(64)).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"master": "stochastic"},
        {"master": "stochastic", "state_dtype": "int8", "max_grad_norm": 0.5},
        {"master": "remainder16"},
    ],
    ids=str,
)
def test_replicas_stay_equal(options):
    (digests, kept), (others, other_kept) = run(2, body_of_replicas, options)
    assert digests == others and len(set(digests)) == 10
    assert kept != other_kept  # each process dropped by a seed of its own
