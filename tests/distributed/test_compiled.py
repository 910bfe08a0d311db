"""`torch.compile(fullgraph=True)` of swapped models on several processes, and of DTensors."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import onepass
from onepass import functional, numerics
from onepass._policy import small_calls
from tests.distributed import networks
from tests.distributed import test_operators as operators
from tests.distributed.dtensors import mesh_of, spread, whole
from tests.distributed.networks import WIDTH
from tests.distributed.ranks import distributed, on_ranks, run

# The compiler warns of side effects in collectives and hooks, which are torch's.
pytestmark = [*distributed, pytest.mark.filterwarnings("ignore::UserWarning")]

HEADS = 4
KINDS = {"norm", "attention", "mlp"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Gated()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def network(swapped, blocks, dtype=torch.float32):
    torch.manual_seed(2)
    model = networks.Network(Block() for _ in range(blocks)).to(dtype)
    if swapped:
        kinds = {entry["kind"] for entry in onepass.swap(model).swapped}
        assert kinds >= (KINDS if blocks else {"norm"})
    return model


def in_parallel(model):
    """Norms and sums by tokens; heads, and columns of the gated block, by process."""
    by_tokens, entire = Shard(1), Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=entire, output_layouts=by_tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_tokens, output_layouts=entire),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}"
        for part in ("attention", "mlp"):
            plan[f"{block}.{part}"] = PrepareModuleInput(
                input_layouts=(by_tokens,), desired_input_layouts=(entire,), use_local_output=True
            )
        for norm in ("norm1", "norm2"):
            plan[f"{block}.{norm}"] = SequenceParallel()
        for layer in ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate"):
            plan[f"{block}.{layer}"] = ColwiseParallel()
        for layer in ("attention.out", "mlp.down"):
            plan[f"{block}.{layer}"] = RowwiseParallel(output_layouts=by_tokens)
    return parallelize_module(model, mesh_of((2,)), plan)


def trained(model, call, rows=slice(None), steps=3, average=False):
    """(losses, the last gradients, parameters), by operators of ours also where they are small."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, parameters = networks.trained(model, optimizer, steps, rows, average, call)
    return losses, [whole(p.grad) for p in model.parameters()], parameters


def small_calls_too():
    """torch's own kernels are left for none."""
    bounds = ("LEAST_NORM", "LEAST_ATTENTION", "LEAST_GATE", "LEAST_LINEAR")
    return mock.patch.multiple(small_calls, **{name: {} for name in bounds})


def check(found, base, ref):
    names = ("losses", "gradients", "parameters")
    for mine, stock, right, what in zip(found, base, ref, names, strict=True):
        numerics.assert_close(mine, right, stock, case=what)


def references(blocks):
    results = []
    for dtype in (torch.float64, torch.float32):
        model = network(False, blocks, dtype)
        results.append(trained(model, model))
    return results


@pytest.mark.parametrize(
    "backend, blocks",
    [
        ("aot_eager", 0),
        pytest.param("aot_eager", 2, marks=pytest.mark.slow),
        pytest.param("inductor", 1, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_swapped_model_in_tensor_and_sequence_parallel(backend, blocks):
    """Eager and compiled, both by the rule; what an operator loses would show in gradients."""
    ref, base = references(blocks)
    with small_calls_too():
        eager = in_parallel(network(True, blocks))
        check(trained(eager, eager), base, ref)
        torch._dynamo.reset()
        counted, model = CompileCounterWithBackend(backend), in_parallel(network(True, blocks))
        compiled = torch.compile(model, fullgraph=True, backend=counted)
        check(trained(model, compiled), base, ref)
        assert counted.frame_count == 1


@pytest.mark.parametrize(
    "backend, which", [("aot_eager", "layers"), ("aot_eager", "broken"), ("inductor", "layers")]
)
@pytest.mark.slow
@on_ranks(2)
def test_swapped_layers_compiled_before_they_are_sharded(backend, which):
    ref, base = references(1)
    rank = torch.distributed.get_rank()
    torch._dynamo.reset()
    counted, model = CompileCounterWithBackend(backend), network(True, 1)
    if which == "layers":
        for block in model.blocks:
            block.compile(fullgraph=True, backend=counted)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh_of((2,)))
    call = model
    if which != "layers":
        call = torch.compile(model, backend=counted)
    rows = slice(2 * rank, 2 * rank + 2)
    check(trained(model, call, rows, average=True), base, ref)
    assert counted.frame_count >= len(model.blocks)


def body_of_operators(names):
    for name in names:
        torch._dynamo.reset()
        operators.body(name, compiled=True)


@pytest.mark.slow
def test_operators_on_dtensors():
    """Without the one whose mask is made outside of a graph."""
    run(2, body_of_operators, [n for n in operators.CASES if n != "attention with a block mask"])


@pytest.mark.slow
@on_ranks(2)
def test_wrong_options_of_a_loss_of_classes_in_parts():
    """The operators get others: a share of the smoothing, no z_loss, a part of the weights."""
    x = spread(torch.ones(8, 9), mesh_of((2,)), [Shard(1)])
    target = torch.zeros(8, dtype=torch.int64)
    for wrong in (
        {"label_smoothing": 1.5},
        {"z_loss": float("nan")},
        {"weight": torch.ones(5)},
        {"target": target[:, None]},
    ):
        torch._dynamo.reset()
        options = {"target": target} | wrong
        loss = torch.compile(functional.cross_entropy, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match=f"cross_entropy: {next(iter(wrong))} must"):
            loss(x, **options)
    # No kernel reads the targets: their loss is NaN, as on CUDA.
    torch._dynamo.reset()
    loss = torch.compile(functional.cross_entropy, fullgraph=True, backend="aot_eager")
    assert loss(x, target + 9, weight=torch.ones(9)).to_local().isnan()


@on_ranks(2)
def test_a_loss_without_logits_of_other_numbers_of_rows():
    """From the second number of rows on, a graph is for all that have as many chunks of 256."""
    mesh, backend = mesh_of((2,)), CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    loss = torch.compile(functional.linear_cross_entropy, fullgraph=True, backend=backend)
    weight = torch.randn(24, 16)
    for rows, graphs in ((100, 1), (256, 2), (300, 3)):
        x, target = torch.randn(rows, 16), torch.randint(0, 24, (rows,))
        results = []
        for dtype in (torch.float64, torch.float32):
            alone = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
            F.cross_entropy(F.linear(*alone), target).backward()
            results.append([t.grad for t in alone])
        parts = [
            spread(t.detach(), mesh, [place]).requires_grad_()
            for t, place in ((x, Replicate()), (weight, Shard(0)))
        ]
        loss(*parts, target).backward()
        assert backend.frame_count == graphs, f"{rows} rows: {backend.frame_count}"
        for mine, right, stock in zip(parts, *results, strict=True):
            numerics.assert_close(whole(mine.grad), right, stock, case=f"{rows} rows")


@on_ranks(2)
def test_a_loss_of_classes_in_parts_with_dynamic_numbers():
    """A compiler makes symbols of numbers, and each value has a graph of its own."""
    mesh, whole_logits, target = mesh_of((2,)), torch.randn(6, 8), torch.arange(6)
    torch._dynamo.reset()
    loss = torch.compile(functional.cross_entropy, fullgraph=True, dynamic=True, backend="eager")
    for smoothing in (0.1, 0.2):
        options = dict(label_smoothing=smoothing, softcap=3 * smoothing, z_loss=smoothing)
        logits = spread(whole_logits, mesh, [Shard(1)]).requires_grad_()
        found = loss(logits, target, **options)
        right = functional.cross_entropy(whole_logits, target, **options)
        torch.testing.assert_close(whole(found), right)
        found.backward()


@pytest.mark.parametrize(
    "shape, placements",
    [
        ((2,), [[Shard(0)], [Replicate()]]),
        # Replicas are of groups whose first process is not the first of all.
        pytest.param((2, 2), [[Shard(0), Replicate()]], marks=pytest.mark.slow),
    ],
)
def test_streams_of_dropout(shape, placements):
    run(torch.Size(shape).numel(), body_of_streams, shape, placements)


def body_of_streams(shape, placements):
    torch._dynamo.reset()
    drop = torch.compile(functional.dropout, fullgraph=True, backend="aot_eager")
    for places in placements:
        operators.check_streams(drop, mesh_of(shape), places)
