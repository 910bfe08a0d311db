"""`ema_decay`: averages of the parameters, updated in the step."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onepass
from onepass import numerics
from tests.optim.cases import (
    SHAPES,
    all_names,
    assert_same,
    give_gradients,
    like,
    made,
    members,
    names,
    resumed,
    same,
    snapshot,
    steps,
    stock,
    through_a_file,
    through_pickle,
    torch_names,
    unchanged,
)
from tests.support.dtypes import BF16, F16, F32, F64

DECAY = 0.9


def averaging(name="AdamW", dtype=F32, **options):
    return like(name, dtype=dtype, **{"ema_decay": DECAY, **options})


def averages(optimizer):
    return [optimizer.state[p]["ema"] for p in members(optimizer)]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.isa
@all_names
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_averages_are_those_of_torch(dtype, name):
    """As torch's AveragedModel by get_ema_multi_avg_fn, over the parameters of the same run."""
    decay = 0.7
    optimizer = averaging(name, dtype, ema_decay=decay)
    ref, base = ([] for _ in range(2))
    for number in range(30):
        give_gradients(optimizer, number)
        optimizer.step()
        for kept, kind in ((ref, F64), (base, dtype)):
            now = [p.detach().to(kind) for p in members(optimizer)]
            if number == 0:
                kept[:] = [value.clone() for value in now]
            else:
                torch._foreach_lerp_(kept, now, 1 - decay)
    for found, wanted, plain in zip(averages(optimizer), ref, base, strict=True):
        assert found.dtype == dtype
        numerics.assert_close(found, wanted, plain, case=f"{name} {dtype}")


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("master", [None, "fp32", "stochastic"])
def test_averages_of_16_bits_do_not_stall(master, dtype):
    """The parameter is constant, and each step of the average is far below half a unit in the last
    place: rounded to nearest, it would not move at all."""
    count, decay, elements = 300, 0.999 if dtype is BF16 else 0.9999, 1 << 14
    p = torch.full((elements,), 1.0, dtype=dtype).requires_grad_()
    optimizer = onepass.optim.SGD([p], lr=0.0, master=master, ema_decay=decay, ema_dtype="param")
    p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(1.5)
    for _ in range(count):
        optimizer.step()
    average = optimizer.state[p]["ema"]
    assert average.dtype is dtype
    expected = 1.5 - 0.5 * decay**count
    spread = average.double().std() / elements**0.5
    assert abs(average.double().mean() - expected) < 6 * spread
    nearest = torch.ones(1, dtype=dtype).lerp_(torch.full((1,), 1.5, dtype=dtype), 1 - decay)
    assert nearest == 1.0  # rounding to nearest stalls, as assumed


@all_names
def test_a_decay_that_is_a_function_of_the_step(name):
    asked = []

    def decay(step):
        asked.append(step)
        return min(0.9, step / (step + 9))

    optimizer = steps(averaging(name, ema_decay=decay), 4)
    by_hand = averaging(name, ema_decay=0.5)
    for number in range(4):
        by_hand.ema_decay = (None, 2 / 11, 3 / 12, 4 / 13)[number] or 0.0
        steps(by_hand, 1, first=number)
    # The first average is the parameter, whatever the decay.
    assert asked == [step for step in (2, 3, 4) for _ in optimizer.param_groups]
    assert_same(snapshot(optimizer), snapshot(by_hand))


def test_parameters_without_a_gradient_keep_their_average():
    """A parameter that gets its first gradient later starts with its value until then."""
    optimizer = made("AdamW", ((3,), (4,)), ema_decay=DECAY)
    late = members(optimizer)[1]
    start = late.detach().clone()
    for number in range(5):
        give_gradients(optimizer, number)
        if number != 3:
            late.grad = None
        optimizer.step()
    assert torch.allclose(optimizer.state[late]["ema"], DECAY * start + (1 - DECAY) * late)
    assert optimizer.param_groups[0]["ema_steps"] == 5


# ---- swap_ema ------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [None, "fp32", "remainder16", "stochastic"])
def test_swap_ema(master):
    """A state dict inside is the one from outside; what is written inside is undone."""
    optimizer = steps(averaging("AdamW", BF16, master=master), 5)
    outside = optimizer.state_dict()
    with unchanged(optimizer), pytest.raises(KeyError), optimizer.swap_ema():
        for p, average in zip(members(optimizer), averages(optimizer), strict=True):
            assert same(p.detach(), average.to(BF16))
        with torch.no_grad():
            members(optimizer)[0].fill_(3.0)
        inside = copy.deepcopy(optimizer.state_dict())
        raise KeyError
    assert inside["param_groups"] == outside["param_groups"]
    for number, entry in outside["state"].items():
        assert inside["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert same(inside["state"][number][key], value), (number, key)
    plain = steps(averaging("AdamW", BF16, master=master), 5)
    assert_same(snapshot(steps(plain, 5, first=5)), snapshot(steps(optimizer, 5, first=5)))


def test_a_parameter_changed_before_swap_ema_is_still_its_own_master():
    optimizer = steps(averaging("AdamW", BF16, master="fp32"), 3)
    p = members(optimizer)[1]
    with torch.no_grad():
        p.fill_(3.0)
    with optimizer.swap_ema():
        pass
    optimizer.param_groups[0]["lr"] = 0.0
    steps(optimizer, 1, first=3)
    assert (optimizer.state[p]["master"] == 3.0).all()


@pytest.mark.parametrize(
    "call, name",
    [(lambda one: one.step(), "step"), (lambda one: one.swap_ema().__enter__(), "swap_ema")]
    + [(copied, "copy and pickle") for copied in (copy.copy, copy.deepcopy, through_pickle)],
    ids=["step", "swap", "copy", "deepcopy", "pickle"],
)
def test_what_is_refused_inside_swap_ema(call, name):
    optimizer = steps(averaging(), 2)
    message = f"AdamW: {name} must not be called inside swap_ema, got a call"
    with unchanged(optimizer), optimizer.swap_ema(), pytest.raises(RuntimeError, match=message):
        call(optimizer)
    copy.deepcopy(optimizer)
    steps(optimizer, 1)


def test_a_backward_through_swapped_parameters_is_noticed():
    linear = nn.Linear(4, 4)
    optimizer = onepass.optim.SGD(linear.parameters(), lr=0.1, ema_decay=DECAY)
    x = torch.ones(2, 4, requires_grad=True)
    linear(x).sum().backward()
    optimizer.step()
    loss = linear(x).sum()
    with optimizer.swap_ema(), pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


# ---- AveragedModel -------------------------------------------------------------------------------


def small_model():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def train(model, optimizer, count, averaged=None, first=0):
    for number in range(first, first + count):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(model)


def ema_model(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


@pytest.mark.parametrize("trained", [False, True])
def test_from_an_averaged_model_and_to_one(trained):
    """As if one of them had averaged from the start; also in mid-training, and over averages."""
    model = small_model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = ema_model(model)
    train(model, plain, 5, kept)
    optimizer = onepass.optim.AdamW(model.parameters(), lr=1e-2, ema_decay=DECAY)
    if trained:
        optimizer.load_state_dict(plain.state_dict())
    optimizer.ema_from(kept, model)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, 5, kept, first=5)
    moved = ema_model(model)
    optimizer.ema_to(moved, model)
    assert moved.n_averaged == optimizer.param_groups[0]["ema_steps"] == 10
    for name, value in kept.state_dict().items():
        assert torch.allclose(moved.state_dict()[name], value, rtol=1e-6, atol=1e-7), name
    for p, value in zip(model.parameters(), kept.module.parameters(), strict=True):
        assert torch.allclose(optimizer.state[p]["ema"], value, rtol=1e-6, atol=1e-7)


def test_another_averaged_model_is_refused():
    model = small_model()
    optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=DECAY)
    other = AveragedModel(nn.Linear(3, 3))
    for call in (optimizer.ema_to, optimizer.ema_from):
        with pytest.raises(ValueError, match="must be given an AveragedModel of the model"):
            call(other, model)
    assert not optimizer.state


# ---- state_dict ----------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("old_count", [False, True])
def test_averages_that_were_dropped_begin_anew(old_count, name):
    """Their count of steps restarts too, since the decay may depend on it; even if the checkpoint
    holds the old one, as it once did."""
    asked: list[int] = []

    def decay(step):
        asked.append(step)
        return 0.5

    optimizer = steps(averaging(name), 3)
    between = steps(resumed(name, optimizer), 1, first=3)
    assert not any("ema" in entry for entry in between.state.values())
    checkpoint = between.state_dict()
    assert all("ema_steps" not in group for group in checkpoint["param_groups"])
    if old_count:
        checkpoint["param_groups"][0]["ema_steps"] = 50
    new = resumed(name, between, checkpoint, ema_decay=decay)
    assert new.param_groups[0]["ema_steps"] == 0
    steps(new, 1, first=4)
    assert all(map(torch.equal, averages(new), members(new))) and not asked
    steps(new, 1, first=5)
    assert asked == [2] and new.param_groups[0]["ema_steps"] == 2


@torch_names
def test_torch_loads_averages_and_brings_them_back(name):
    optimizer = steps(averaging(name), 3)
    theirs = resumed(name, optimizer, cls=stock(name))
    steps(theirs, 1, first=3)
    back = resumed(name, theirs, ema_decay=DECAY)
    assert all(map(torch.equal, averages(back), averages(optimizer)))


def test_pickles_from_before_the_option_load():
    optimizer = steps(made("AdamW", SHAPES), 3)
    held = optimizer.__getstate__()
    del held["ema_decay"], held["ema_dtype"]
    new = object.__new__(type(optimizer))
    new.__setstate__(held)
    assert new.ema_decay is None
    steps(new, 1)


# ---- contract ------------------------------------------------------------------------------------


def test_a_function_that_returns_no_decay_changes_nothing():
    optimizer = steps(averaging(ema_decay=lambda step: 0.9 if step < 4 else 2.0), 3)
    with unchanged(optimizer), pytest.raises(ValueError, match="ema_decay must be from 0 to 1"):
        optimizer.step()
    assert optimizer.param_groups[0]["ema_steps"] == 3


def test_calls_without_averages_are_refused():
    optimizer = made("AdamW", SHAPES)
    for call in (lambda: optimizer.swap_ema().__enter__(), lambda: optimizer.ema_to(None, None)):
        with pytest.raises(RuntimeError, match="must be called with ema_decay, got None"):
            call()


def test_averages_begin_where_the_attribute_is_set():
    optimizer = steps(made("AdamW", SHAPES), 3)
    optimizer.ema_decay = 0.5
    steps(optimizer, 1, first=3)
    assert all(map(torch.equal, averages(optimizer), members(optimizer)))
    assert optimizer.param_groups[0]["ema_steps"] == 1
    optimizer.ema_decay = None
    kept = [average.clone() for average in averages(optimizer)]
    steps(optimizer, 1, first=4)
    assert all(map(torch.equal, averages(optimizer), kept))


@pytest.mark.parametrize("decay", [None, DECAY])
def test_fuse_begins_averages_that_are_not_there(decay):
    p = torch.randn(5).requires_grad_()
    theirs = torch.optim.AdamW([p], lr=1e-2)
    theirs.param_groups[0]["ema_steps"] = 50
    optimizer = onepass.optim.fuse(theirs, ema_decay=decay)
    p.grad = torch.ones(5)
    optimizer.step()
    assert optimizer.param_groups[0].get("ema_steps") == (1 if decay else None)
    assert decay is None or torch.equal(optimizer.state[p]["ema"], p)
