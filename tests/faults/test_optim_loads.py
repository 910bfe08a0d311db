"""Checkpoints and calls that an optimizer refuses: nothing has changed; the next steps agree."""

import copy
import functools
import math

import pytest
import torch

import onepass
from tests.optim.cases import (
    BF16,
    EXTRAS,
    FLAGS,
    SHAPES,
    WITH_STEP,
    assert_same,
    everything,
    first_moment,
    give_gradients,
    made,
    members,
    names,
    ours,
    over_copies,
    snapshot,
    steps,
)


def trained(name):
    optimizer = steps(made(name, SHAPES, BF16, **EXTRAS[name]), 2)
    give_gradients(optimizer, 2)
    return optimizer


def refused(optimizer, call, error, match=None):
    """The call raises and leaves everything as it was."""
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        call()
    assert everything(optimizer) == before


def check_next_steps(optimizer, name):
    """They equal those of an optimizer that was left alone."""
    twin = trained(name)
    assert_same(snapshot(steps(optimizer, 2, first=3)), snapshot(steps(twin, 2, first=3)))


def put(key, value):
    return lambda checkpoint: checkpoint["state"][1].update({key: value})


def setting(key, value):
    return lambda checkpoint: checkpoint["param_groups"][0].update({key: value})


def drop(checkpoint):
    del checkpoint["state"][1]["step"]


def replace(checkpoint):
    checkpoint["state"][1] = "abc"


STEPS = [
    (ValueError, r"step of parameter 1 must be a whole number .*, got nan", put("step", math.nan)),
    (ValueError, r"got inf", put("step", torch.tensor(math.inf))),
    (ValueError, r"got -1", put("step", torch.tensor(-1.0))),
    (ValueError, r"got 1e\+30", put("step", 1e30)),
    (ValueError, r"got 2\.5", put("step", torch.tensor([2.5]))),
    (TypeError, r"step of parameter 1 must be a number, got '3'", put("step", "3")),
    (TypeError, r"must be a number, got tensor", put("step", torch.zeros(2))),
]
SETTINGS = [
    (TypeError, r"lr of parameter group 0 must be a number, got '1e-3'", setting("lr", "1e-3")),
    (TypeError, r"lr of parameter group 0 must be a number, got None", setting("lr", None)),
    (ValueError, r"lr of parameter group 0 must be at least 0, got -1", setting("lr", -1.0)),
    (ValueError, r"lr of .* must be at least 0, got nan", setting("lr", math.nan)),
    (ValueError, r"lr of .* must be at least 0, got tensor", setting("lr", torch.tensor(-1.0))),
    (TypeError, r"lr of .* must be a number", setting("lr", torch.ones(2))),
    (ValueError, r"weight_decay of .* must be at least 0", setting("weight_decay", -0.1)),
    (TypeError, r"weight_decay of .* must be a number", setting("weight_decay", [0.1])),
    (TypeError, r"maximize of .* must be a bool, got 'no'", setting("maximize", "no")),
    (TypeError, r"ema_steps of parameter group 0 must be a whole num", setting("ema_steps", -1)),
]
BETAS = [
    (TypeError, r"betas of .* must be two numbers, got 0\.9", setting("betas", 0.9)),
    (TypeError, r"betas of .* must be two numbers", setting("betas", (0.9,))),
    (TypeError, r"betas\[1\] of .* must be a number, got 'x'", setting("betas", (0.9, "x"))),
    (ValueError, r"betas\[0\] of .* below 1, got 1\.0", setting("betas", (1.0, 0.9))),
    (ValueError, r"betas\[1\] of .* below 1, got nan", setting("betas", [0.9, math.nan])),
]


def cases(name):
    moment = first_moment(name)
    found = [
        (TypeError, "state of parameter 1 must be a dict, got 'abc'", replace),
        (TypeError, f"{moment} of parameter 1 must be a tensor, got 'abc'", put(moment, "abc")),
        (TypeError, f"{moment} of parameter 1 must be a tensor", put(moment, [1.0])),
        (ValueError, f"{moment} of parameter 1 must have shape", put(moment, torch.zeros(3))),
        (ValueError, "ema of parameter 1 must have shape", put("ema", torch.zeros(3))),
        (ValueError, f"{moment} of parameter 1 must have dtype .*complex",
         put(moment, torch.zeros(SHAPES[1], dtype=torch.complex64))),
        *SETTINGS,
    ]  # fmt: skip
    if name in WITH_STEP:
        found += STEPS
    if name in ("AdamW", "Adam"):
        found += [
            (KeyError, "state of parameter 1 must have a step", drop),
            (ValueError, "eps of .* must be at least 0", setting("eps", -1e-8)),
            (TypeError, "eps of .* must be a number", setting("eps", "x")),
            (TypeError, "amsgrad of .* must be a bool", setting("amsgrad", None)),
        ]
    if name == "AdamW":
        wrong = torch.zeros(SHAPES[1])
        found.append((ValueError, "remainder of .* must have dtype int16", put("remainder", wrong)))
    if name == "SGD":
        found += [
            (ValueError, "momentum of .* must be at least 0", setting("momentum", -0.9)),
            (TypeError, "dampening of .* must be a number", setting("dampening", "x")),
            (TypeError, "seed of .* must be an integer", setting("seed", 0.5)),
        ]
    else:
        found += BETAS
    return found


@names
def test_a_refused_checkpoint_changes_nothing(name):
    optimizer = trained(name)
    whole = optimizer.state_dict()
    for error, match, change in cases(name):
        checkpoint = copy.deepcopy(whole)
        change(checkpoint)
        shown = copy.deepcopy(checkpoint)
        refused(optimizer, lambda c=checkpoint: optimizer.load_state_dict(c), error, match)
        assert str(checkpoint) == str(shown)
    check_next_steps(optimizer, name)


@names
def test_other_checkpoints_than_dicts(name):
    optimizer = trained(name)
    groups, errors = optimizer.state_dict()["param_groups"], (AttributeError, KeyError, TypeError)
    for checkpoint in (None, [], {}, {"state": {}}, {"param_groups": groups}):
        refused(optimizer, lambda c=checkpoint: optimizer.load_state_dict(c), errors)


@names
def test_what_torch_accepts_is_accepted(name):
    """Numbers instead of tensors, lists of betas, tensors of one element; no state at all."""
    optimizer = trained(name)
    checkpoint = optimizer.state_dict()
    if "betas" in checkpoint["param_groups"][0]:
        checkpoint["param_groups"][0]["betas"] = [0.5, torch.tensor(0.75)]
    checkpoint["param_groups"][0]["lr"] = torch.tensor([0.25])
    if name in WITH_STEP:
        checkpoint["state"][0]["step"] = 7
    checkpoint["state"][2] = {}
    optimizer.load_state_dict(checkpoint)
    if name in WITH_STEP:
        assert float(optimizer.state[members(optimizer)[0]]["step"]) == 7.0
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    steps(optimizer, 1)


class Stop(Exception):
    pass


def stop(*_):
    raise Stop("a hook")


@names
@pytest.mark.parametrize("first", [False, True], ids=["", "prepended"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_raises_in_a_load(when, first, name):
    optimizer = trained(name)
    other = steps(made(name, SHAPES, BF16, **EXTRAS[name]), 5)
    other.param_groups[0]["lr"] = 0.5
    register = getattr(optimizer, f"register_load_state_dict_{when}_hook")
    seen = []
    handles = [register(stop), register(lambda *_: seen.append(1), prepend=first)]
    refused(optimizer, lambda: optimizer.load_state_dict(other.state_dict()), Stop, "a hook")
    assert seen == [1] * first
    check_next_steps(optimizer, name)
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


@names
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_raises_in_a_step(when, name):
    """A hook before the step: nothing has changed. A hook after it: the whole step was made."""
    optimizer, twin = trained(name), trained(name)
    getattr(optimizer, f"register_step_{when}_hook")(stop)
    with pytest.raises(Stop, match="a hook"):
        optimizer.step()
    if when == "post":
        twin.step()
    assert_same(snapshot(optimizer), snapshot(twin))
    getattr(optimizer, f"_optimizer_step_{when}_hooks").clear()
    assert_same(snapshot(steps(optimizer, 2, first=3)), snapshot(steps(twin, 2, first=3)))


@names
def test_hooks_that_raise_in_state_dict(name):
    optimizer = trained(name)
    for when in ("pre", "post"):
        before = everything(optimizer)
        handle = getattr(optimizer, f"register_state_dict_{when}_hook")(stop)
        with pytest.raises(Stop, match="a hook"):
            optimizer.state_dict()
        handle.remove()
        assert everything(optimizer) == before


@names
def test_a_refused_group_is_as_it_was(name):
    optimizer = trained(name)
    taken = members(optimizer)[0]
    leaf = torch.ones(4, requires_grad=True)
    for error, params in (
        (RuntimeError, [torch.ones(4, dtype=torch.int64)]),
        (ValueError, [leaf * 2]),
        (ValueError, [leaf, taken]),
        (TypeError, {leaf}),
        (TypeError, [leaf, 3]),
        (TypeError, 3),
        (ValueError, (("a", leaf), torch.ones(3, requires_grad=True))),
    ):
        group = {"params": params, "lr": 0.5}
        before = dict(group)
        refused(optimizer, lambda g=group: optimizer.add_param_group(g), error)
        assert group.keys() == before.keys() and group["params"] is params
    for wrong in (None, [leaf]):
        add = functools.partial(optimizer.add_param_group, wrong)
        refused(optimizer, add, TypeError, "must be a dict")
    refused(optimizer, lambda: optimizer.add_param_group({"lr": 0.5}), KeyError, "params")
    check_next_steps(optimizer, name)
    optimizer.add_param_group({"params": iter([leaf]), "lr": 0.5})
    assert optimizer.param_groups[-1]["params"] == [leaf]


@names
def test_setstate_alone_is_checked_too(name):
    optimizer = trained(name)
    p = members(optimizer)[1]
    for wrong in ("abc", {"step": torch.ones(()), first_moment(name): "abc"}):
        state = {"state": {p: wrong}, "param_groups": optimizer.param_groups}
        refused(optimizer, lambda s=state: optimizer.__setstate__(s), TypeError, "must be")


@names
def test_a_copy_of_a_broken_state_leaves_the_first_alone(name):
    optimizer = trained(name)
    entry = optimizer.state[members(optimizer)[1]]
    good, entry[first_moment(name)] = entry[first_moment(name)], "abc"
    before = everything(optimizer)
    with pytest.raises(TypeError, match="must be a tensor, got 'abc'"):
        copy.deepcopy(optimizer)
    assert everything(optimizer) == before
    entry[first_moment(name)] = good
    assert type(copy.deepcopy(optimizer)) is ours(name)
    assert FLAGS[name]["lr"] == optimizer.param_groups[0]["lr"]


# ---- gradients that torch makes or frees ---------------------------------------------------------


@names
@pytest.mark.parametrize("zero", [False, True], ids=["", "zeroed"])
def test_gradients_with_the_negative_bit(zero, name):
    ends = []
    for negative in (False, True):
        optimizer = made(name, SHAPES, max_grad_norm=0.5, zero_grads=zero)
        for number in range(2):
            give_gradients(optimizer, number)
            if negative:
                for p in members(optimizer)[1:]:
                    p.grad = torch._neg_view(-p.grad)
            optimizer.step()
            for p in members(optimizer):
                assert not zero or not p.grad.any()
        ends.append([p.detach().clone() for p in members(optimizer)] + [optimizer.grad_norm])
    assert all(map(torch.equal, *ends))


def freed(shape, transposed=False):
    gradient = torch.ones(shape[::-1]).t() if transposed else torch.ones(shape)
    gradient.untyped_storage().resize_(0)
    return gradient


def test_clipping_freed_gradients():
    params = [torch.nn.Parameter(torch.ones(4, 5)) for _ in range(3)]
    params[0].grad = torch.ones(4, 10)[:, ::2]  # which alone would be left to torch
    params[1].grad = torch.ones(4, 5)
    params[2].grad = freed((4, 5))
    with pytest.raises(RuntimeError, match="clip_grad_norm_: gradients must have memory"):
        onepass.optim.clip_grad_norm_(params, 0.5)
    assert torch.equal(params[1].grad, torch.ones(4, 5))
    params[2].grad = torch.ones(4, 5)
    assert float(onepass.optim.clip_grad_norm_(params, 0.5)) == pytest.approx(60**0.5)


# ---- missing states ------------------------------------------------------------------------------

REQUIRED = {
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"),
    "Lion": ("exp_avg",), "Muon": ("momentum_buffer",), "Adafactor": ("row_var", "col_var"),
    "LAMB": ("exp_avg", "exp_avg_sq"),
}  # fmt: skip
REQUIRED_CASES = [(name, key) for name, keys in REQUIRED.items() for key in keys]


def matrices(name, count=2, kind=ours, **options):
    flags = {"lr": 1e-2, **({"amsgrad": True} if name == "AdamW" else {}), **options}
    return kind(name)([torch.randn(8, 8, requires_grad=True) for _ in range(count)], **flags)


@pytest.mark.parametrize("none", [False, True], ids=["absent", "None"])
@pytest.mark.parametrize(("name", "key"), REQUIRED_CASES)
def test_a_checkpoint_without_a_moment_is_refused(name, key, none):
    """Steps would go on from zeros at the old count."""
    checkpoint = steps(matrices(name, ema_decay=0.9), 2).state_dict()
    checkpoint["state"][1][key] = None
    if not none:
        del checkpoint["state"][1][key]
    fresh = matrices(name, ema_decay=0.9)
    match = f"{name}: state of parameter 1 must have {key}, got"
    refused(fresh, lambda: fresh.load_state_dict(checkpoint), KeyError, match)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adafactor"])
def test_fuse_refuses_a_missing_moment(name):
    old = steps(matrices(name, kind=lambda name: getattr(torch.optim, name)), 2)
    del old.state[members(old)[0]][REQUIRED[name][0]]
    with pytest.raises(KeyError, match="state of parameter 0 must have"):
        onepass.optim.fuse(old)


@pytest.mark.parametrize("name", REQUIRED)
def test_what_need_not_be_in_a_checkpoint(name):
    """Parameters without a gradient so far, their own keys, first steps to come."""
    optimizer = matrices(name, 4)
    params = members(optimizer)
    params[0].grad = torch.ones(8, 8)
    optimizer.step()
    checkpoint = optimizer.state_dict()
    checkpoint["state"][1] = {}
    if "step" in checkpoint["state"][0]:
        checkpoint["state"][2] = {"step": torch.tensor(0.0)}
    else:
        checkpoint["state"][2] = {"mine": 1}
    fresh = matrices(name, 4)
    fresh.load_state_dict(checkpoint)
    steps(fresh, 1)


@pytest.mark.parametrize("momentum", [{"momentum_buffer": None}, {}])
def test_a_momentum_of_sgd_may_begin_later(momentum):
    fresh = matrices("SGD", momentum=0.9)
    checkpoint = {**fresh.state_dict(), "state": {0: momentum}}
    fresh.load_state_dict(checkpoint)
    new = over_copies("SGD", fresh, lr=1e-2, weight_decay=0.0, dampening=0.0)
    assert_same(snapshot(steps(fresh, 2)), snapshot(steps(new, 2)))


def test_a_copy_goes_on_after_another_setting():
    """amsgrad switched on: the next step makes its moment, in a copy too."""
    optimizer = steps(matrices("Adam"), 2)
    optimizer.param_groups[0]["amsgrad"] = True
    copied = copy.deepcopy(optimizer)
    assert_same(snapshot(steps(copied, 1, 2)), snapshot(steps(optimizer, 1, 2)))
