"""Steps on gradients whose placements differ from their parameters', in all pairs."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.dtensors import SHAPES, mesh_of, pairs, sixteenths, spread, whole
from tests.distributed.ranks import distributed, run
from tests.optim.cases import FLAGS, NAMES, ours, same
from tests.support.dtypes import BF16, F32

pytestmark = distributed

STEPS = 2


def members(mesh, shapes=SHAPES):
    """(number, shape, parameter's placements, gradient's placements): every pair with every shape,
    on meshes of two dimensions, with many pairs, with one."""
    found = [(shape, *pair) for pair in pairs(mesh.ndim) for shape in shapes]
    if mesh.ndim > 1:
        found = found[:: 6 * len(shapes) - 1]
        for here in range(2):  # each pair of one dimension, beside some of the other
            assert len({(p[here], g[here]) for _, p, g in found}) == len(pairs(1))
    return [(number, *one) for number, one in enumerate(found)]


def trained(name, mesh, cases, dtype, on_dtensors, options):
    """The optimizer after some steps, some of them without some of the gradients."""
    params = []
    for number, shape, place, _ in cases:
        start = 0.5 + sixteenths(shape, number).to(dtype)
        params.append(torch.nn.Parameter(spread(start, mesh, place) if on_dtensors else start))
    optimizer = ours(name)(params, **FLAGS[name], **options)
    for step in range(1, STEPS + 1):
        for (number, shape, _, place), p in zip(cases, params, strict=True):
            p.grad = None
            if (number + step) % 5:
                value = sixteenths(shape, 1000 * step + number).to(dtype)
                p.grad = spread(value, mesh, place).to(dtype) if on_dtensors else value
        given = [p.grad for p in params]
        before = [None if g is None else whole(g) for g in given]
        optimizer.step()
        for p, gradient, value in zip(params, given, before, strict=True):
            assert p.grad is gradient
            if gradient is not None:
                expected = torch.zeros_like(value) if "zero_grads" in options else value
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


def body(mesh_shape, name, dtype, options, aligned):
    """Bit for bit whole parameters, which tests/optim compares with torch's; or, where something
    rounds at random or shares a scale, shards whose gradients have their placement."""
    mesh = mesh_of(mesh_shape)
    cases = others = members(mesh, SHAPES[1::2] if aligned else SHAPES[:3])
    if aligned:
        others = [(number, shape, place, place) for number, shape, place, _ in cases]
    found, params = trained(name, mesh, cases, dtype, True, options)
    expected = trained(name, mesh, others, dtype, aligned, options)
    check_same(found, params, expected, cases, f"{mesh_shape} {name} {options}")
    for (_, _, place, _), p in zip(cases, params, strict=True):
        assert isinstance(p, DTensor) and p.placements == place and whole(p).isfinite().all()
    if "max_grad_norm" in options and not aligned:
        assert torch.equal(found.grad_norm, expected[0].grad_norm)


EXACT = {
    "own state": {},
    "clipped": {"max_grad_norm": 0.1, "zero_grads": True},
    "fp32": {"master": "fp32", "zero_grads": True},
    "remainder16": {"master": "remainder16", "max_grad_norm": 0.1},
}
EACH_ONCE = list(zip(NAMES, EXACT, strict=True))
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh, name, mode",
    [
        *[
            pytest.param((2,), *pair, marks=() if pair in EACH_ONCE else slow)
            for pair in itertools.product(NAMES, EXACT)
        ],
        *[pytest.param((4,), *pair, marks=slow) for pair in EACH_ONCE],
        ((2, 2), "AdamW", "clipped"),
        pytest.param((2, 2), "SGD", "remainder16", marks=slow),
    ],
)
def test_pairs_of_placements_step_as_whole_parameters(mesh, name, mode):
    size = torch.Size(mesh).numel()
    dtype = BF16 if "master" in EXACT[mode] else F32
    run(size, body, mesh, name, dtype, EXACT[mode], False)


@pytest.mark.parametrize(
    "mesh, name, options",
    [
        ((2,), "AdamW", {"master": "stochastic", "state_dtype": "int8"}),
        ((2,), "Adam", {"master": "remainder16", "state_dtype": BF16}),
        ((2,), "SGD", {"master": "fp32", "state_dtype": "int8"}),
        ((2,), "Lion", {"master": "stochastic"}),
        pytest.param((2, 2), "AdamW", {"state_dtype": BF16}, marks=slow),
    ],
    ids=str,
)
def test_pairs_of_placements_step_as_aligned_ones(mesh, name, options):
    options = options | {"max_grad_norm": 0.5}
    run(torch.Size(mesh).numel(), body, mesh, name, BF16, options, True)
