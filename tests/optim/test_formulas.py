"""Adafactor and LAMB: optimizers whose formula depends on a whole tensor (`FormulaOptimizer`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import onepass
from onepass import numerics
from onepass.optim import tables
from onepass.optim.contract import Hyper
from onepass.reference import optimizer as reference
from tests.optim.cases import (
    BF16,
    F32,
    F64,
    assert_same,
    everything,
    members,
    same,
    snapshot,
    through_a_file,
    through_pickle,
)
from tests.support.injection import interruptions

SHAPES = ((24, 40), (300,), (3, 8, 6), (), (1,), (1, 5), (5, 1))
NAMES = ("Adafactor", "LAMB")
names = pytest.mark.parametrize("name", NAMES)
STEPS = 20
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


class ReferenceLAMB(torch.optim.Optimizer):
    """An optimizer class of the reference."""

    def __init__(self, params, maximize=False, **settings):
        super().__init__(params, {"lr": 1e-3, "maximize": maximize, "settings": settings})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, moments=(torch.zeros_like(p), torch.zeros_like(p)))
                state["step"] += 1
                gradient = -p.grad if group["maximize"] else p.grad
                after = reference.lamb(
                    p, gradient, *state["moments"], state["step"], **group["settings"]
                )
                p.copy_(after[0])
                state["moments"] = after[1:]


def stock(name):
    return torch.optim.Adafactor if name == "Adafactor" else ReferenceLAMB


def start(dtype=F32, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def give(params, number: int, scale=1.0) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def made(name, dtype=F32, cls=None, seed=0, **options):
    params = [p.requires_grad_() for p in start(dtype, seed)]
    cls = cls or getattr(onepass.optim, name)
    return cls(params, **{**SETTINGS[name][0], **options})


def steps(optimizer, count=STEPS, first=0):
    for number in range(first, first + count):
        give(members(optimizer), number)
        optimizer.step()
    return optimizer


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.isa
@names
@pytest.mark.parametrize("which", range(3))
def test_as_stock(which, name):
    """Adafactor as torch's, LAMB as the reference; the rule over all parameters of a run."""
    settings = SETTINGS[name][which]
    eps = settings.get("eps", (torch.finfo(F32).eps, 1e-3))
    theirs = {**settings, "eps": eps} if name == "Adafactor" else settings  # None: the dtype's own
    runs = [made(name, **settings)]
    runs += [made(name, dtype, cls=stock(name), **theirs) for dtype in (F64, F32)]
    ours, ref, base = ([p.detach() for p in members(steps(run))] for run in runs)
    # One element says little: its errors over 20 steps may cancel in one of the runs.
    numerics.assert_close(ours, ref, base, case=f"{name} {settings}")


@names
def test_float64_is_float64(name):
    ours = members(steps(made(name, F64)))
    ref = members(steps(made(name, F64, cls=stock(name))))
    for one, two in zip(ours, ref, strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-13)


def test_the_reference_of_adafactor_is_torchs():
    params, settings = start(F64), {"lr": 0.3, "weight_decay": 0.1, "eps": (1e-6, 1e-3)}
    theirs = torch.optim.Adafactor([p.clone().requires_grad_() for p in params], **settings)
    states: list[dict] = [{} for _ in params]
    for number in range(5):
        give(members(theirs), number)
        for i, p in enumerate(members(theirs)):
            if number == 0:
                shapes = onepass.optim.Adafactor._shapes(None, p)
                states[i] = {key: torch.zeros(shape, dtype=F64) for key, shape in shapes.items()}
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
        optimizer = made("Adafactor", dtype, master=master, lr=0.5)
        eps = torch.finfo(dtype if master is None else F32).eps
        wide = made("Adafactor", eps=(eps, 1e-3), lr=0.5)
        with torch.no_grad():
            for p, q in zip(members(wide), members(optimizer), strict=True):
                p.copy_(q)
        give(members(optimizer), 0, scale)
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
        optimizer = made("LAMB", lr=0.01, weight_decay=0.0, eps=0.0)
        with torch.no_grad():
            members(optimizer)[1].zero_()
        before = [p.detach().clone() for p in members(optimizer)]
        give(members(optimizer), 0, scale)
        optimizer.step()
        for number, (p, was) in enumerate(zip(members(optimizer), before, strict=True)):
            moved = (p.detach() - was).norm()
            expected = float(was.norm()) if number != 1 else p.numel() ** 0.5
            assert float(moved) == pytest.approx(0.01 * expected, rel=1e-4), (scale, number)


# ---- masters, averages, clipping -----------------------------------------------------------------


@names
def test_masters(name):
    """A bfloat16 run with masters is the float32 run of the same gradients, rounded."""
    wide = made(name)
    with torch.no_grad():
        for p in members(wide):
            p.copy_(p.bfloat16())
    results = []
    for master in ("fp32", "remainder16"):
        optimizer = made(name, BF16, master=master)
        for number in range(STEPS):
            give(members(optimizer), number)
            if master == "fp32":
                for p, q in zip(members(wide), members(optimizer), strict=True):
                    p.grad = q.grad.float()
                wide.step()
            optimizer.step()
        results.append(snapshot(optimizer))
    assert_same(*results)
    for number, p in enumerate(members(wide)):
        assert torch.equal(results[0][number, "master"], p)


@names
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_states_are_float32(dtype, name):
    optimizer = steps(made(name, dtype), 2)
    for entry in optimizer.state.values():
        assert {value.dtype for value in entry.values()} == {F32}


@names
def test_clipping_zeroing_and_averages(name):
    plain, ours = made(name), made(name, max_grad_norm=0.5, zero_grads=True, ema_decay=0.9)
    kept: list[Tensor] = []
    for number in range(4):
        for optimizer in (plain, ours):
            give(members(optimizer), number)
        torch.nn.utils.clip_grad_norm_(members(plain), 0.5)
        for optimizer in (plain, ours):
            optimizer.step()
        now = [p.detach() for p in members(ours)]
        kept = [v.clone() for v in now] if number == 0 else kept
        torch._foreach_lerp_(kept, now, 0.1 if number else 1.0)
    for p, q, average in zip(members(plain), members(ours), kept, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert not q.grad.any()
        assert torch.allclose(ours.state[q]["ema"], average, rtol=1e-6, atol=1e-7)
    before = snapshot(ours)
    give(members(ours), 9, float("inf"))
    ours.step()
    after = snapshot(ours)
    assert_same(before, after)  # gradients are zero in both


@names
def test_groups_and_tensor_lr(name):
    params = [p.requires_grad_() for p in start()]
    groups = [{"params": params[:2], "lr": torch.tensor(1e-2)}, {"params": params[2:], "lr": 0.1}]
    ours = getattr(onepass.optim, name)(groups)
    others = [p.requires_grad_() for p in start()]
    one, two = (
        getattr(onepass.optim, name)(some, lr=lr)
        for some, lr in ((others[:2], float(torch.tensor(1e-2))), (others[2:], 0.1))
    )
    for number in range(3):
        give(params, number)
        give(others, number)
        for optimizer in (ours, one, two):
            optimizer.step()
    assert all(map(same, params, others))


class OnDevice(Tensor):
    """A tensor that claims to be on a device."""

    device = property(lambda self: torch.device("cuda"))


@names
def test_a_tensor_lr_on_a_device(name, monkeypatch):
    """The kernel reads the same settings as with a number; Adafactor's updates contain lr already,
    and its weight decay does too."""
    monkeypatch.setattr(tables, "on_device", lambda settings, *_: settings.clone())
    found = []
    for lr in (torch.tensor(0.25).as_subclass(OnDevice), 0.25):
        optimizer = made(name, lr=lr, weight_decay=0.5)
        for now in (0.25, 0.125):
            if isinstance(lr, Tensor):
                lr.fill_(now)
            else:
                optimizer.param_groups[0]["lr"] = now
            device_settings = optimizer._hyper_tables(torch.device("cuda"))[1]
            found.append(dict(zip(Hyper._fields, device_settings[0].tolist(), strict=True)))
    assert found[:2] == found[2:]
    if name == "Adafactor":
        assert [(row["lr"], row["weight_decay"]) for row in found[:2]] == [(1, 0.125), (1, 0.0625)]


@names
def test_layouts(name):
    """Gaps, other orders of elements, gradients in another order; and nothing at all."""
    found = []
    for kind in ("row", "gaps", "columns", "gradient"):
        p = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        p = torch.zeros(6, 16)[:, ::2].copy_(p) if kind == "gaps" else p
        p = p.t().contiguous().t() if kind == "columns" else p
        p.requires_grad_()
        empty = torch.zeros(0, 4, requires_grad=True)
        optimizer = getattr(onepass.optim, name)([p, empty], lr=0.1)
        for number in range(3):
            give([p, empty], number)
            if kind == "gradient":
                p.grad = p.grad.t().contiguous().t()
            optimizer.step()
        found.append(p.detach().clone())
    for other in found[1:]:
        assert torch.allclose(found[0], other, rtol=1e-6)


# ---- state_dict ----------------------------------------------------------------------------------


def test_keys_and_settings_of_adafactor_are_torchs():
    ours, theirs = steps(made("Adafactor"), 2), steps(made("Adafactor", cls=torch.optim.Adafactor))
    mine, stocks = ours.state_dict(), theirs.state_dict()
    for number, entry in stocks["state"].items():
        assert list(mine["state"][number]) == list(entry)
        for key, value in entry.items():
            assert mine["state"][number][key].shape == value.shape
    assert mine["param_groups"][0].keys() == stocks["param_groups"][0].keys()


@names
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, None])
def test_a_run_goes_on_from_a_checkpoint(copied, name):
    optimizer = steps(made(name, BF16, master="fp32"), 3)
    if copied:
        new = copied(optimizer)
    else:
        params = [p.detach().clone().requires_grad_() for p in members(optimizer)]
        new = type(optimizer)(params, master="fp32")
        held = through_a_file(optimizer.state_dict())
        before = copy.deepcopy(held)
        new.load_state_dict(held)
    for one in (optimizer, new):
        steps(one, 3, first=3)
    assert_same(snapshot(optimizer), snapshot(new))
    if not copied:  # loaded tensors are not the stepped ones
        for number, entry in before["state"].items():
            assert all(torch.equal(held["state"][number][key], v) for key, v in entry.items())


@pytest.mark.parametrize("ours_first", [True, False])
def test_torch_and_ours_continue_each_other(ours_first):
    kinds = [onepass.optim.Adafactor, torch.optim.Adafactor]
    first, second = kinds if ours_first else kinds[::-1]
    one = steps(made("Adafactor", cls=first), 5)
    params = [p.detach().clone().requires_grad_() for p in members(one)]
    two = second(params, lr=1e-2)
    two.load_state_dict(through_a_file(one.state_dict()))
    steps(two, 5, first=5)
    whole = steps(made("Adafactor", cls=torch.optim.Adafactor), 10)
    for p, q in zip(members(two), members(whole), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


def test_fuse():
    theirs = steps(made("Adafactor", cls=torch.optim.Adafactor), 3)
    ours = onepass.optim.fuse(theirs, max_grad_norm=1e9)
    assert type(ours) is onepass.optim.Adafactor
    steps(ours, 3, first=3)
    whole = steps(made("Adafactor", cls=torch.optim.Adafactor), 6)
    for p, q in zip(members(ours), members(whole), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


# ---- contract ------------------------------------------------------------------------------------


@names
def test_states_of_another_shape_are_refused(name):
    optimizer = steps(made(name), 2)
    key = list(optimizer.state[members(optimizer)[0]])[1]
    checkpoint = optimizer.state_dict()
    checkpoint["state"][0][key] = torch.ones(3)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=f"{name}: {key} of parameter 0 must have shape"):
        optimizer.load_state_dict(checkpoint)
    assert_same(before, snapshot(optimizer))
    optimizer.state[members(optimizer)[0]][key] = torch.ones(3)
    optimizer._table = None
    with pytest.raises(RuntimeError, match=f"{name}: {key} of a parameter must have shape"):
        steps(optimizer, 1)


@names
@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_small_states_are_refused(state_dtype, name):
    with pytest.raises(ValueError, match="state_dtype must be None"):
        made(name, state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
    ],
)
def test_messages_of_lamb(settings, message):
    with pytest.raises(ValueError, match=message):
        made("LAMB", **settings)


@names
def test_gradients_of_another_shape_are_refused(name):
    optimizer = steps(made(name), 1)
    before = snapshot(optimizer)
    p = members(optimizer)[1]
    p.data = p.data.view(3, 100)
    p.grad = None
    with pytest.raises(RuntimeError):
        p.grad = torch.ones(300)
        optimizer.step()
    p.data = p.data.view(300)
    before, after = (
        {key: value for key, value in found.items() if key[1] != "grad"}
        for found in (before, snapshot(optimizer))
    )
    assert_same(before, after)


@names
@pytest.mark.parametrize("taken", [0, 2], ids=["first", "third"])
def test_a_step_is_whole_wherever_it_is_interrupted(taken, name):
    def make():
        optimizer = steps(made(name, BF16, master="fp32", zero_grads=True), taken)
        give(members(optimizer), taken)
        return optimizer

    before, after = make(), make()
    after.step()
    states = [everything(one, False) for one in (before, after)]
    met = set()
    for at, optimizer in interruptions(make, lambda one: one.step(), most=80):
        found = everything(optimizer, False)
        assert found in states, f"bytecode {at}: neither before nor after"
        met.add(states.index(found))
    assert met == {0, 1}
