"""Copies of optimizers, and fuse: torch's optimizers replaced in mid-training."""

import copy
import functools
import warnings

import pytest
import torch

import onepass
from tests.optim.cases import (
    FLAGS,
    MODES,
    assert_same,
    built,
    kin_names,
    like,
    made,
    members,
    modes,
    ours,
    resumed,
    runs,
    shapes_of,
    snapshot,
    steps,
    stock,
    through_pickle,
    torch_names,
    unchanged,
)
from tests.support.dtypes import BF16, F16, F32


@runs
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.grid
def test_copies_go_on_by_themselves(taken, mode, name):
    """Pickled, and copied together with the model."""
    optimizer = steps(like(name, mode), taken)
    before = snapshot(optimizer)
    params, copied = copy.deepcopy((members(optimizer), optimizer))
    assert all(one is two for one, two in zip(params, members(copied), strict=True))
    ends = []
    for twin in (copied, through_pickle(optimizer)):
        assert type(twin) is ours(name)
        ends.append(snapshot(steps(twin, 2, first=taken)))
    assert_same(snapshot(optimizer), before)
    expected = snapshot(steps(optimizer, 2, first=taken))
    for end in ends:
        assert_same(end, expected)


def old_optimizer(name, taken, dtype=F32, **flags):
    params = members(made(name, shapes_of(name), dtype))
    return steps(built(name, params, stock(name), **flags), taken)


@kin_names
@pytest.mark.parametrize("taken", [0, 3])
def test_fuse_takes_groups_and_state(name, taken):
    """And stops the old one. A second fuse would start without the states: it is refused."""
    old = old_optimizer(name, taken)
    expected = resumed(name, old)
    groups, params = list(old.param_groups), members(old)
    before = snapshot(old)
    new = onepass.optim.fuse(old, max_grad_norm=1e9)
    assert type(new) is ours(name)
    assert all(one is two for one, two in zip(new.param_groups, groups, strict=True))
    assert all(one is two for one, two in zip(members(new), params, strict=True))
    for arguments in ((), (lambda: 1.0,)):
        with pytest.raises(RuntimeError, match="handed to onepass.optim.fuse"):
            old.step(*arguments)
    with pytest.raises(RuntimeError, match="fuse: optimizer must .* other options"):
        onepass.optim.fuse(old)
    assert onepass.optim.fuse(old, max_grad_norm=1e9) is new
    assert_same(snapshot(new), before)
    if name != "Muon":  # whose products may be those of bfloat16
        found, expected = (snapshot(steps(one, 3, first=taken)) for one in (new, expected))
        assert_same(found, expected)


@torch_names
@modes
@pytest.mark.grid
def test_fuse_takes_the_extras(mode, name):
    old = old_optimizer(name, 2, BF16)
    torch.manual_seed(4)
    expected = resumed(name, old, **MODES[mode])
    torch.manual_seed(4)
    new = onepass.optim.fuse(old, **MODES[mode])
    for key in ("master", "state_dtype", "max_grad_norm"):
        assert getattr(new, key) == MODES[mode].get(key)
    found, expected = (snapshot(steps(o, 2, first=2)) for o in (new, expected))
    assert_same(found, expected)
    assert_same(snapshot(old), expected)  # it shows the state of the new one
    old.load_state_dict(new.state_dict())
    assert not old.state


@torch_names
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_scheduler_made_before_drives_the_new_one(name, taken):
    results = []
    for fused in (False, True):
        optimizer = old_optimizer(name, 0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(6):
                if number == taken and fused:
                    optimizer = onepass.optim.fuse(optimizer)
                steps(optimizer, 1, first=number)
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == FLAGS[name]["lr"] / 64
        results.append(snapshot(optimizer))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value)


@torch_names
def test_a_scheduler_made_before_stays_with_the_new_one_through_a_checkpoint(name):
    old = old_optimizer(name, 1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(old, 0.5)
    new = onepass.optim.fuse(old)
    checkpoint = copy.deepcopy((new.state_dict(), scheduler.state_dict()))
    steps(new, 1, first=1)
    scheduler.step()
    twin = copy.deepcopy(new)
    twin.load_state_dict(checkpoint[0])
    assert all(one is two for one, two in zip(old.param_groups, new.param_groups, strict=True))
    for load in (new.load_state_dict, old.load_state_dict):  # torch's puts new groups there
        load(checkpoint[0])
        scheduler.load_state_dict(checkpoint[1])
        steps(new, 1, first=1)
        scheduler.step()
        assert new.param_groups[0]["lr"] == FLAGS[name]["lr"] / 2
    new.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    assert len(old.param_groups) == len(new.param_groups)


@torch_names
def test_an_optimizer_of_ours_stays_as_it_is(name):
    new = onepass.optim.fuse(old_optimizer(name, 2), max_grad_norm=1.0, state_dtype="float32")
    with unchanged(new):
        assert onepass.optim.fuse(new) is new
        assert onepass.optim.fuse(new, state_dtype=torch.float32, max_grad_norm=1) is new
        message = "fuse: optimizer must .* other options, got .*1.0"
        with pytest.raises(RuntimeError, match=message):
            onepass.optim.fuse(new, max_grad_norm=2.0)
        with pytest.raises(TypeError, match="max_norm"):
            onepass.optim.fuse(new, max_norm=2.0)
    made = type(new)([torch.zeros(5, 5, requires_grad=True)], lr=0.1)
    assert onepass.optim.fuse(made) is made


def test_fuse_refuses_others():
    p = torch.zeros(5, requires_grad=True)
    for other in (torch.optim.NAdam([p]), torch.optim.LBFGS([p]), p, None):
        with pytest.raises(TypeError, match="fuse: optimizer must"):
            onepass.optim.fuse(other)


@torch_names
def test_a_refused_fuse_leaves_the_old_one_as_it_was(name):
    flags = {} if name == "SGD" else {"eps": 1e-4}
    number = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    cases = [
        (old_optimizer(name, 2), ValueError, "master must", {"master": "fp16"}),
        (old_optimizer(name, 2, F16, **flags), ValueError, "remain", {"master": "remainder16"}),
        (old_optimizer(name, 0, differentiable=True), RuntimeError, "differentiable", {}),
        (stock(name)([number]), RuntimeError, "must be floating point tensors, got .*complex", {}),
    ]
    for old, error, message, extras in cases:
        groups, keys = list(old.param_groups), [list(group) for group in old.param_groups]
        with unchanged(old), pytest.raises(error, match=message):
            onepass.optim.fuse(old, **extras)
        assert all(one is two for one, two in zip(old.param_groups, groups, strict=True))
        assert [list(group) for group in old.param_groups] == keys and "step" not in vars(old)
        if not old.defaults["differentiable"]:
            steps(old, 1)


def put_own(optimizer, method):
    """A user's own, as a method of the instance."""
    inner = getattr(optimizer, method)
    inner = getattr(inner, "__func__", lambda self, *given: inner(*given))
    own = functools.wraps(inner)(lambda self, *given: inner(self, *given))
    setattr(optimizer, method, own.__get__(optimizer))


@pytest.mark.parametrize(
    "method, scheduled",
    [("step", None), ("step", "before"), ("step", "after"), ("zero_grad", None),
     ("state_dict", None)],
)  # fmt: skip
def test_fuse_refuses_methods_of_the_instance(method, scheduled):
    """They would not be called any more."""
    old = old_optimizer("AdamW", 1)
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(old, 1)
    put_own(old, method)
    if scheduled == "after":
        torch.optim.lr_scheduler.StepLR(old, 1)
    before = dict(vars(old))
    with pytest.raises(RuntimeError, match=f"fuse: optimizer must have the {method} of its class"):
        onepass.optim.fuse(old)
    assert vars(old) == before


def test_fuse_takes_what_torch_puts_around_a_step():
    """Schedulers wrap it; accelerate puts it back as an attribute of the instance. And hooks."""
    called: list = []
    old = old_optimizer("AdamW", 1)
    old.register_step_post_hook(lambda *_: called.append(1))
    torch.optim.lr_scheduler.StepLR(old, 1)
    torch.optim.lr_scheduler.CosineAnnealingLR(old, 1)
    put_back = old_optimizer("SGD", 1)
    put_back.step = put_back.step
    for one in (old, put_back):
        assert "step" in vars(one)
        steps(onepass.optim.fuse(one), 1)
    assert called


def test_the_options_are_printed():
    params = [torch.nn.Parameter(torch.ones(2))]
    plain = torch.optim.AdamW(params)
    assert repr(onepass.optim.fuse(torch.optim.AdamW(params))) == repr(plain)
    printed = repr(onepass.optim.fuse(torch.optim.AdamW(params), max_grad_norm=1, master="fp32"))
    added = "Options\n    master: fp32\n    max_grad_norm: 1.0\n)"
    assert printed == repr(plain).removesuffix(")") + added
