"""Steps on gradients whose placements differ from their parameters', in all pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor

from onepass import numerics
from tests.distributed.dtensors import SHAPES, mesh_of, pairs, spread, whole
from tests.distributed.ranks import distributed, run
from tests.optim.cases import FLAGS, NAMES, TORCH_NAMES, ours, same, stock
from tests.support.dtypes import BF16, F32, F64

pytestmark = distributed

STEPS = 2


def drawn(number: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 1/16, which 16 bits hold and any order sums exactly."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randint(-16, 17, shape, generator=generator) / 16


def members(mesh, shapes=SHAPES):
    """(number, shape, parameter's placements, gradient's placements): every pair with every shape,
    on meshes of two dimensions, with many pairs, with one."""
    found = [(shape, *pair) for pair in pairs(mesh.ndim) for shape in shapes]
    if mesh.ndim > 1:
        found = found[:: 2 * len(shapes) + 1]
    return [(number, *one) for number, one in enumerate(found)]


def trained(cls, mesh, cases, dtype=F32, on_dtensors=True, zeroes=False, steps=STEPS, **options):
    """The optimizer after some steps, some of them without some of the gradients."""
    params = []
    for number, shape, place, _ in cases:
        start = 0.5 + drawn(number, shape, 0).to(dtype)
        params.append(torch.nn.Parameter(spread(start, mesh, place) if on_dtensors else start))
    optimizer = cls(params, **options)
    for step in range(1, steps + 1):
        for (number, shape, _, place), p in zip(cases, params, strict=True):
            p.grad = None
            if (number + step) % 5:
                value = drawn(number, shape, step).to(dtype)
                p.grad = spread(value, mesh, place).to(dtype) if on_dtensors else value
        given = [p.grad for p in params]
        before = [None if g is None else whole(g) for g in given]
        optimizer.step()
        for p, gradient, value in zip(params, given, before, strict=True):
            assert p.grad is gradient
            if gradient is not None:
                expected = torch.zeros_like(value) if zeroes else value
                assert torch.equal(whole(gradient), expected)
    return optimizer, params


def check_same(found, params, expected, cases, case):
    """Parameters and states, bit for bit those of another optimizer."""
    other, others = expected
    states, of_others = found.state_dict()["state"], other.state_dict()["state"]
    wrong = []
    for index, (p, q) in enumerate(zip(params, others, strict=True)):
        if not same(whole(p), whole(q)):
            wrong.append((cases[index][1:], "param", (whole(p) - whole(q)).abs().max()))
        for key, value in of_others.get(index, {}).items():
            if not same(whole(states[index][key]), whole(value)):
                wrong.append((cases[index][1:], key))
    assert not wrong, f"{case}: {len(wrong)} differ, {wrong[:5]}"


def body_of_pairs(mesh_shape, name, dtype, options):
    mesh = mesh_of(mesh_shape)
    cases = members(mesh, SHAPES[:3])  # the last is for 8 bits
    options = {**FLAGS[name], **options}
    zeroes = options.get("zero_grads", False)
    found, params = trained(ours(name), mesh, cases, dtype, zeroes=zeroes, **options)
    expected = trained(ours(name), mesh, cases, dtype, False, zeroes=zeroes, **options)
    check_same(found, params, expected, cases, f"{mesh_shape} {name} {options}")
    if "max_grad_norm" in options:
        assert torch.equal(found.grad_norm, expected[0].grad_norm)


# The same for a parameter in shards as for a whole one: nothing rounds at random, no elements share
# a scale of 8 bits.
EXACT = {
    "own state": {},
    "clipped": {"max_grad_norm": 0.1, "zero_grads": True},
    "fp32": {"master": "fp32", "zero_grads": True},
    "remainder16": {"master": "remainder16", "max_grad_norm": 0.1},
}


EACH_ONCE = list(zip(NAMES, EXACT, strict=True))


@pytest.mark.parametrize(
    "mesh, name, mode",
    [
        *[
            pytest.param((2,), *pair, marks=() if pair in EACH_ONCE else pytest.mark.slow)
            for pair in itertools.product(NAMES, EXACT)
        ],
        *[pytest.param((4,), *pair, marks=pytest.mark.slow) for pair in EACH_ONCE],
        ((2, 2), "AdamW", "clipped"),
        pytest.param((2, 2), "SGD", "remainder16", marks=pytest.mark.slow),
    ],
)
def test_pairs_of_placements_step_as_whole_parameters(mesh, name, mode):
    size = torch.Size(mesh).numel()
    dtype = BF16 if "master" in EXACT[mode] else F32
    run(size, body_of_pairs, mesh, name, dtype, EXACT[mode])


SHARED_BY_ALL = ((4, 4), (9, 5))  # torch refuses some steps if a rank has an empty shard


def body_against_torch(mesh_shape, name):
    mesh = mesh_of(mesh_shape)
    cases = members(mesh, SHARED_BY_ALL)
    _, params = trained(ours(name), mesh, cases, **FLAGS[name])
    _, base = trained(stock(name), mesh, cases, **FLAGS[name])
    _, ref = trained(stock(name), mesh, cases, F64, False, **FLAGS[name])
    for one, p, q, r in zip(cases, params, base, ref, strict=True):
        numerics.assert_close(whole(p), whole(r), whole(q), case=f"{mesh_shape} {one}")
        assert p.placements == q.placements


@pytest.mark.parametrize(
    "mesh, name",
    [
        *[((2,), name) for name in TORCH_NAMES],
        pytest.param((4,), "AdamW", marks=pytest.mark.slow),
        pytest.param((2, 2), "SGD", marks=pytest.mark.slow),
    ],
)
def test_pairs_of_placements_step_as_torch(mesh, name):
    run(torch.Size(mesh).numel(), body_against_torch, mesh, name)


def body_of_local(mesh_shape, name, options):
    """Against parameters whose gradients have their placement: bit for bit, whatever rounds."""
    mesh = mesh_of(mesh_shape)
    cases = members(mesh, SHAPES[1::2])
    aligned = [(number, shape, place, place) for number, shape, place, _ in cases]
    options = {**FLAGS[name], **options, "max_grad_norm": 0.5}
    found, params = trained(ours(name), mesh, cases, BF16, **options)
    expected = trained(ours(name), mesh, aligned, BF16, **options)
    check_same(found, params, expected, cases, f"{mesh_shape} {name} {options}")
    for p in params:
        assert isinstance(p, DTensor) and whole(p).isfinite().all()


@pytest.mark.parametrize(
    "mesh, name, options",
    [
        ((2,), "AdamW", {"master": "stochastic", "state_dtype": "int8"}),
        ((2,), "Adam", {"master": "remainder16", "state_dtype": BF16}),
        ((2,), "SGD", {"master": "fp32", "state_dtype": "int8"}),
        ((2,), "Lion", {"master": "stochastic"}),
        pytest.param((2, 2), "AdamW", {"state_dtype": BF16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pairs_of_placements_step_as_aligned_ones(mesh, name, options):
    run(torch.Size(mesh).numel(), body_of_local, mesh, name, options)
