"""The optimizers on the CPU: values in float32 and 16 bits, settings."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from onepass import numerics
from tests.optim.cases import (
    DETERMINISTIC,
    FLAGS,
    OF_A_GROUP,
    all_names,
    assert_same,
    built,
    give_gradients,
    like,
    made,
    members,
    names,
    options_of,
    ours,
    same,
    shapes_of,
    snapshot,
    steps,
    stock,
)
from tests.support.dtypes import BF16, F16, F32, F64

STEPS = 100
WATCHED = (1, 2, 10, STEPS)
SCALES = (1e-4, 1e-2, 1.0, 1e2)  # of the gradients, a quarter of the elements each
QUARTER = 1280
# Together four quarters; odd ones, whole vectors, one more than a piece.
SIZES = (1, 7, 16, 17, 255, 257, 470, 4097)


def drawn(dtype=F32, elements=4 * QUARTER, count=STEPS):
    """(start, gradients): parameters off zero, gradients of four scales with a fixed direction."""
    start = torch.randn(elements).sign() * (0.1 + torch.rand(elements))
    scale = torch.tensor(SCALES).repeat_interleave(elements // len(SCALES))
    direction = torch.randn(elements)
    gradients = [(direction + torch.randn(elements)) * scale for _ in range(count)]
    return start.to(dtype), [gradient.to(dtype) for gradient in gradients]


def run(cls, start, gradients, dtype=F32, sizes=None, watched=WATCHED, **flags):
    """{"param" or the state's key: its values after the watched steps, in a row}."""
    sizes = sizes or [start.numel()]
    flags = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flags.items()}
    params = [piece.clone().requires_grad_() for piece in start.to(dtype).split(sizes)]
    optimizer = cls(params, **flags)
    seen = {}
    for number, gradient in enumerate(gradients, 1):
        for p, piece in zip(params, gradient.to(dtype).split(sizes), strict=True):
            p.grad = piece.clone()
        optimizer.step()
        if number in watched:
            entries = optimizer.state_dict()["state"]
            seen.setdefault("param", []).append(torch.cat([p.detach() for p in params]))
            for key in entries.get(0, {}):
                values = [entries[index][key] for index in range(len(params))]
                values = [torch.as_tensor(v).detach().clone().reshape(-1) for v in values]
                seen.setdefault(key, []).append(torch.cat(values))
    return seen


def check_run(found, ref, base, keys, keep=None, case=""):
    """The rule over all watched steps together, for every scale of gradients by itself."""
    for key in keys:
        for quarter in range(len(SCALES)):
            part = slice(quarter * QUARTER, (quarter + 1) * QUARTER)
            pooled = [
                [draw[part] if keep is None else draw[part][keep[part]] for draw in draws[key]]
                for draws in (found, ref, base)
            ]
            numerics.assert_close(*pooled, case=f"{case} {key}, scale {SCALES[quarter]}")


def three_runs(name, count=STEPS, theirs=None, **flags):
    """Of ours over several tensors; of torch in float64 and, as base, in float32 with as many steps
    over the same elements, so that accumulated rounding errors are comparable."""
    start, gradients = drawn(count=count)
    found = run(ours(name), start, gradients, sizes=SIZES, **flags)
    flags.update(theirs or {})
    ref, base = (run(stock(name), start, gradients, dtype, **flags) for dtype in (F64, F32))
    assert set(found) == set(base) - {"closest"}
    return found, ref, base


def check_against_stock(name, keys, **flags):
    found, ref, base = three_runs(name, **flags)
    check_run(found, ref, base, keys, case=f"{name} {flags}")
    if "step" in base:
        assert [float(t[0]) for t in found["step"]] == [float(t[0]) for t in base["step"]]
        assert all((t == t[0]).all() and t.dtype == F32 for t in found["step"])


# ---- values: float32 -----------------------------------------------------------------------------


def by_pairs(**options):
    """Eight choices among options of two values each: any two values of two options meet."""
    columns = (1, 2, 4, 3, 5, 6, 7)  # of an orthogonal array
    for number in range(8):
        places = [(number & column).bit_count() % 2 for column in columns]
        yield {name: of[place] for (name, of), place in zip(options.items(), places, strict=False)}


SETTINGS = {"lr": (1e-2, torch.tensor(1e-2)), "maximize": (False, True), "weight_decay": (0.0, 0.1)}


@pytest.mark.isa
@pytest.mark.parametrize(
    "options",
    by_pairs(
        **SETTINGS,
        name=("AdamW", "Adam"),
        amsgrad=(False, True),
        averages=({}, {"betas": (0.8, 0.95), "eps": 1e-3}),
    ),
    ids=str,
)
def test_adam(options):
    options = dict(options)
    keys = ["param", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options["amsgrad"]
    check_against_stock(options.pop("name"), keys, **options.pop("averages"), **options)


MOMENTA = [
    {"momentum": 0.0}, {"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True},
]  # fmt: skip


@pytest.mark.isa
@pytest.mark.parametrize("options", list(by_pairs(**SETTINGS))[1::2], ids=str)
@pytest.mark.parametrize("momentum", MOMENTA, ids=str)
def test_sgd(momentum, options):
    keys = ["param"] + ["momentum_buffer"] * bool(momentum["momentum"])
    check_against_stock("SGD", keys, **momentum, **options)


@pytest.mark.isa
@pytest.mark.parametrize("flags", by_pairs(**SETTINGS, betas=((0.9, 0.99), (0.5, 0.8))), ids=str)
def test_lion(flags):
    """Elements whose update is within float32's error of zero are left out: its sign is open."""
    found, ref, base = three_runs("Lion", **flags)
    scale = torch.tensor(SCALES).repeat_interleave(QUARTER)
    keep = ref["closest"][-1] > 1e-6 * scale
    assert keep.float().mean() > 0.99
    check_run(found, ref, base, ["param", "exp_avg"], keep)


@pytest.mark.isa
def test_betas_as_tensors_and_decoupled_decay_of_adam():
    betas = (torch.tensor(0.8), torch.tensor([[0.95]]))
    flags = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
    numbers = {"betas": tuple(map(float, betas))}
    runs = three_runs("Adam", 10, numbers, betas=betas, **flags)
    check_run(*runs, ["param", "exp_avg", "exp_avg_sq"])


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
@all_names
@pytest.mark.parametrize(
    "dtype, master", [(BF16, "fp32"), (F16, "fp32"), (BF16, "remainder16")], ids=str
)
def test_masters_are_a_float32_run(dtype, master, name):
    """And averages are those of that run: of its results before they are rounded."""
    options = {} if name in ("Adafactor", "LAMB") else {"state_dtype": F32}
    optimizer = like(name, dtype=dtype, master=master, ema_decay=0.9, **options)
    params = [p.detach().float().requires_grad_() for p in members(optimizer)]
    wide = built(name, params, ema_decay=0.9)
    for number in range(10):
        give_gradients(optimizer, number)
        for p, q in zip(members(optimizer), members(wide), strict=True):
            q.grad = p.grad.float()
        optimizer.step(), wide.step()
    shown, expected = snapshot(optimizer), snapshot(wide)
    for (index, key), value in expected.items():
        if key != "grad":
            assert same(shown[index, "master" if key == "param" else key], value), (index, key)
        if key == "param":
            assert same(shown[index, "param"], rounded_away(value, dtype))


@names
def test_masters_change_nothing_in_float32(name):
    expected = snapshot(steps(made(name, (17, 4096)), 3))
    for master in ("fp32", "remainder16", "stochastic"):
        assert_same(snapshot(steps(made(name, (17, 4096), master=master), 3)), expected, master)


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


@pytest.mark.isa
@pytest.mark.parametrize("name", OF_A_GROUP)
@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_each_parameter_is_stepped_as_it_is_alone(mode, name):
    """Whatever its dtype and its group are, and which others have a gradient. With a rate that is a
    tensor, settings that others lack, a later group, and settings that change: by assignments or,
    as schedulers do, by writing into that tensor."""
    options, more = options_of(name, mode), {"lr": 0.1, **OF_A_GROUP[name]}
    half = BF16 if mode == "remainder16" else F16
    shapes = (*shapes_of(name), shapes_of(name)[0])
    drawn = zip(members(made(name, shapes)), (F32, BF16, half, F32, BF16), strict=True)
    drawn = [p.detach().to(dtype) for p, dtype in drawn]
    params, others = ([p.clone().requires_grad_() for p in drawn] for _ in range(2))
    rate = torch.tensor(1e-2)
    groups = [{"params": params[:2], "lr": rate}, {"params": params[2:4], **more}]
    whole = built(name, groups, **options)
    alone = [built(name, [q], **options, **(more if i in (2, 3) else {}))
             for i, q in enumerate(others)]  # fmt: skip
    for number in range(6):
        if number == 2:
            whole.add_param_group({"params": params[4:]})
            rate.fill_(0.5)
            for index, optimizer in enumerate((*alone, whole)):
                for group in optimizer.param_groups:
                    group["lr"] = 0.5 if index < 2 else group["lr"]
                    group["weight_decay"] = 0.2
        for index, (p, q) in enumerate(zip(params, others, strict=True)):
            generator = torch.Generator().manual_seed(1000 * number + index)
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            has_one = (index + number) % 3 != 0 and (index < 4 or number >= 2)
            p.grad, q.grad = (gradient.clone() if has_one else None for _ in range(2))
        for optimizer in (whole, *alone):
            optimizer.step()
    for p, q, optimizer in zip(params, others, alone, strict=True):
        found, expected = ({"param": x.detach(), **one.state[x]}
                           for one, x in ((whole, p), (optimizer, q)))  # fmt: skip
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if name not in ("Adafactor", "LAMB"):  # whose sums depend on the address
                assert same(found[key], value), key
            elif key != "remainder":
                torch.testing.assert_close(found[key], value)


@all_names
def test_a_step_without_gradients_makes_nothing(name):
    optimizer = like(name, dtype=F32)
    before = snapshot(optimizer)
    assert optimizer.step() is None
    assert_same(snapshot(optimizer), before)
    assert not any(optimizer.state_dict()["state"].values())


@all_names
def test_only_what_has_a_gradient_is_stepped(name):
    optimizer = like(name, dtype=F32)
    before = [p.detach().clone() for p in members(optimizer)]
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    first, second, *_ = members(optimizer)

    called = []

    def closure():
        called.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = first.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == float(before[0].square().sum())
    assert called == [True]
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {FLAGS[name]["lr"] / 2}
    moved = [not same(p.detach(), was) for p, was in zip(members(optimizer), before, strict=True)]
    assert moved == [True, False, False, False] and second not in optimizer.state
