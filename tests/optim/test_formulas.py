"""Adafactor and LAMB: optimizers whose formula depends on a whole tensor (`FormulaOptimizer`)."""

import pytest
import torch
from torch import Tensor

import onepass
from onepass import numerics
from onepass.optim import contract
from onepass.optim.contract import Hyper
from onepass.reference import optimizer as reference
from tests.optim.cases import (
    give_gradients,
    made,
    members,
    over_copies,
    steps,
    stock,
    unchanged,
)
from tests.support.dtypes import BF16, F32, F64

SHAPES = ((24, 40), (300,), (3, 8, 6), (), (1,), (1, 5), (5, 1))
names = pytest.mark.parametrize("name", ["Adafactor", "LAMB"])
SETTINGS = {
    "Adafactor": [
        {"lr": 1e-2},
        {"lr": 0.5, "weight_decay": 0.1, "d": 2.0},
        {"lr": 0.1, "eps": (1e-5, 1e-1), "beta2_decay": -0.3, "maximize": True},
    ],
    "LAMB": [
        {"lr": 1e-2},
        {"lr": 0.1, "weight_decay": 0.0, "betas": (0.4, 0.9), "eps": 1e-2},
        {"lr": 1e-2, "weight_decay": 0.5, "maximize": True},
    ],
}


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.isa
@names
@pytest.mark.parametrize("which", range(3))
def test_as_stock(which, name):
    """Adafactor as torch's, LAMB as the reference; the rule over all parameters of a run."""
    settings = SETTINGS[name][which]
    runs = [made(name, SHAPES, **settings)]
    runs += [made(name, SHAPES, dtype, cls=stock(name), **settings) for dtype in (F64, F32)]
    ours, ref, base = ([p.detach() for p in members(steps(run, 20))] for run in runs)
    # One element says little: its errors over 20 steps may cancel in one of the runs.
    numerics.assert_close(ours, ref, base, case=f"{name} {settings}")


@names
def test_float64_is_float64(name):
    ours, ref = (members(steps(made(name, SHAPES, F64, cls=c), 20)) for c in (None, stock(name)))
    for one, two in zip(ours, ref, strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-13)


def test_the_reference_of_adafactor_is_torchs():
    settings = {"lr": 0.3, "weight_decay": 0.1, "eps": (1e-6, 1e-3)}
    theirs = made("Adafactor", SHAPES, F64, cls=torch.optim.Adafactor, **settings)
    params = [p.detach().clone() for p in members(theirs)]
    shapes = [onepass.optim.Adafactor._shapes(None, p) for p in params]
    states = [{key: torch.zeros(s, dtype=F64) for key, s in of.items()} for of in shapes]
    for number in range(5):
        give_gradients(theirs, number)
        for i, p in enumerate(members(theirs)):
            params[i], states[i] = reference.adafactor(
                params[i], p.grad, states[i], number + 1, **settings
            )
        theirs.step()
    for i, p in enumerate(members(theirs)):
        assert torch.allclose(params[i], p, rtol=1e-10)
        for key, value in states[i].items():
            assert torch.allclose(value, theirs.state[p][key], rtol=1e-10)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_smallest_gradients_of_adafactor(dtype):
    """Without a number eps is float32's if results are kept to float32, exactly or on average;
    without a master it is that of the parameter's dtype, as torch's."""
    scale = 2.0**-12  # below both dtypes' eps
    for master in (None, "fp32", "stochastic"):
        optimizer = made("Adafactor", SHAPES, dtype, master=master, lr=0.5, eps=(None, 1e-3))
        eps = torch.finfo(dtype if master is None else F32).eps
        wide = over_copies("Adafactor", optimizer, dtype=F32, eps=(eps, 1e-3), lr=0.5)
        give_gradients(optimizer, 0, scale)
        for p, q in zip(members(wide), members(optimizer), strict=True):
            p.grad = q.grad.float()
        optimizer.step()
        wide.step()
        for p, q in zip(members(wide), members(optimizer), strict=True):
            unit = torch.finfo(dtype).eps * p.detach().abs().max()
            assert (q.detach() - p.detach()).abs().max() <= unit, (master, p.shape)


def test_the_length_of_a_step_of_lamb():
    """lr times the tensor's norm, for any size of the gradient; not for a tensor of zeros."""
    for scale in (1e-3, 1.0, 1e3):
        optimizer = made("LAMB", SHAPES, lr=0.01, weight_decay=0.0, eps=0.0)
        with torch.no_grad():
            members(optimizer)[1].zero_()
        before = [p.detach().clone() for p in members(optimizer)]
        give_gradients(optimizer, 0, scale)
        optimizer.step()
        for number, (p, was) in enumerate(zip(members(optimizer), before, strict=True)):
            moved = (p.detach() - was).norm()
            expected = float(was.norm()) if number != 1 else p.numel() ** 0.5
            assert float(moved) == pytest.approx(0.01 * expected, rel=1e-4), (scale, number)


class OnDevice(Tensor):
    """A tensor that claims to be on a device."""

    device = property(lambda self: torch.device("cuda"))


@names
def test_a_tensor_lr_on_a_device(name, monkeypatch):
    """The kernel reads the same settings as with a number; Adafactor's updates contain lr already,
    and its weight decay does too."""
    monkeypatch.setattr(contract, "on_device", lambda settings, *_: settings.clone())
    found = []
    for lr in (torch.tensor(0.25).as_subclass(OnDevice), 0.25):
        optimizer = made(name, SHAPES, lr=lr, weight_decay=0.5)
        for now in (0.25, 0.125):
            if isinstance(lr, Tensor):
                lr.fill_(now)
            else:
                optimizer.param_groups[0]["lr"] = now
            device_settings = optimizer._current_settings(torch.device("cuda")).device
            found.append(dict(zip(Hyper._fields, device_settings[0].tolist(), strict=True)))
    assert found[:2] == found[2:]
    if name == "Adafactor":
        assert [(row["lr"], row["weight_decay"]) for row in found[:2]] == [(1, 0.125), (1, 0.0625)]


# ---- contract ------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_small_states_are_refused(state_dtype, name):
    for dtype in (F32, BF16):
        entries = steps(made(name, SHAPES, dtype), 2).state.values()
        assert {value.dtype for entry in entries for value in entry.values()} == {F32}
    with pytest.raises(ValueError, match="state_dtype must be None"):
        made(name, SHAPES, state_dtype=state_dtype)


@names
def test_states_of_another_shape_are_not_loaded(name):
    optimizer = steps(made(name, SHAPES), 2)
    checkpoint = optimizer.state_dict()
    key = list(checkpoint["state"][0])[1]
    checkpoint["state"][0][key] = torch.ones(3)
    message = f"{name}: {key} of parameter 0 must have shape"
    with unchanged(optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(checkpoint)
