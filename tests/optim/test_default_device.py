"""Everything here works on the parameters' device, whatever torch's default device is."""

from __future__ import annotations

import copy

import pytest
import torch

import onepass
from onepass.optim.checks import refuse_shared_memory
from tests.optim.cases import (
    ALL,
    assert_same,
    give_gradients,
    kin_names,
    like,
    made,
    members,
    options_of,
    resumed,
    shapes_of,
    snapshot,
    steps,
    stock,
)
from tests.support.dtypes import BF16, F32, F64

OF_ADAMW = ("fp32", "remainder16, bfloat16", "stochastic", "int8", "all")
CASES = [*((name, "own state") for name in ALL), *(("AdamW", mode) for mode in OF_ADAMW)]


def run(name, mode):
    optimizer = like(name, mode, F32 if mode in ("own state", "int8") else BF16)
    optimizer.step()  # without gradients
    optimizer = steps(copy.deepcopy(steps(optimizer, 2)), 1, first=2)
    new = steps(resumed(name, optimizer, **options_of(name, mode)), 1, first=3)
    if new.ema_decay is not None:
        with new.swap_ema():
            pass
    return snapshot(new)


@pytest.mark.parametrize("name, mode", CASES)
def test_optimizers(mode, name):
    expected = run(name, mode)
    with torch.device("meta"):
        assert_same(run(name, mode), expected)


@kin_names
def test_fuse(name):
    old = steps(made(name, shapes_of(name), cls=stock(name)), 1)
    with torch.device("meta"):
        fused = onepass.optim.fuse(old, max_grad_norm=1.0)
        fused.step()
        fused.zero_grad()
        fused.step()
    assert fused.grad_norm.device.type == "cpu" and all(p.isfinite().all() for p in members(fused))


def test_clipping():
    optimizer = made("SGD", (50,))
    give_gradients(optimizer, 0)
    norm = members(optimizer)[0].grad.norm()
    with torch.device("meta"):
        found = onepass.optim.clip_grad_norm_(members(optimizer), 0.5)
    assert found.device.type == "cpu" and torch.isclose(found, norm)


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_taken_in_backward(in_backward):
    with torch.device("meta"):
        optimizer = made("AdamW", (50,), BF16, master="fp32", amsgrad=False)
        sums = onepass.optim.fused_accumulate(optimizer, in_backward=in_backward)
        (p,) = members(optimizer)
        before = p.detach().clone()
        with sums.accumulating():
            p.square().sum().backward()
            p.square().sum().backward()
        p.square().sum().backward()
        optimizer.step()
    assert not torch.equal(p, before)


def test_averages_of_torch():
    model = torch.nn.Linear(4, 4)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.device("meta"):
        optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=0.9)
        optimizer.ema_from(averaged, model)
        optimizer.ema_to(averaged, model)
    assert torch.equal(averaged.module.weight, model.weight)


def test_checks_of_memory():
    both = torch.randn(10)
    with torch.device("meta"):
        refuse_shared_memory("test", "params", [both[::2], both[1::2]])
        with pytest.raises(RuntimeError, match="must not share memory"):
            refuse_shared_memory("test", "params", [both[::2], both[::3]])


@pytest.mark.parametrize("dtype", [F64, BF16])
def test_another_default_dtype(dtype):
    """The codes' values and the steps of sums stay float32."""
    (p,), before = members(made("AdamW", (4096,), BF16)), torch.get_default_dtype()
    codes = onepass.optim.codes
    codes._magnitudes.cache_clear()
    codes._table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        optimizer = onepass.optim.AdamW([p], state_dtype="int8", master="fp32")
        onepass.optim.fused_accumulate(optimizer)
        for _ in range(2):
            p.float().square().sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is F32
    finally:
        torch.set_default_dtype(before)
        codes._magnitudes.cache_clear()
        codes._table.cache_clear()
