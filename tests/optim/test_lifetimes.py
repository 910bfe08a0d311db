"""Lifetimes: a deleted optimizer keeps nothing alive."""

import copy
import gc
import weakref

import pytest
import torch

import onepass
from tests.optim.cases import (
    MODES,
    SHAPES,
    give_gradients,
    made,
    members,
    names,
    steps,
    stock,
    torch_names,
)
from tests.support.dtypes import BF16


def followed(optimizer):
    params = members(optimizer)
    entries = [value for p in params for value in optimizer.state.get(p, {}).values()]
    tensors = [*params, *(p.grad for p in params), *entries]
    return [weakref.ref(thing) for thing in (optimizer, *tensors)]


def alive(references):
    gc.collect()
    return [thing for thing in (reference() for reference in references) if thing is not None]


@names
@pytest.mark.parametrize("mode", ["own state", "remainder16", "all"])
def test_an_optimizer_that_is_gone_keeps_nothing(mode, name):
    optimizer = steps(made(name, SHAPES, BF16, **MODES[mode]), 2)
    members(optimizer)[0].grad = None  # a second table
    optimizer.step()
    give_gradients(optimizer, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    optimizer.step()
    references = followed(optimizer)
    del optimizer
    assert alive(references) == []


@names
def test_a_refused_load_and_a_refused_step_keep_nothing(name):
    optimizer = steps(made(name, SHAPES), 1)
    other = steps(made(name, SHAPES), 2)
    checkpoint = other.state_dict()
    checkpoint["param_groups"][0]["lr"] = "x"
    with pytest.raises(TypeError):
        optimizer.load_state_dict(checkpoint)
    del checkpoint
    references = followed(other)
    del other
    assert alive(references) == []
    good = members(optimizer)[1].grad
    members(optimizer)[1].grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    members(optimizer)[1].grad = good
    references = followed(optimizer)
    del optimizer, good
    assert alive(references) == []


@torch_names
@pytest.mark.parametrize("first", ["old", "new"])
def test_fused_optimizers_that_are_gone_keep_nothing(first, name):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    held = {"old": steps(stock(name)(params, lr=0.1), 1)}
    held["new"] = steps(onepass.optim.fuse(held["old"]), 1)
    references = [weakref.ref(held["old"]), *followed(held["new"])]
    del params, held[first]
    gc.collect()
    held.clear()
    assert alive(references) == []
