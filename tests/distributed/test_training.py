"""A model trained on several processes with torch's AdamW and with ours."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import onepass
from onepass import numerics
from onepass._dispatch_log import record
from onepass._policy import small_calls
from tests.distributed.dtensors import mesh_of, whole
from tests.distributed.ranks import distributed, run
from tests.optim.cases import FLAGS

pytestmark = distributed

# A wrong step differs within five steps too; in twenty, rounding errors can grow.
STEPS = pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])
WIDTH, VOCABULARY, LENGTH = 16, 11, 8
SETTINGS = FLAGS["AdamW"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """A GPT's embedding, blocks, norm and head."""

    def __init__(self, blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def network(dtype=torch.float32):
    torch.manual_seed(2)
    return Network(Block() for _ in range(2)).to(dtype)


def in_sequence_parallel(model):
    mesh = mesh_of((torch.distributed.get_world_size(),))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(2):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, plan)


def trained(model, optimizer, steps, rows=slice(None), average=False, call=None):
    """(losses, parameters) after the steps; `call` runs the model, by default it is the model."""
    call = model if call is None else call
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)[rows]
        optimizer.zero_grad()
        logits = call(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if average:
            torch.distributed.all_reduce(loss)
            loss = loss / torch.distributed.get_world_size()
        losses.append(loss)
    return torch.stack(losses), [whole(p) for p in model.parameters()]


def check(found, expected, reference):
    """Losses and parameters by the rule, torch's optimizer in float64 being the reference."""
    numerics.assert_close(found[0], reference[0], expected[0], case="losses")
    numerics.assert_close(found[1], reference[1], expected[1], case="parameters")


@functools.cache
def in_one_process(steps):
    model = network(torch.float64)
    return trained(model, torch.optim.AdamW(model.parameters(), **SETTINGS), steps)


def body_of_sequences(steps, swapped):
    results = []
    for cls in (onepass.optim.AdamW, torch.optim.AdamW):
        model = network()
        swapped = swapped and cls is onepass.optim.AdamW
        if swapped:
            assert onepass.swap(model).swapped
        model = in_sequence_parallel(model)
        if swapped:
            with mock.patch.dict(small_calls.LEAST_NORM, clear=True), record() as calls:
                model(torch.zeros(2, LENGTH, dtype=torch.int64))
            ran = [(call["op"], "torch" in call["level"]) for call in calls]
            assert ran.count(("layer_norm", False)) == 3
        results.append(trained(model, cls(model.parameters(), **SETTINGS), steps))
        kinds = {p.grad.placements for p in model.norm.parameters()}
        assert kinds == {(Partial(),)} and model.norm.weight.placements == (Replicate(),)
    check(*results, in_one_process(steps))


@STEPS
@pytest.mark.parametrize(
    "size, swapped", [(2, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_sequence_parallel_training(size, swapped, steps):
    """The norms of a swapped model get DTensors, of which each process computes its part. Other
    optimizers: test_placements."""
    run(size, body_of_sequences, steps, swapped)
