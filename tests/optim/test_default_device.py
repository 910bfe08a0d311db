"""Everything here works on the parameters' device, whatever torch's default device is."""

from __future__ import annotations

import copy

import pytest
import torch

import onepass
from onepass.optim.checks import refuse_shared_memory
from tests.optim.cases import ALL, MODES, assert_same, built, members, snapshot, through_a_file
from tests.support.dtypes import BF16

CASES = {
    **dict.fromkeys(ALL, {}),
    "AdamW, fp32": {"max_grad_norm": 0.1},
    "AdamW, remainder16": {"zero_grads": True},
    "AdamW, stochastic": {"ema_decay": 0.9, "ema_dtype": "param"},
    "AdamW, int8": {"ema_decay": 0.9, "max_grad_norm": 0.1},
}


def draws():
    """A function of random tensors on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device="cpu")


@pytest.fixture
def drawn():
    return draws()


def run(case, drawn):
    name, _, mode = case.partition(", ")
    dtype = BF16 if mode and mode != "int8" else torch.float32
    shapes = ((64, 64), (64, 64), (64, 64) if name == "Muon" else (4096,))
    params = [drawn(*shape).to(dtype).requires_grad_() for shape in shapes]
    options = MODES[mode or "own state"] | CASES[case]
    optimizer = built(name, params, **options)
    optimizer.step()  # without gradients
    for number in range(3):
        for p in params:
            p.grad = drawn(*p.shape).to(dtype)
        if number == 2:
            optimizer = copy.deepcopy(optimizer)
        optimizer.step()
    resumed = built(name, params, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for p in members(resumed):
        p.grad = drawn(*p.shape).to(dtype)
    resumed.step()
    if "ema_decay" in options:
        with resumed.swap_ema():
            pass
    return resumed


@pytest.mark.parametrize("case", CASES)
def test_optimizers(case):
    expected = run(case, draws())
    with torch.device("meta"):
        assert_same(snapshot(run(case, draws())), snapshot(expected))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Muon", "Adafactor"])
def test_fuse(name, drawn):
    p = drawn(20, 30).requires_grad_()
    optimizer = getattr(torch.optim, name)([p], lr=1e-2)
    p.grad = drawn(20, 30)
    optimizer.step()
    with torch.device("meta"):
        fused = onepass.optim.fuse(optimizer, max_grad_norm=1.0)
        fused.step()
        p.grad = None
        fused.step()
    assert fused.grad_norm.device.type == "cpu" and p.isfinite().all()


def test_clipping(drawn):
    p = drawn(50).requires_grad_()
    p.grad = drawn(50)
    norm = p.grad.norm()
    with torch.device("meta"):
        found = onepass.optim.clip_grad_norm_([p], 0.5)
    assert found.device.type == "cpu" and torch.isclose(found, norm)


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_taken_in_backward(in_backward, drawn):
    p = drawn(50).to(BF16).requires_grad_()
    with torch.device("meta"):
        optimizer = onepass.optim.AdamW([p], master="fp32")
        sums = onepass.optim.fused_accumulate(optimizer, in_backward=in_backward)
        before = p.detach().clone()
        with sums.accumulating():
            p.square().sum().backward()
            p.square().sum().backward()
        p.square().sum().backward()
        optimizer.step()
    assert not torch.equal(p, before)


def test_averages_of_torch(drawn):
    model = torch.nn.Linear(4, 4)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.device("meta"):
        optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=0.9)
        optimizer.ema_from(averaged, model)
        optimizer.ema_to(averaged, model)
    assert torch.equal(averaged.module.weight, model.weight)


def test_checks_of_memory(drawn):
    both = drawn(10)
    with torch.device("meta"):
        refuse_shared_memory("test", "params", [both[::2], both[1::2]])
        with pytest.raises(RuntimeError, match="must not share memory"):
            refuse_shared_memory("test", "params", [both[::2], both[::3]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype, drawn):
    """The codes' values and the steps of sums stay float32."""
    before = torch.get_default_dtype()
    onepass.optim.codes._magnitudes.cache_clear()
    onepass.optim.codes._table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        p = drawn(4096).to(BF16).requires_grad_()
        optimizer = onepass.optim.AdamW([p], state_dtype="int8", master="fp32")
        onepass.optim.fused_accumulate(optimizer)
        for _ in range(2):
            p.float().square().sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.float32
    finally:
        torch.set_default_dtype(before)
        onepass.optim.codes._magnitudes.cache_clear()
        onepass.optim.codes._table.cache_clear()
