"""`fused_accumulate`: gradients are taken while backward computes them."""

import copy
import math
from unittest import mock

import pytest
import torch
from torch import nn

import onepass
from onepass.optim import accumulate, fused_accumulate, step
from tests.optim.cases import assert_same, built, snapshot, through_pickle
from tests.support.dtypes import BF16, F16, F32

OPTIMIZERS = {
    "AdamW": {"master": "fp32"},
    "SGD": {},
    "Lion": {"master": "remainder16"},
    "MuonWithAdamW": {},
    "Adafactor": {"master": "fp32"},
    "LAMB": {"master": "remainder16"},
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


class Model(nn.Module):
    """A weight used twice, one in float32, and one that some backwards leave out."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8)
        self.rare = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x, rare=True):
        x = self.first(self.first(x).tanh())
        x = self.norm(x.float()).to(x.dtype)
        return (self.rare(x) if rare else x).float().square().mean()


def build(name, dtype=BF16, **options):
    model = Model(dtype)
    return model, built(name, list(model.parameters()), **{**OPTIMIZERS[name], **options})


def batch(number, dtype=BF16):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


def gradients_of(model, number, rare=True):
    """Gradients of a single backward, by name."""
    model.zero_grad()
    model(batch(number, model.first.weight.dtype), rare).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def by_hand(model, optimizer, number, count):
    """A step with float32 sums of the gradients of `count` backwards, as in the loop."""
    sums: dict = {}
    for k in range(count):
        for name, gradient in gradients_of(model, 10 * number + k, rare=k > 0).items():
            sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
    for name, p in model.named_parameters():
        p.grad_dtype = None
        p.grad = sums.get(name)
    optimizer.step()
    model.zero_grad()
    for p in model.parameters():
        p.grad_dtype = p.dtype


# ---- sums ----------------------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.parametrize(
    "name, dtype", [*((name, BF16) for name in OPTIMIZERS), ("AdamW", F16), ("Adafactor", F16)]
)
def test_a_step_with_sums_is_that_of_the_loop(dtype, name):
    """Also with zeroed gradients, and clipped by the norm of the sums."""
    options = {"SGD": {"zero_grads": True}, "AdamW": {"max_grad_norm": 0.01}}.get(name, {})
    (model, optimizer), (plain, reference) = (build(name, dtype, **options) for _ in range(2))
    sums = fused_accumulate(optimizer)
    for number in range(3):
        for k in range(3):
            model(batch(10 * number + k, dtype), rare=k > 0).backward()
            assert all(p.grad is None for p in model.parameters() if p.dtype is dtype)
        assert sums.sum_of(model.first.weight).dtype is F32
        optimizer.step()
        model.norm.zero_grad()
        assert sums.sum_of(model.first.weight) is None
        by_hand(plain, reference, number, 3)
        assert optimizer.grad_norm == reference.grad_norm
        assert name != "AdamW" or optimizer.grad_norm > 0.01
    assert_same(snapshot(optimizer), snapshot(reference))


def test_a_gradient_is_added_as_it_is():
    """Once, by the operator whose traffic is counted under the emulator, and not as a copy."""
    weight = torch.ones(64, 64, dtype=BF16, requires_grad=True)
    made = []
    weight.register_post_accumulate_grad_hook(lambda p: made.append(p.grad.data_ptr()))
    fused_accumulate(onepass.optim.SGD([weight], lr=0.1, master="fp32"))
    weight.sum().backward()  # the first gradient becomes the sum
    ops = accumulate._ops
    with mock.patch.object(ops, "optimizer_step", wraps=ops.optimizer_step) as step:
        weight.sum().backward()
    ((added,),) = (call.args[3] for call in step.call_args_list)
    assert added.dtype is BF16 and added.data_ptr() == made[1]


def test_who_empties_what():
    """`optimizer.zero_grad` clears sums and `.grad`, `model.zero_grad` only `.grad`."""
    model, optimizer = build("AdamW")
    sums = fused_accumulate(optimizer)
    for empty, is_kept in ((model.zero_grad, True), (optimizer.zero_grad, False)):
        optimizer.zero_grad()
        model(batch(0)).backward()
        empty()
        assert (sums.sum_of(model.first.weight) is not None) is is_kept
        assert model.norm.weight.grad is None


def test_sums_that_are_not_finite_make_no_step_and_go():
    model, optimizer = build("AdamW", max_grad_norm=1.0)
    sums = fused_accumulate(optimizer)
    model(batch(0)).backward()
    before = snapshot(optimizer)
    (model.first.weight.sum() * float("inf")).backward()
    optimizer.step()
    after = snapshot(optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before if key[1] == "param")
    assert sums.sum_of(model.first.weight) is None


def test_a_gradient_in_another_order():
    p = torch.randn(4, 6).to(BF16).requires_grad_()
    optimizer = onepass.optim.SGD([p], lr=1.0)
    sums = fused_accumulate(optimizer)
    x = torch.randn(3, 4).to(BF16)
    for _ in range(3):
        (p.t() @ x.t()).sum().backward()
    wanted = 3 * x.sum(0).float()[:, None].expand(4, 6)
    assert torch.allclose(sums.sum_of(p), wanted, rtol=2e-2)


def test_a_failed_step_keeps_the_sums():
    model, optimizer = build("AdamW")
    sums = fused_accumulate(optimizer)
    model(batch(0)).backward()
    before = sums.sum_of(model.first.weight).clone()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert torch.equal(sums.sum_of(model.first.weight), before)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()


# ---- in backward ---------------------------------------------------------------------------------


@pytest.mark.isa
@optimizers
@pytest.mark.parametrize("ema_decay, clip_value", [(None, None), (0.9, None), (None, 1e-3)])
def test_steps_in_backward_are_those_of_the_loop(clip_value, ema_decay, name):
    (model, optimizer), (plain, reference) = (build(name, ema_decay=ema_decay) for _ in range(2))
    fused_accumulate(optimizer, in_backward=True, clip_value=clip_value)
    for number in range(5):
        model(batch(number), rare=number not in (0, 2)).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        plain(batch(number), rare=number not in (0, 2)).backward()
        if clip_value is not None:
            assert plain.first.weight.grad.abs().max() > clip_value
            torch.nn.utils.clip_grad_value_(plain.parameters(), clip_value)
        reference.step()
        reference.zero_grad()
    assert_same(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("options", [{}, {"master": "fp32", "ema_decay": 0.5}], ids=str)
def test_two_rounds_look_at_each_parameter_a_few_times(options):
    """Hooks must not look at all parameters each time: that would be quadratic in their number."""
    params = [nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(40)]
    optimizer = onepass.optim.AdamW(params, **options)
    fused_accumulate(optimizer, in_backward=True)
    module = onepass.optim.flat_state
    with (
        mock.patch.object(step, "make_table", wraps=step.make_table) as make,
        mock.patch.object(module, "layouts_of", wraps=module.layouts_of) as look,
    ):
        for _ in range(2):
            sum(p.float().square().sum() for p in params).backward()
            optimizer.step()
    make.assert_called_once()
    assert len(optimizer._table.buffers) < 8
    assert sum(len(call.args[0]) for call in look.call_args_list) <= len(params)


def test_one_gradient_at_a_time():
    model, optimizer = build("AdamW")
    held = []
    step = optimizer._step

    def counting():
        held.append(sum(p.grad is not None for p in model.parameters()))
        step()

    optimizer._step = counting
    fused_accumulate(optimizer, in_backward=True)
    for number in range(3):
        model(batch(number)).backward()
    assert held == [1] * 3 * len(list(model.parameters()))


def test_a_function_of_the_step_is_called_once_a_round():
    seen: list[int] = []
    params = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    late = nn.Parameter(torch.ones(3))
    optimizer = onepass.optim.SGD(
        params, lr=0.1, ema_decay=lambda step: seen.append(step) or 1 / step
    )
    fused_accumulate(optimizer, in_backward=True)
    optimizer.param_groups[0]["params"].append(late)
    for _ in range(4):
        sum(p.square().sum() for p in [*params, late]).backward()
        optimizer.step()
    assert seen == [2, 3, 4]
    assert (late != 1).all()  # without a hook, in `step`


@pytest.mark.parametrize("in_backward", [None, False, True])
@pytest.mark.parametrize("returned", [None, "much"])
def test_a_function_that_returns_no_number(in_backward, returned):
    p = nn.Parameter(torch.ones(3))
    optimizer = onepass.optim.SGD([p], lr=0.1, ema_decay=lambda step: returned)
    if in_backward is not None:
        fused_accumulate(optimizer, in_backward=in_backward)
    message = f"SGD: ema_decay must .* number.*, got {type(returned).__name__}"
    p.square().sum().backward()
    optimizer.step()
    before = p.detach().clone()
    with pytest.raises(TypeError, match=message):
        p.square().sum().backward()
        optimizer.step()
    assert torch.equal(p, before) and optimizer.param_groups[0]["ema_steps"] == 1


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_accumulating_and_then_a_step_in_backward(name):
    (model, optimizer), (plain, reference) = build(name), build(name)
    handle = fused_accumulate(optimizer, in_backward=True)
    for number in range(3):
        with handle.accumulating():
            model(batch(10 * number), rare=False).backward()
            model(batch(10 * number + 1)).backward()
        model(batch(10 * number + 2)).backward()
        optimizer.step()
        by_hand(plain, reference, number, 3)
    assert_same(snapshot(optimizer), snapshot(reference))


def test_clip_norm_goes_by_a_running_norm():
    """By hand, for parameters whose gradients come in a known order."""
    params = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    optimizer = onepass.optim.SGD(params, lr=1.0)
    handle = fused_accumulate(optimizer, in_backward=True, clip_norm=1.0)
    running = None
    for number in range(4):
        lengths, square = [3.0 + number, 4.0, 0.1], 0.0
        for p, length in zip(params, lengths, strict=True):
            before = p.detach().clone()
            (p[0] * length).backward()
            square += length**2
            norm = max(math.sqrt(square), running or 0.0)
            moved = before[0] - p.detach()[0]
            assert float(moved) == pytest.approx(length * min(1.0, 1.0 / norm), rel=1e-5)
        optimizer.step()
        total = math.sqrt(square)
        running = total if running is None else running + 0.1 * (total - running)
        assert handle.running_norm == pytest.approx(running)
    before = [p.detach().clone() for p in params]
    (params[0] * float("nan")).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, params)) and handle.running_norm == pytest.approx(running)


@pytest.mark.parametrize("how", ["clear", "zero_grad"])
def test_a_round_that_is_given_up_leaves_no_norm(how):
    p = torch.zeros(3, requires_grad=True)
    optimizer = onepass.optim.SGD([p], lr=1.0)
    handle = fused_accumulate(optimizer, in_backward=True, clip_norm=1.0)
    (p[0] * 1e6).backward()
    handle.clear() if how == "clear" else optimizer.zero_grad()
    before = p.detach().clone()
    (p[0] * 0.5).backward()
    assert float(before[0] - p[0]) == 0.5
    optimizer.step()
    assert handle.running_norm == pytest.approx(0.5)


# ---- contract ------------------------------------------------------------------------------------


COPIES = (copy.copy, copy.deepcopy, through_pickle)


@optimizers
@pytest.mark.parametrize("in_backward", [False, True])
def test_copies_do_not_lose_sums(in_backward, name):
    """Refused while there are sums; afterwards a copy is an optimizer without hooks."""
    model, optimizer = build(name)
    sums = fused_accumulate(optimizer, in_backward=in_backward)
    with sums.accumulating():
        model(batch(0)).backward()
    held = sums.sum_of(model.first.weight).clone()
    match = f"{name}: copy and pickle must not be called while fused_accumulate holds sums"
    for copied in COPIES:
        with pytest.raises(RuntimeError, match=match):
            copied(optimizer)
        with pytest.raises(RuntimeError, match="fused_accumulate: hooks must not be copied"):
            copied(sums)
    assert torch.equal(sums.sum_of(model.first.weight), held)
    optimizer.step()
    optimizer.zero_grad()
    pairs = [copied((model, optimizer)) for copied in COPIES[1:]]
    for _, other in pairs:
        fused_accumulate(other, in_backward=in_backward)
    for other, stepped in [*pairs, (model, optimizer)]:
        other(batch(1)).backward()
        stepped.step()
    for _, other in pairs:
        assert_same(snapshot(other), snapshot(optimizer))


def test_remove():
    model, optimizer = build("AdamW")
    handle = fused_accumulate(optimizer)
    with pytest.raises(RuntimeError, match="optimizer must have no such hooks"):
        fused_accumulate(optimizer)
    model(batch(0)).backward()
    handle.remove()
    assert handle.sum_of(model.first.weight) is None
    model(batch(0)).backward()
    assert model.first.weight.grad is not None
    optimizer.step()
    fused_accumulate(optimizer, in_backward=True).remove()


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "MuonWithAdamW", "Adafactor"])
@pytest.mark.grid(2)
def test_scaled_gradients_are_refused(name, unscales, is_mixed):
    """A scaler finds only `.grad` in float32: it would divide those and not the sums."""
    model, optimizer = build(name, F16)
    if not is_mixed:
        model.norm.requires_grad_(False)
    handle = fused_accumulate(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(batch(0, F16))).backward()
    if unscales:
        scaler.unscale_(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="must not be that of a GradScaler"):
        scaler.step(optimizer)
    assert_same(snapshot(optimizer), before)
    handle.remove()


def test_the_step_of_a_scaler_that_is_off():
    model, optimizer = build("AdamW", F16)
    fused_accumulate(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = model.first.weight.detach().clone()
    scaler.scale(model(batch(0, F16))).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.first.weight, before)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True, dtype=BF16)
    optimizer = onepass.optim.SGD(table.parameters(), lr=0.1)
    fused_accumulate(optimizer)
    with pytest.raises(RuntimeError, match="fused_accumulate does not support sparse gradients"):
        table(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip_value": 1.0}, "clip_value must be None without in_backward, got 1.0"),
        ({"clip_norm": 1.0}, "clip_norm must be None without in_backward, got 1.0"),
        ({"clip_value": 0.0, "in_backward": True}, "clip_value must be positive"),
        ({"clip_norm": -1.0, "in_backward": True}, "clip_norm must be positive"),
        ({"in_backward": True}, "in_backward must be False with max_grad_norm"),
    ],
    ids=str,
)
def test_messages(options, message):
    _, optimizer = build("AdamW", max_grad_norm=1.0 if len(options) == 1 else None)
    with pytest.raises(ValueError, match=message):
        fused_accumulate(optimizer, **options)
    with pytest.raises(TypeError, match="optimizer must be one of onepass.optim, got AdamW"):
        fused_accumulate(torch.optim.AdamW([torch.ones(1, requires_grad=True)]))
