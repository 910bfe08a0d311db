"""Ctrl-C at any bytecode of an optimizer's calls: each call is done completely or not at all."""

import os

import pytest
import torch

import onepass
from tests.optim.cases import (
    BF16,
    NAMES,
    SHAPES,
    TORCH_NAMES,
    everything,
    give_gradients,
    made,
    members,
    names,
    steps,
    stock,
    torch_names,
)
from tests.support.injection import PACKAGE, interruptions

# Beside the package's frames, those of torch through which a step passes.
FOLDERS = (
    PACKAGE,
    os.path.join(os.path.dirname(torch.__file__), "_ops.py"),
    os.path.join(os.path.dirname(torch.__file__), "optim", "optimizer.py"),
)
MOST = 40  # bytecodes at which a call is interrupted: all, if there are no more


def quick_of(names):
    """AdamW and SGD; the others, which differ only in the formula of a step, are slow tests."""
    slow = [pytest.param(n, marks=() if n in ("AdamW", "SGD") else pytest.mark.slow) for n in names]
    return pytest.mark.parametrize("name", slow)


OPTIONS = {
    "plain": {},
    "rounding": dict(master="remainder16", state_dtype="bfloat16", zero_grads=True),
    "limited": dict(master="fp32", state_dtype="int8", max_grad_norm=0.5),
    "gapped": dict(master="fp32", zero_grads=True),
    "averaging": dict(ema_decay=0.9, ema_dtype="param"),
}


def maker(kind, name):
    if kind == "plain":
        return made(name, SHAPES)
    if kind != "gapped":
        return made(name, SHAPES, BF16, **OPTIONS[kind])
    # Parameters with gaps are stepped as copies, gradients in another order likewise.
    optimizer = made(name, [(4, 6), (5, 8)], BF16, **OPTIONS[kind])
    for p in members(optimizer):
        p.data = p.detach().clone().t().contiguous().t()[:, ::2]
    return optimizer


def stepped(kind, name, taken):
    optimizer = steps(maker(kind, name), taken)
    give_gradients(optimizer, taken)
    return optimizer


def check(make, call, again, most=MOST):
    """After each interrupt the state is that before or after the call; then `again` continues."""
    before, after = make(), make()
    call(after)
    states = [everything(one, False) for one in (before, after)]
    again(before)
    again(after)
    ends = [everything(one, False) for one in (before, after)]
    met = set()
    for at, optimizer in interruptions(make, call, most=most, folders=FOLDERS):
        found = everything(optimizer, False)
        assert found in states, f"bytecode {at}: neither before nor after"
        which = states.index(found)
        met.add(which)
        again(optimizer)
        assert everything(optimizer, False) == ends[which], f"bytecode {at}: goes on otherwise"
    assert 0 in met
    return met


def step(optimizer):
    optimizer.step()


def check_step(make, taken, most=MOST):
    met = check(make, step, lambda optimizer: steps(optimizer, 2, first=taken + 1), most)
    assert met == {0, 1}


after = pytest.mark.parametrize("taken", [0, 2], ids=["first", "third"])


@names
@after
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.grid(2)
def test_step(kind, taken, name):
    check_step(lambda: stepped(kind, name, taken), taken)


def of_matrices(**options):
    return made("Muon", [(4, 6), (6, 4), (5, 5)], BF16, zero_grads=True, **options)


def of_both_halves():
    params = [torch.nn.Parameter(torch.ones(4, 5, dtype=BF16) * k) for k in (1, 2)]
    groups = [{"params": [p], "use_muon": k == 0} for k, p in enumerate(params)]
    return onepass.optim.MuonWithAdamW(groups, master="fp32", zero_grads=True)


def of_formula(name):
    return made(name, [(4, 6), (5,)], BF16, master="fp32", zero_grads=True)


OF_TENSORS = {  # how they are made, and at how many bytecodes a step is interrupted
    "Muon": (of_matrices, 3 * MOST),
    "Muon, fp32": (lambda: of_matrices(master="fp32", max_grad_norm=0.1), 3 * MOST),
    "Muon with AdamW": (of_both_halves, 4 * MOST),
    "Adafactor": (lambda: of_formula("Adafactor"), MOST),
    "LAMB": (lambda: of_formula("LAMB"), MOST),
}


@after
@pytest.mark.parametrize("kind", OF_TENSORS)
@pytest.mark.grid
def test_step_of_tensors(kind, taken):
    """States move after the operator, then gradients are zeroed; both halves are done, or none."""
    build, most = OF_TENSORS[kind]

    def make():
        optimizer = steps(build(), taken)
        give_gradients(optimizer, taken)
        return optimizer

    check_step(make, taken, most)


@names
@pytest.mark.parametrize("what", ["infinite norm", "found_inf", "no gradients"])
@pytest.mark.grid
def test_a_step_that_is_not_made(what, name):
    def make():
        optimizer = stepped("rounding", name, 1)
        optimizer.max_grad_norm = 1.0
        if what == "no gradients":
            optimizer.zero_grad()
        elif what == "found_inf":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        else:
            members(optimizer)[1].grad[7] = float("inf")
        return optimizer

    def again(optimizer):
        for key in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(key, None)
        steps(optimizer, 1, first=5)

    check(make, step, again)


@names
def test_a_step_after_a_change_from_outside(name):
    """Reseeded masters are not half a step: the continued run is the same."""

    def make():
        optimizer = stepped("limited", name, 2)
        with torch.no_grad():
            members(optimizer)[0].clamp_(-0.5, 0.5)
        return optimizer

    ends = []
    for count in (1, 2):  # as if the interrupted step was not made, and as if it was
        optimizer = make()
        for _ in range(count):
            optimizer.step()
        ends.append(everything(optimizer, False))
    for at, optimizer in interruptions(make, step, most=MOST, folders=FOLDERS):
        optimizer.step()
        assert everything(optimizer, False) in ends, f"bytecode {at}"


@quick_of(NAMES)
def test_load_state_dict(name):
    other = steps(made(name, SHAPES, BF16, seed=1, master="fp32"), 3)
    other.param_groups[0]["lr"] = 0.5
    checkpoint = other.state_dict()

    def make():
        optimizer = stepped("rounding", name, 1)
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        optimizer.register_load_state_dict_post_hook(lambda *_: None)
        return optimizer

    check(
        make,
        lambda optimizer: optimizer.load_state_dict(checkpoint),
        lambda optimizer: steps(optimizer, 1, first=5),
        most=3 * MOST,
    )


@names
def test_add_param_group(name):
    check(
        lambda: stepped("limited", name, 1),
        lambda optimizer: optimizer.add_param_group(
            {"params": iter([torch.ones(5, dtype=BF16, requires_grad=True)]), "lr": 0.5}
        ),
        lambda optimizer: steps(optimizer, 1, first=5),
    )


def test_swap_ema():
    """Interrupted anywhere, the parameters are not averages."""

    def call(optimizer):
        with optimizer.swap_ema():
            pass

    check(
        lambda: steps(made("AdamW", [(4, 6), (5,)], BF16, master="fp32", ema_decay=0.9), 3),
        call,
        lambda optimizer: steps(optimizer, 1, first=3),
        most=3 * MOST,
    )


def old_optimizer(name):
    """One of torch's in mid-training, with a scheduler."""
    params = [p.detach().clone().requires_grad_() for p in members(made(name, SHAPES))]
    optimizer = stock(name)(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(optimizer, 2)
    optimizer.scheduler.step()
    return optimizer


def go_on(optimizer):
    steps(optimizer, 1, first=5)
    optimizer.scheduler.step()
    return everything(optimizer, False), optimizer.scheduler.get_last_lr()


@quick_of(TORCH_NAMES)
def test_fuse(name):
    """The old optimizer is unchanged, and so is its scheduler. After an interrupt at the return,
    the same call returns the new optimizer."""
    options = {"master": "stochastic", "max_grad_norm": 1.0}

    def make():
        return old_optimizer(name)

    before, after = everything(make(), False), go_on(make())
    left, returning = 0, 0
    for at, optimizer in interruptions(
        make, lambda optimizer: onepass.optim.fuse(optimizer, **options), most=3 * MOST
    ):
        if everything(optimizer, False) == before:
            assert go_on(optimizer) == after, f"bytecode {at}"
            left += 1
        else:
            new = onepass.optim.fuse(optimizer, **options)
            assert new.state_dict == optimizer.state_dict, f"bytecode {at}"
            steps(new, 1, first=5)
            returning += 1
    assert left > 100 and returning <= 3


@torch_names
def test_loading_into_one_that_was_fused(name):
    """The old optimizer, which its scheduler changes, has the groups of the new one."""
    other = steps(made(name, SHAPES), 3)
    checkpoint = other.state_dict()

    def make():
        old = old_optimizer(name)
        new = onepass.optim.fuse(old)
        new.old = old
        return new

    for at, new in interruptions(make, lambda one: one.load_state_dict(checkpoint), most=MOST):
        old = new.old
        assert all(
            one is two for one, two in zip(old.param_groups, new.param_groups, strict=True)
        ), f"bytecode {at}"
        old.param_groups[0]["lr"] = 0.0
        assert new.param_groups[0]["lr"] == 0.0
