"""A model that changes in mid-training, and steps that are hard for small states."""

import gc
import math
import weakref
from collections import UserDict

import pytest
import torch

import onepass
from onepass import _dispatch_log
from onepass.optim import flat_state
from tests.optim.cases import (
    FLAGS,
    assert_same,
    first_moment,
    names,
    ours,
    snapshot,
    stock,
    torch_names,
)
from tests.support.dtypes import BF16, F32


def parameters(*shapes, dtype=F32):
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


# ---- shapes, strides, dtypes ---------------------------------------------------------------------


@torch_names
def test_channels_last_in_mid_training(name):
    """The states get the memory order of the weights again."""
    results = []
    for cls in (ours(name), stock(name)):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3)
        optimizer = cls(model.parameters(), **FLAGS[name])
        images = torch.randn(2, 3, 8, 8)
        for step in range(6):
            if step == 3:
                model = model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        results.append(model.weight.detach().contiguous())
    assert (results[0] - results[1]).abs().max() < 1e-5


@names
@pytest.mark.parametrize("master", ["fp32", "remainder16"])
def test_another_dtype_in_mid_training(name, master):
    """A model made bfloat16 gets masters; one made float32 needs none."""
    (p,) = parameters(300)
    optimizer = ours(name)([p], **FLAGS[name], master=master)
    optimizer.step()
    key = "master" if master == "fp32" else "remainder"
    for dtype, has_one in ((BF16, True), (F32, False), (BF16, True)):
        p.data = p.data.to(dtype)
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert (key in optimizer.state[p]) == has_one
        assert p.dtype is dtype and p.isfinite().all()


def test_a_setting_that_asks_for_another_moment():
    """From the next step on, as in torch."""
    results = []
    for cls in (onepass.optim.SGD, torch.optim.SGD):
        torch.manual_seed(0)
        (p,) = parameters(300)
        optimizer = cls([p], lr=0.1)
        for step in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0
            p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("master", ["fp32", "remainder16"])
@names
def test_a_parameter_that_moves_is_as_one_that_is_written(name, master, grows):
    """With any parameters having gradients in the next steps, and with further parameters."""
    results = []
    for moved in (True, False):
        torch.manual_seed(1)
        params = parameters(300, 70, 9, dtype=BF16)
        optimizer = ours(name)(params, **FLAGS[name], master=master)
        for step, with_gradients in enumerate(([0, 1, 2], [0, 1], [1, 2], [0], [0, 2], [0, 1, 2])):
            if step in (2, 4):
                if moved:
                    params[0].data = params[0].data.clone()
                else:
                    with torch.no_grad():
                        params[0].copy_(params[0].clone())
                if grows:
                    optimizer.add_param_group(dict(params=parameters(20, dtype=BF16)))
            for number, p in enumerate(params):
                p.grad = torch.randn_like(p) if number in with_gradients else None
            optimizer.step()
        results.append(snapshot(optimizer))
    assert_same(*results)


def test_a_new_master_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(_dispatch_log, "_enabled", True)
    monkeypatch.setattr(_dispatch_log.logger, "propagate", True)
    (p,) = parameters(8, dtype=BF16)
    optimizer = onepass.optim.SGD([p], lr=0.1, master="fp32")
    optimizer.step()
    with caplog.at_level("INFO", logger=_dispatch_log.logger.name), torch.no_grad():
        p.clamp_(-1, 1)
        optimizer.step()
    assert "becomes its own master" in caplog.text


def test_one_gradient_of_other_strides_leaves_the_table_alone():
    """The gradient is copied, and the next step finds the table unchanged."""
    params = parameters((30, 20), (7,))
    optimizer = onepass.optim.AdamW(params)
    optimizer.step()
    table = optimizer._table
    tables = dict(table.step_tables)
    params[0].grad = torch.randn(20, 30).t()
    optimizer.step()
    assert optimizer._table is table and table.step_tables == tables


def test_replaced_parameters_are_let_go():
    (p,) = parameters(10)
    optimizer = onepass.optim.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.step()
        optimizer.state.clear()
        (new,) = parameters(10)
        optimizer.param_groups[0]["params"][0] = new
    optimizer.step()
    gc.collect()
    assert len(optimizer._hidden_steps) == 1


# ---- groups, states and gradients from step to step ----------------------------------------------


def stepped(name, change):
    """The parameters after steps with a change among them: normally, and without kept tables."""
    results = []
    for fresh in (False, True):
        torch.manual_seed(0)
        params = parameters(40, 40, 7)
        optimizer = ours(name)(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], **FLAGS[name]
        )
        for step in range(6):
            if step == 3:
                change(optimizer, params)
            if fresh:
                optimizer._table = None  # makes the next step inspect everything
            for p in params:
                if p.grad is not None:
                    p.grad = torch.randn_like(p)
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    return results


def move_between_groups(optimizer, params):
    """The list of all parameters, group after group, stays the same."""
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def swap_within_a_group(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()


def make_a_tuple(optimizer, params):
    optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])


def add_a_group(optimizer, params):
    more = parameters(9)
    params += more
    optimizer.add_param_group({"params": more, "lr": 0.25})


def replace_entries(optimizer, params):
    for p in params:
        optimizer.state[p] = {key: value * 2 for key, value in optimizer.state[p].items()}


def swap_states(optimizer, params):
    one, other = (optimizer.state[p] for p in params[:2])
    for key in one:
        one[key], other[key] = other[key].clone(), one[key].clone()


def swap_entries(optimizer, params):
    one, other, last = (optimizer.state.pop(p) for p in params)
    for p, entry in zip(params, (other, one, last), strict=True):
        optimizer.state[p] = entry


def clear_an_entry(optimizer, params):
    optimizer.state[params[0]].clear()


def load(optimizer, params):
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for key, value in entry.items():
            entry[key] = value.clone() + 1
    optimizer.load_state_dict(saved)


HARMLESS = (swap_within_a_group, make_a_tuple, add_a_group)


@names
@pytest.mark.parametrize(
    "change",
    [
        *HARMLESS,
        move_between_groups,
        replace_entries,
        swap_states,
        swap_entries,
        clear_an_entry,
        load,
    ],
)
def test_a_change_is_noticed(name, change):
    """Steps with a kept table equal steps that inspect everything."""
    kept, anew = stepped(name, change)
    assert all(torch.equal(one, other) for one, other in zip(kept, anew, strict=True))
    if change not in HARMLESS:
        without, _ = stepped(name, lambda *_: None)
        assert not all(torch.equal(one, other) for one, other in zip(kept, without, strict=True))


@names
@pytest.mark.parametrize("what", ["entries", "state"])
def test_mappings_that_are_no_dicts(name, what):
    """States that are put into them later are stepped as well."""
    params = parameters(40, 7)
    optimizer = ours(name)(params, **FLAGS[name])
    optimizer.step()
    if what == "entries":
        for p in params:
            optimizer.state[p] = UserDict(optimizer.state[p])
    else:
        optimizer.state = UserDict(optimizer.state)
    for _ in range(2):
        optimizer.step()
    key = first_moment(name)
    put = optimizer.state[params[0]][key] = torch.full((40,), 9.0)
    optimizer.step()
    assert optimizer.state[params[0]][key] is put and not (put == 9.0).any()


@names
def test_an_iterator_of_parameters_is_no_step_in_silence(name):
    optimizer = ours(name)(parameters(40, 7), **FLAGS[name])
    optimizer.step()
    optimizer.param_groups[0]["params"] = iter(parameters(40, 7))
    with pytest.raises(TypeError, match="params must be a list, got .*iterator"):
        optimizer.step()


@names
def test_every_state_put_there_is_the_one_that_is_stepped(name):
    """Also a state with the same values: code that put it there may read it later."""
    params = parameters(30, 20)
    optimizer = ours(name)(params, **FLAGS[name])
    for _ in range(2):
        optimizer.step()
    for p in params:
        for key in optimizer.state[p]:
            put = optimizer.state[p][key] = optimizer.state[p][key].clone()
            before = put.clone()
            optimizer.step()
            assert optimizer.state[p][key] is put and not torch.equal(put, before), key


@pytest.mark.parametrize("which", ["step", "clip", "norm", "refused"])
def test_gradients_are_let_go(which):
    params = parameters(30, 20)
    optimizer = onepass.optim.AdamW(
        params, max_grad_norm=1.0 if which == "norm" else None, zero_grads=which == "refused"
    )
    optimizer.step()
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        if which == "refused":
            params[1].grad = torch.zeros(20).expand(20)
            params[0].grad = torch.zeros(1).expand(30)
            with pytest.raises(RuntimeError, match="must not share memory"):
                optimizer.step()
        elif which == "clip":
            onepass.optim.clip_grad_norm_(params, 0.1)
        else:
            optimizer.step()
        alive = [weakref.ref(p.grad) for p in params]
        for p in params:
            p.grad = None
        gc.collect()
        assert all(gradient() is None for gradient in alive)


# ---- steps that are not made ---------------------------------------------------------------------


@names
def test_zeroed_gradients_of_a_step_that_is_not_made(name):
    """A loop that leaves zeroing to the optimizer recovers after one bad step."""
    p = torch.nn.Parameter(torch.ones(50))
    p.grad = torch.zeros(50)
    optimizer = ours(name)([p], **FLAGS[name], max_grad_norm=1.0, zero_grads=True)
    moved = []
    for step in range(4):
        p.grad.add_(math.inf if step == 1 else 1.0)
        before = p.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(p, before))
        assert not p.grad.any()
    assert moved == [True, False, True, True]


def test_norms_beyond_float32_of_float64_gradients():
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    p.grad = torch.full((5,), 1e39, dtype=torch.float64)
    onepass.optim.SGD([p], lr=1.0, max_grad_norm=1.0).step()
    assert torch.allclose(p, torch.full_like(p, -1 / math.sqrt(5)))


def test_the_norm_is_that_of_the_last_step():
    (p,) = parameters(50)
    optimizer = onepass.optim.SGD([p], lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    p.grad = torch.full((50,), math.inf)
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    assert optimizer.grad_norm.isinf()


def test_clipping_what_is_listed_twice():
    """torch clips it twice."""
    results = []
    for clip in (onepass.optim.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        (p,) = parameters(10_000)
        results.append((clip([p, p], 1.0), p.grad))
    torch.testing.assert_close(*results)


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.isa
@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4])
def test_8_bit_steps_of_small_gradients_are_not_too_long(share):
    """One element in 256 has a large gradient, the others `share` of it: a second moment rounded to
    zero would make their steps a hundred times too long."""
    lengths = {}
    for state_dtype in (F32, "int8"):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(1 << 14))
        optimizer = onepass.optim.AdamW([p], lr=1.0, weight_decay=0.0, state_dtype=state_dtype)
        scale = torch.full((1 << 14,), share)
        scale[::256] = 1.0
        small = scale < 1
        for _ in range(100):
            before = p.detach().clone()
            p.grad = torch.randn(1 << 14, generator=generator) * scale
            optimizer.step()
        lengths[state_dtype] = (p.detach() - before)[small].square().mean().sqrt()
    assert lengths["int8"] < 2 * lengths[F32]


@torch_names
def test_moments_put_there_in_float32_are_encoded(name):
    """As ZeroRedundancyOptimizer does: entries assigned one by one, without their scales."""
    (p,) = parameters(4096)
    source = ours(name)([p], **FLAGS[name], state_dtype="int8")
    source.step()
    (q,) = parameters(4096)
    q.data.copy_(p)
    q.grad = p.grad
    resumed = ours(name)([q], **FLAGS[name], state_dtype="int8")
    resumed.param_groups[0]["seed"] = source.param_groups[0].get("seed", 0)
    for key, value in source.state_dict()["state"][0].items():
        resumed.state[q][key] = value.clone()
    source.step(), resumed.step()
    key = first_moment(name)
    assert resumed.state[q][key].dtype is torch.uint8
    assert torch.equal(p, q)
    resumed.state[q] = {key: torch.zeros(3)}
    with pytest.raises(RuntimeError, match="of a parameter must have shape"):
        resumed.step()
    assert resumed.state[q][key].shape == (3,)


# ---- fuse and checkpoints ------------------------------------------------------------------------


def test_settings_on_a_device_stay_in_their_memory():
    """Captured steps read them there; here on the meta device."""
    meta, settings = torch.device("meta"), torch.rand(2, 11, dtype=torch.float64)
    assert flat_state.on_device(settings, torch.device("cpu"), None) is None
    first = flat_state.on_device(settings, meta, None)
    assert first.device == meta and first.shape == settings.shape and first.dtype == settings.dtype
    assert flat_state.on_device(settings * 2, meta, first) is first
    assert flat_state.on_device(settings[:1], meta, first).shape == (1, 11)
