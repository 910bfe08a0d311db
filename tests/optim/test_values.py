"""The optimizers on the CPU: values in float32 and 16 bits, settings."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import onepass
from onepass import numerics
from tests.optim.cases import (
    BF16,
    DETERMINISTIC,
    F16,
    F32,
    F64,
    FLAGS,
    MODES,
    NAMES,
    OF_A_GROUP,
    QUARTER,
    SCALES,
    SIZES,
    ReferenceLion,
    assert_same,
    check_against_stock,
    check_run,
    drawn,
    made,
    members,
    names,
    ours,
    run,
    same,
    snapshot,
    steps,
    stock,
    torch_names,
)

# ---- values: float32 -----------------------------------------------------------------------------

learning_rates = pytest.mark.parametrize(
    "lr", [1e-2, torch.tensor(1e-2)], ids=["float lr", "tensor lr"]
)
maximizes = pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
decays = pytest.mark.parametrize("weight_decay", [0.0, 0.1])


@pytest.mark.isa
@learning_rates
@maximizes
@decays
@pytest.mark.parametrize("betas, eps", [((0.9, 0.999), 1e-8), ((0.8, 0.95), 1e-3)])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_adam(name, amsgrad, betas, eps, weight_decay, maximize, lr):
    keys = ["param", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    flags = {"amsgrad": amsgrad, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    check_against_stock(name, keys, lr=lr, maximize=maximize, **flags)


@pytest.mark.isa
@learning_rates
@maximizes
@decays
@pytest.mark.parametrize(
    "momentum, dampening, nesterov",
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True), (0.0, 0.5, False)],
)
def test_sgd(momentum, dampening, nesterov, weight_decay, maximize, lr):
    keys = ["param"] + ["momentum_buffer"] * bool(momentum)
    flags = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    check_against_stock("SGD", keys, lr=lr, weight_decay=weight_decay, maximize=maximize, **flags)


@pytest.mark.isa
@learning_rates
@maximizes
@decays
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.8)])
def test_lion(betas, weight_decay, maximize, lr):
    """Elements whose update is within float32's error of zero are left out: its sign is open."""
    start, gradients = drawn()
    flags = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize, "lr": lr}
    found = run(ours("Lion"), start, gradients, sizes=SIZES, **flags)
    ref = run(ReferenceLion, start, gradients, F64, **flags)
    base = run(ReferenceLion, start, gradients, **flags)
    scale = torch.tensor(SCALES).repeat_interleave(QUARTER)
    keep = ref["closest"][-1] > 1e-6 * scale
    assert keep.float().mean() > 0.99
    assert set(found) == {"param", "exp_avg"}
    check_run(found, ref, base, ["param", "exp_avg"], keep)


def test_lion_of_no_gradient_is_still():
    p = torch.full((20,), 2.0, requires_grad=True)
    p.grad = torch.zeros(20)
    onepass.optim.Lion([p], lr=0.1).step()
    assert (p == 2.0).all()


@pytest.mark.isa
def test_betas_as_tensors_and_decoupled_decay_of_adam():
    betas = (torch.tensor(0.8), torch.tensor([[0.95]]))
    numbers = tuple(float(beta) for beta in betas)
    start, gradients = drawn(count=10)
    flags = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
    found = run(ours("Adam"), start, gradients, betas=betas, **flags)
    ref = run(stock("Adam"), start, gradients, F64, betas=numbers, **flags)
    base = run(stock("Adam"), start, gradients, betas=numbers, **flags)
    check_run(found, ref, base, ["param", "exp_avg", "exp_avg_sq"])


@names
def test_float64(name):
    start, gradients = drawn(F64, count=20)
    found = run(ours(name), start, gradients, F64, **FLAGS[name])
    ref = run(stock(name), start, gradients, F64, **FLAGS[name])
    check_run(found, ref, ref, set(found) - {"step"})
    assert all(draw.dtype == F64 for key in set(found) - {"step"} for draw in found[key])


# ---- values: 16-bit parameters -------------------------------------------------------------------


def spacing(values, dtype):
    """The distance of neighbouring numbers of `dtype`, for each of `values`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(min=info.smallest_normal))
    return info.eps * torch.ldexp(torch.ones_like(exponent, dtype=F64), exponent - 1)


def rounded_away(values, dtype):
    """Rounds to the nearest number of `dtype`, ties away from zero."""
    exact = values.double()
    step = spacing(exact, dtype)
    return (torch.floor(exact.abs() / step + 0.5) * step * exact.sign()).to(dtype)


@pytest.mark.isa
@names
@pytest.mark.parametrize("state_dtype", [None, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_step_rounds_once(dtype, state_dtype, name):
    """One step from a state in mid-training: all results are the nearest to float64's.

    Longer runs tell little: in 16 bits small steps are lost."""
    start, gradients = drawn(dtype, count=4)
    flags = FLAGS[name]
    keep = dtype if state_dtype is None else F32
    p = start.float().requires_grad_()
    warm = stock(name)([p], **flags)
    for gradient in gradients[:3]:
        p.grad = gradient.float()
        warm.step()
    checkpoint = copy.deepcopy(warm.state_dict())
    entries = checkpoint["state"][0]
    entries.pop("closest", None)
    for key in set(entries) - {"step"}:
        entries[key] = entries[key].to(keep)
    results = []
    for cls, working, extras in (
        (ours(name), dtype, {"state_dtype": state_dtype}),
        (stock(name), F64, {}),
        (stock(name), keep, {}),
    ):
        p = start.clone().to(working).requires_grad_()
        optimizer = cls([p], **flags, **extras)
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
        p.grad = gradients[3].to(working)
        optimizer.step()
        entries = optimizer.state_dict()["state"][0]
        results.append({"param": p.detach(), **entries})
    found, ref, base = results
    assert found["param"].dtype == dtype
    base["param"] = base["param"].to(dtype)
    for key in ["param", *(set(entries) - {"step", "closest"})]:
        if key != "param":
            assert found[key].dtype == keep
        if name != "Lion" and found[key].dtype == dtype:
            # In addition to the rounding, float32's own error where terms cancel.
            largest = ref[key].abs().view(len(SCALES), QUARTER).amax(1).repeat_interleave(QUARTER)
            allowed = 0.5 * spacing(ref[key], dtype) + 2.0**-21 * largest
            assert ((found[key].double() - ref[key]).abs() <= allowed).all(), key
        parts = [[draws[key].split(QUARTER)[2]] for draws in (found, ref, base)]
        numerics.assert_close(*parts, case=key)


@pytest.mark.isa
@names
@pytest.mark.parametrize(
    "dtype, master", [(BF16, "fp32"), (F16, "fp32"), (BF16, "remainder16")], ids=str
)
def test_masters(dtype, master, name):
    """The master equals the parameter of a float32 run; the parameter is the master, rounded."""
    start, gradients = drawn(dtype)
    flags = {key: value for key, value in FLAGS[name].items() if key != "amsgrad"}
    extras = {"master": master, "state_dtype": F32}
    found = run(ours(name), start, gradients, dtype, SIZES, **flags, **extras)
    ref = run(stock(name), start, gradients, F64, **flags)
    base = run(stock(name), start, gradients, **flags)
    for p, whole in zip(found["param"], found["master"], strict=True):
        assert p.dtype == dtype and whole.dtype == F32
        assert same(p, rounded_away(whole, dtype))
    keep = None
    if name == "Lion":
        scale = torch.tensor(SCALES).repeat_interleave(QUARTER)
        keep = ref["closest"][-1] > 1e-6 * scale
    found["param"] = found["master"]
    keys = set(found) - {"step", "master"}
    assert keys == set(base) - {"step", "closest"}
    check_run(found, ref, base, keys, keep)


@names
def test_masters_change_nothing_in_float32(name):
    expected = snapshot(steps(made(name, (17, 4096)), 3))
    for master in ("fp32", "remainder16", "stochastic"):
        assert_same(snapshot(steps(made(name, (17, 4096), master=master), 3)), expected, master)


@pytest.mark.isa
@names
@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_mixed_dtypes_are_as_each_alone(mode, name):
    dtypes = (F32, BF16, BF16) if mode == "remainder16" else (F32, BF16, F16)
    alone = [steps(made(name, (4097,), dtype, **MODES[mode]), 3) for dtype in dtypes]
    mixed = [torch.nn.Parameter(members(made(name, (4097,), d))[0].detach()) for d in dtypes]
    together = ours(name)(mixed, **FLAGS[name], **MODES[mode])
    for number in range(3):
        for p in mixed:
            generator = torch.Generator().manual_seed(1000 * number)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        together.step()
    found = snapshot(together)
    for index, one in enumerate(alone):
        picked = {(0, key): value for (i, key), value in found.items() if i == index}
        assert_same(picked, snapshot(one), str(dtypes[index]))


@pytest.mark.isa
@names
@pytest.mark.parametrize("gradient_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_gradients_of_another_dtype(dtype, gradient_dtype, name):
    """As the same gradient in float32 with parameters in float32, where the master shows it."""
    start, gradients = drawn(gradient_dtype, count=3)
    start = start.to(dtype)
    expected = run(ours(name), start.float(), gradients, watched=(3,), **FLAGS[name])
    p = start.clone().requires_grad_()
    p.grad_dtype = None
    optimizer = ours(name)([p], **FLAGS[name], master="fp32", state_dtype=F32)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        assert same(p.grad, gradient)
    entries = optimizer.state_dict()["state"][0]
    assert same(entries.get("master", p.detach()), expected["param"][0])
    for key in set(expected) - {"param", "step"}:
        assert same(entries[key], expected[key][0])


# ---- settings ------------------------------------------------------------------------------------


def twins(build, dtypes=(F32, F64, F32)):
    """build(cls, dtype) for ours, torch in float64 and torch in float32: their parameters."""
    results = []
    for which, dtype in zip((ours, stock, stock), dtypes, strict=True):
        torch.manual_seed(11)
        results.append([p.detach() for p in build(which, dtype)])
    found, ref, base = results
    for one, two, three in zip(found, ref, base, strict=True):
        numerics.assert_close(one, two, three)


@names
def test_groups_have_settings_of_their_own(name):
    def build(which, dtype):
        params = [torch.randn(size).to(dtype).requires_grad_() for size in (50, 4100, 9)]
        groups = [
            {"params": params[:1]},
            {"params": params[1:2], "lr": 0.05, "weight_decay": 0.0},
            {"params": params[2:], **OF_A_GROUP[name]},
        ]
        optimizer = which(name)(groups, lr=1e-2, weight_decay=0.1)
        for number in range(20):
            for p in params:
                p.grad = torch.randn(p.shape).to(dtype)
            if number == 10:
                optimizer.param_groups[0]["lr"] = 0.03
                optimizer.param_groups[1]["weight_decay"] = 0.2
                optimizer.param_groups[1]["maximize"] = True
            optimizer.step()
        return params

    twins(build)


@torch_names
def test_parameters_without_gradients_and_later_groups(name):
    """Each parameter counts its own steps; a group added in mid-training starts at none."""

    def build(which, dtype):
        params = [torch.randn(size).to(dtype).requires_grad_() for size in (50, 70, 9, 4097)]
        optimizer = which(name)(params[:3], **FLAGS[name])
        for number in range(12):
            if number == 5:
                optimizer.add_param_group({"params": params[3:], "lr": 0.1})
            for index, p in enumerate(params):
                gradient = torch.randn(p.shape).to(dtype)
                p.grad = gradient if index != 1 or number % 3 == 2 else None
            params[2].grad = None
            optimizer.step()
        state = optimizer.state_dict()["state"]
        assert 2 not in state or not any(torch.is_tensor(v) for v in state[2].values())
        if name != "SGD":
            assert [float(state[index]["step"]) for index in (0, 1, 3)] == [12, 4, 7]
        return params

    twins(build)


@names
def test_a_step_without_gradients_makes_nothing(name):
    p = torch.ones(5, requires_grad=True)
    optimizer = ours(name)([p])
    assert optimizer.step() is None
    assert (p == 1).all() and not any(optimizer.state_dict()["state"].values())


SCHEDULES = ("cosine", "one cycle", "lambda", "plateau")


@pytest.mark.parametrize(
    ("name", "schedule"),
    # The reference of Lion has betas that it does not let a scheduler cycle.
    [pair for pair in itertools.product(NAMES, SCHEDULES) if pair != ("Lion", "one cycle")],
)
@pytest.mark.parametrize("tensor", [False, True], ids=["float lr", "tensor lr"])
def test_schedulers(tensor, schedule, name):

    def build(which, dtype):
        p = torch.randn(300).to(dtype).requires_grad_()
        lr = torch.tensor(1e-2) if tensor else 1e-2
        flags = {**FLAGS[name], "lr": lr}
        optimizer = which(name)([p], **flags)
        scheduler = {
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "one cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=20
            ),
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        }[schedule]()
        for _ in range(15):
            p.grad = torch.randn(300).to(dtype)
            optimizer.step()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        return [p]

    twins(build)


def test_a_closure_runs_once_with_gradients_on():
    p = torch.ones(5, requires_grad=True)
    optimizer = onepass.optim.SGD([p], lr=0.5)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and loss == 5
    assert (p == 0).all()


def test_hooks_run():
    optimizer = made("AdamW", (5,))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    steps(optimizer, 2)
    assert seen == ["before", "after"] * 2
