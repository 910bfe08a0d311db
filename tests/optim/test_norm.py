"""Norms, GradScaler and zeroed gradients in an optimizer's step; steps that are skipped."""

import copy
import math

import psutil
import pytest
import torch

import onepass
from tests.optim.cases import (
    OF_TENSORS,
    SHAPES,
    all_names,
    assert_same,
    bits,
    give_gradients,
    like,
    made,
    members,
    names,
    options_of,
    resumed,
    runs,
    same,
    shapes_of,
    snapshot,
    steps,
    through_pickle,
    without_gradients,
)
from tests.support.dtypes import F32

# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.isa
@all_names
def test_clipping_is_that_of_clip_grad_norm(name):
    """One norm over all groups; gradients are not written."""
    mine, other = (like(name, dtype=F32, max_grad_norm=limit) for limit in (0.5, None))
    for optimizer in (mine, other):
        optimizer.add_param_group({**optimizer.param_groups[-1], "params": [extra(name)]})
    for number in range(5):
        for optimizer in (mine, other):
            give_gradients(optimizer, number, 0.02 * (number + 1))
        before = [p.grad.clone() for p in members(mine)]
        norm = torch.nn.utils.clip_grad_norm_(members(other), 0.5)
        mine.step(), other.step()
        torch.testing.assert_close(mine.grad_norm, norm)
        assert mine.grad_norm.dtype is F32 and mine.grad_norm.shape == ()
        assert all(same(p.grad, g) for p, g in zip(members(mine), before, strict=True))
    expected = without_gradients(other)
    for key, value in without_gradients(mine).items():
        torch.testing.assert_close(value, expected[key])


def extra(name):
    shape = (30, 70) if "Muon" in name else (70,)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.isa
@runs
def test_options_that_change_no_step(mode, name):
    """A norm within the limit, gradients that become zeros in their memory, averages."""
    off = {"max_grad_norm": None, "zero_grads": False, "ema_decay": None, "ema_dtype": None}
    choices = [{"max_grad_norm": 1e9}, {"max_grad_norm": math.inf}, {"zero_grads": True}]
    found = []
    for options in ({}, *choices, {"ema_decay": 0.9}):
        optimizer = like(name, mode, **{**off, **options})
        for number in range(2):
            give_gradients(optimizer, number)
            matrix = next(p for p in members(optimizer) if p.dim() == 2)
            matrix.grad = matrix.grad.t().contiguous().t()
            gradients = [p.grad for p in members(optimizer)]
            optimizer.step()
            for p, gradient in zip(members(optimizer), gradients, strict=True):
                assert p.grad is gradient and bits(gradient).any() != ("zero_grads" in options)
        assert "max_grad_norm" not in options or optimizer.grad_norm.isfinite()
        found.append({k: v for k, v in without_gradients(optimizer).items() if k[1] != "ema"})
        assert_same(found[-1], found[0], str(options))


def test_the_norm_of_no_gradients_is_zero():
    optimizer = onepass.optim.AdamW([torch.ones(5, requires_grad=True)], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 0 and optimizer.grad_norm.shape == ()


@pytest.mark.isa
@runs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.grid
def test_steps_that_are_skipped(bad, mode, name):
    """By a norm that is not finite, or by a scaler: nothing changes, and the run continues as if
    the step had not been called."""
    extras = {"zero_grads": False}
    if bad is not None:
        extras["max_grad_norm"] = math.inf if bad != bad else 1e9
    expected, found = like(name, mode, **extras), like(name, mode, **extras)
    for number in (0, 1, 2):
        give_gradients(found, number)
        if bad is None:
            found.grad_scale, found.found_inf = torch.tensor(4.0), torch.tensor(1.0)
        else:
            members(found)[1].grad.view(-1)[-1] = bad
        before = snapshot(found)
        found.step()
        assert bad is None or not found.grad_norm.isfinite()
        after = snapshot(found)
        assert_same({key: after[key] for key in before}, before)
        new = [key for key in after.keys() - before.keys() if "master" not in key]
        assert not any(bits(after[key]).any() for key in new)
        if number == 0:  # a checkpoint made now holds no trace of the step
            found = resumed(name, found, **{**options_of(name, mode), **extras})
        elif bad is None:
            found.grad_scale, found.found_inf = None, torch.tensor(0.0)
        steps(found, 1, first=number), steps(expected, 1, first=number)
        assert bad is None or found.grad_norm.isfinite()
    assert_same(snapshot(found), snapshot(expected))
    counts = [[group.get("ema_steps") for group in one.param_groups] for one in (found, expected)]
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.skipif(
    psutil.virtual_memory().available < 10 << 30, reason="needs 10 GiB of free memory"
)
def test_more_elements_than_32_bits_can_count():
    """Both ends of a parameter, and the border, are stepped; the norm counts all of them."""
    torch.set_num_threads(2)
    elements = (1 << 31) + 4097
    p = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
    p.grad = torch.zeros(elements, dtype=torch.bfloat16)
    places = [0, (1 << 31) - 1, 1 << 31, elements - 1]
    for place in places:
        p.grad[place] = 1.0
    optimizer = onepass.optim.SGD([p], lr=0.5, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 2.0
    # Clipped to a norm of one, each of the four gradients is a half.
    assert [p[place].item() for place in places] == [0.75] * 4
    assert p.detach()[1:1000].eq(1).all() and p.detach()[-1000:-1].eq(1).all()


@names
def test_zeroed_gradients_with_gaps_and_none(name):
    optimizer = made(name, ((6,), (5,)), zero_grads=True)
    whole = torch.full((12,), 7.0)
    members(optimizer)[0].grad = whole[::2]
    optimizer.step()
    assert (whole[::2] == 0).all() and (whole[1::2] == 7).all()
    assert members(optimizer)[1].grad is None


# ---- GradScaler ----------------------------------------------------------------------------------


def scaled(optimizer, scaler, number=0):
    """Gradients as after the backward of a scaled loss."""
    scaler.scale(torch.ones(()))
    give_gradients(optimizer, number, scaler.get_scale())
    return [p.grad.clone() for p in members(optimizer)]


@names
def test_only_a_scaler_is_told_that_steps_unscale(name):
    """A clipping trainer unscales first if told no; with fused=True it is told yes, as by torch."""
    optimizer = made(name, SHAPES)
    assert optimizer._step_supports_amp_scaling is False
    fused = made(name, SHAPES, fused=True)
    for one in (fused, copy.deepcopy(fused), through_pickle(fused)):
        assert one._step_supports_amp_scaling is True
    for one in (optimizer, fused):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled(one, scaler)
        with torch.profiler.profile() as profile:
            scaler.step(one)
        ran = {event.key: event.count for event in profile.key_averages()}
        assert ran["onepass::optimizer_step"] == 1, ran
    optimizer._step_supports_amp_scaling = False  # set by the user
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = scaled(optimizer, scaler)
    scaler.step(optimizer)
    for p, gradient in zip(members(optimizer), before, strict=True):
        assert same(p.grad, gradient / 1024)


@pytest.mark.isa
@all_names
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_scaler_in_any_order(limit, name):
    """The step divides, or unscale_ has; gradients are written by unscale_ alone. With a power of
    two the steps are, bit for bit, those of gradients without a scale."""
    results = []
    for scale, unscaled in ((1024.0, False), (1024.0, True), (1.0, False)):
        optimizer = made(name, shapes_of(name), max_grad_norm=limit)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scale != 1.0)
        for number in range(4):
            before = scaled(optimizer, scaler, number)
            if unscaled:
                scaler.unscale_(optimizer)
            after = [p.grad.clone() for p in members(optimizer)]
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
            for p, written, scaled_one in zip(members(optimizer), after, before, strict=True):
                # Those of tensors are unscaled by the scaler, before their step.
                assert same(p.grad, written) or (name in OF_TENSORS and not unscaled)
                assert same(written, scaled_one / 1024 if unscaled else scaled_one)
        norm = [] if limit is None else [optimizer.grad_norm]
        results.append([p.detach() for p in members(optimizer)] + norm)
    for other in results[1:]:
        assert all(same(one, two) for one, two in zip(results[0], other, strict=True))
