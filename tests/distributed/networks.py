"""A small network and its training, in one process or in several."""

import functools

import pytest
import torch
from torch import nn

from onepass import numerics
from tests.distributed.dtensors import whole
from tests.optim.cases import FLAGS

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
