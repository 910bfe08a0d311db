"""Losses whose classes are split between processes: one process's, and no logits are sent."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass import functional, numerics
from onepass._dispatch_log import record
from onepass.reference import loss as reference
from onepass.swapping.redirection import with_redirected_loss
from tests.distributed.dtensors import mesh_of, placed_as, spread, whole
from tests.distributed.ranks import distributed, on_ranks, run

pytestmark = distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, CLASSES = 8, 9  # parts of five and four classes
TARGET = torch.tensor([0, 8, 4, 5, -100, 3, 8, 2])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 0.0, 0.0, 0.0, 0.75])

OPTIONS = {
    "plain": {}, "label smoothing": {"label_smoothing": 0.1}, "softcap": {"softcap": 4.0},
    "z_loss": {"z_loss": 0.1}, "weights": {"weight": WEIGHT},
    "an ignored class": {"ignore_index": 4},
    "all": dict(weight=WEIGHT, label_smoothing=0.2, softcap=3.0, z_loss=0.05),
}  # fmt: skip


class Bytes(TorchDispatchMode):
    """Of the tensors that go into collectives."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional" and not op.__name__.startswith(("wait", "_wrap")):
            name = op.__name__.partition(".")[0]
            self.sent[name] = self.sent.get(name, 0) + args[0].nbytes
        return op(*args, **(kwargs or {}))


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def target_of(options):
    """One without -100 where another class is ignored."""
    return TARGET.where(TARGET >= 0, 4) if "ignore_index" in options else TARGET


def upstream(loss):
    return torch.arange(1.0, 1 + loss.numel()).reshape(loss.shape)


def given(options, dtype):
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def of_logits(functions, *arguments, **options):
    return functions.cross_entropy(*arguments, **options)


def of_products(functions, x, w, b, target, **options):
    if functions is reference:
        return reference.cross_entropy(F.linear(x, w, b), target, **options)
    return functional.linear_cross_entropy(x, w, target, linear_bias=b, **options)


def check_parts(
    call, tensors, placements, mesh, options, *, target=None, dtype=torch.float32, **more
):
    """`call(functions, *tensors, target, **options)` by the rule, torch's operators being the
    reference. Returns (gradients, bytes in collectives)."""
    target = target_of(options) if target is None else target

    def evaluated(functions, wide, leaves):
        named = given(options, wide) | more
        if functions is reference:
            named.pop("inplace_backward", None)
        # Logits that may be overwritten are no leaves.
        loss = call(functions, *(leaf * 1.0 for leaf in leaves), target, **named)
        dloss = placed_as(loss, upstream(loss).to(loss.dtype))
        return loss.detach(), *torch.autograd.grad(loss, leaves, dloss)

    runs = []
    for wide in (torch.float64, dtype):
        leaves = [t.to(wide, copy=True).requires_grad_() for t in tensors]
        runs.append(evaluated(reference, wide, leaves))
    pairs = zip(tensors, placements, strict=True)
    parts = [spread(t.to(dtype), mesh, place).requires_grad_() for t, place in pairs]
    with Bytes() as counted:
        found = evaluated(functional, dtype, parts)
    for mine, right, stock in zip(found, *runs, strict=True):
        assert mine.dtype is stock.dtype
        numerics.assert_close(whole(mine), right, stock, case=f"{options} {more}")
    return found[1:], counted.sent


def body(of, names, reductions, dtype):
    """Of products: three chunks of rows; their gradient is a sum of all processes' parts."""
    if of == "logits":
        call, target, tensors = of_logits, None, [drawn(ROWS, CLASSES, scale=3.0)]
        placed, expected = [[S1]], [(S1,)]
        variants = [{"inplace_backward": inplace} for inplace in (False, True)]
    else:
        tensors = [drawn(600, 6), drawn(CLASSES, 6, seed=1), drawn(CLASSES, seed=2)]
        target = torch.cat([TARGET, drawn(592, seed=3).abs().mul(2).long()])
        call, placed, expected = of_products, [[R], [S0], [S0]], [(Partial(),), (S0,), (S0,)]
        variants = [{}]
    for name, reduction, more in itertools.product(names, reductions, variants):
        found, sent = check_parts(
            call, tensors, placed, mesh_of((2,)), OPTIONS[name],
            target=target, dtype=dtype, reduction=reduction, **more,
        )  # fmt: skip
        assert [gradient.placements for gradient in found] == expected
        numbers = 4 if "label_smoothing" in OPTIONS[name] else 3
        size = 8 if dtype is torch.float64 else 4
        assert sent == {"all_reduce": numbers * len(tensors[0]) * size}, (name, sent)


MEANS = ["mean", "none"]
IN_16_BITS = [
    pytest.param(*case, dtype, marks=pytest.mark.slow)
    for dtype in (torch.bfloat16, torch.float16)
    for case in (("logits", ["plain", "all"], ["sum", "none"]), ("products", ["plain"], MEANS))
]


@pytest.mark.parametrize("of, names, reductions, dtype", [
    ("logits", list(OPTIONS), MEANS, torch.float32), ("logits", ["all"], ["mean"], torch.float64),
    ("products", ["plain", "all"], MEANS, torch.float32), *IN_16_BITS,
])  # fmt: skip
def test_options_of_a_loss(of, names, reductions, dtype):
    run(2, body, of, names, reductions, dtype)


@on_ranks(2)
def test_rows_that_lie_elsewhere():
    """The rows are fewer bytes than the layer, and are moved; their gradients lie as they did."""
    hidden, weight = drawn(ROWS, 6), drawn(40, 6, seed=1)
    numbers, moved = 3 * ROWS * 4, hidden.nbytes

    def of_parts(functions, h, w, target, **options):
        if functions is functional:  # whose sum is h
            half = h.to_local(grad_placements=[Partial()]) / 2
            h = DTensor.from_local(half, h.device_mesh, [Partial()], run_check=False)
        return functions.linear_cross_entropy(h, w, target, **options)

    def of_rows(functions, *arguments, **options):
        return functions.linear_cross_entropy(*arguments, **options)

    gathered = {"all_gather_into_tensor": moved // 2, "reduce_scatter_tensor": moved}
    for place, call, expected in (
        (R, of_parts, {"all_reduce": numbers + 2 * moved}),
        (S0, of_rows, gathered | {"all_reduce": numbers}),
    ):
        _, sent = check_parts(call, [hidden, weight], [[place], [S0]], mesh_of((2,)), {})
        assert sent == expected


@on_ranks(4)
def test_four_processes():
    """Rows and classes are split, or classes along both dimensions of the mesh."""
    mesh, logits = mesh_of((2, 2)), drawn(ROWS, CLASSES, scale=3.0)
    for places in ([S0, S1], [S1, S0], [S1, S1], [R, S1]):
        for reduction in ("mean", "none"):
            (gradient,), _ = check_parts(
                of_logits, [logits], [places], mesh, OPTIONS["all"], reduction=reduction
            )
            assert list(gradient.placements) == places
    # Fewer classes than processes: one has none.
    narrow, smoothed = [drawn(ROWS, 3, scale=3.0)], {"label_smoothing": 0.3}
    check_parts(of_logits, narrow, [[S1]], mesh_of((4,)), smoothed, target=TARGET.clamp(max=2))


@on_ranks(2)
def test_extremes():
    mesh = mesh_of((2,))
    logits = drawn(5, 6)
    logits[0, :3] = -math.inf  # all that the first process has
    logits[1, 4] = -math.inf
    logits[2] = -math.inf
    logits[3, 5] = math.nan
    logits[4] = logits[4] * 1e4
    target = torch.tensor([4, 4, 0, 0, 1])
    smoothed, weight = {"label_smoothing": 0.1}, torch.tensor([0.5, 0.0, 1.0, 2.0, 0.25, 1.0])
    for options in ({}, smoothed, smoothed | {"softcap": 3.0}, smoothed | {"weight": weight}):
        results = []
        for x in (logits.double(), logits.clone(), spread(logits, mesh, [S1])):
            x = x.requires_grad_()
            given = {n: v.to(x.dtype) if n == "weight" else v for n, v in options.items()}
            loss = functional.cross_entropy(x, target, reduction="none", **given)
            (gradient,) = torch.autograd.grad(loss.sum(), x)
            results.append((whole(loss), whole(gradient)))
        for right, one, mine in zip(*results, strict=True):
            for row in range(5):  # whose numbers are of other sizes
                numerics.assert_close(mine[row], right[row], one[row], case=f"{options} {row}")
    # All rows are ignored; no rows.
    x = spread(logits, mesh, [S1])
    assert functional.cross_entropy(x, torch.full((5,), -100)).to_local().isnan()
    empty = spread(logits[:0], mesh, [S1]).requires_grad_()
    functional.cross_entropy(empty, target[:0], reduction="sum").backward()
    assert empty.grad.shape == (0, 6)


@on_ranks(2)
def test_logits_that_were_written_over_are_refused():
    """Where they were saved for another gradient, or are read by a second backward."""
    mesh, logits = mesh_of((2,)), drawn(ROWS, CLASSES)

    def loss_of(x):
        return functional.cross_entropy(x, TARGET, inplace_backward=True)

    for places in ([S0], [S1]):
        x = spread(logits, mesh, places).requires_grad_()
        saved = x.exp()  # its output
        also = x * 1.0
        more = also.sin().sum()  # its input
        for loss in (loss_of(saved), loss_of(also) + more):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="input must be the result .* got a leaf"):
            loss_of(x)
        scaled = x * 1.0
        loss = loss_of(scaled)
        torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)


class Model(nn.Module):
    """Its head is parallel over the vocabulary; it calls F.cross_entropy."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(24, 16), nn.LayerNorm(16)
        self.head, self.loss = nn.Linear(16, 24), nn.CrossEntropyLoss(ignore_index=3)

    def forward(self, tokens, target):
        logits = self.head(self.norm(self.embedding(tokens))).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten()) + self.loss(logits, target.flatten())


def trained(model, steps=4):
    tokens = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(1))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return torch.stack(losses), [whole(p) for p in model.parameters()]


@on_ranks(2)
def test_a_swapped_model_in_loss_parallel():
    """Our losses run there in place of torch's, and send three numbers a row."""
    results, mesh = [], mesh_of((2,))
    for dtype, swapped, split in (
        (torch.float64, False, False),
        (torch.float32, False, False),
        (torch.float32, False, True),
        (torch.float32, True, True),
    ):
        torch.manual_seed(2)
        model = Model().to(dtype)
        if swapped:
            found = onepass.swap(model, kinds=["loss"], probe=False).swapped
            assert [entry["name"] for entry in found] == ["loss"], found
            # Of F.cross_entropy: what a swapped model's forward calls in its place.
            model.forward = lambda *a, own=model.forward: with_redirected_loss(own, *a)
        if split:
            head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(model, mesh, {"head": head})
        with loss_parallel(), record() as calls, Bytes() as counted:
            results.append(trained(model))
        ran = sum(call["op"] == "cross_entropy" for call in calls)
        assert ran == (8 if swapped else 0), calls
        if split:
            results[-1] = (*results[-1], counted.sent["all_reduce"])
    (ref, base, stock, mine) = results
    for parallel in (stock, mine):
        numerics.assert_close(parallel[0], ref[0], base[0], case="losses")
        numerics.assert_close(parallel[1], ref[1], base[1], case="parameters")
    # Beside the head's, which both send; torch's loss sends below what is counted.
    assert mine[2] - stock[2] == 8 * 3 * (4 * 8) * 4


@on_ranks(2)
def test_refusals():
    mesh, ce, lce = mesh_of((2,)), functional.cross_entropy, functional.linear_cross_entropy
    x = spread(drawn(8, 9), mesh, [S1]).requires_grad_()
    wanted = spread(WEIGHT, mesh, [R]).requires_grad_()
    hidden, layer = spread(drawn(8, 6), mesh, [R]), spread(drawn(9, 6), mesh, [S0])
    blocks, bias = spread(drawn(4, 2, 9), mesh, [S0]), spread(drawn(9, 1), mesh, [S0])
    no_gradient = "weight must not require a gradient"
    smoothing, tall = {"label_smoothing": 1.5}, TARGET[:, None]
    refused = (  # what the error says, the function, its arguments
        ("target must lie between 0 and 8 or be ignore_index, -100, got 9", ce,
         (x, TARGET + 1), {}),
        (r"weight must have shape \(9,\), got \(5,\)", ce, (x, TARGET, torch.ones(5)), {}),
        ("label_smoothing must", ce, (x, TARGET), smoothing),
        (r"^cross_entropy: target must have shape \(8,\), got \(8, 1\)", ce, (x, tall), {}),
        (r"^cross_entropy: input must have shape .*\(4, 2, 9\)", ce, (blocks, TARGET[:4]), {}),
        (f"^cross_entropy: {no_gradient}", ce, (x, TARGET, wanted), {}),
        (f"^linear_cross_entropy: {no_gradient}", lce, (hidden, layer, TARGET), {"weight": wanted}),
        (r"input must have shape .*, got \(2, 4, 6\)", lce,
         (hidden.unflatten(0, (2, 4)), layer, TARGET.view(2, 4)), {}),
        (r"linear_bias must have shape \(9,\), got \(9, 1\)", lce, (hidden, layer, TARGET),
         {"linear_bias": bias}),
    )  # fmt: skip
    for message, function, arguments, options in refused:
        with pytest.raises(RuntimeError, match=message):
            function(*arguments, **options)
    with pytest.raises(RuntimeError, match="redistributed to whole classes for second derivatives"):
        torch.autograd.grad(ce(x, TARGET), x, create_graph=True)
