"""What changes in mid-training, and what is let go; steps that are hard for small states."""

import copy
import gc
import math
import weakref
from collections import UserDict

import pytest
import torch

import onepass
from onepass import _dispatch_log
from onepass.optim import contract
from tests.optim.cases import (
    ALL,
    FLAGS,
    MODES,
    SHAPES,
    TORCH_NAMES,
    assert_same,
    first_moment,
    give_gradients,
    like,
    made,
    members,
    names,
    options_of,
    ours,
    resumed,
    snapshot,
    steps,
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


# ---- groups, states and gradients from step to step ----------------------------------------------


def stepped(cls, name, change=None, fresh=False):
    """The parameters after steps with a change among them.

    fresh: each step inspects everything, without a kept table.
    """
    torch.manual_seed(0)
    params = parameters(40, 40, (2, 3, 4, 5))
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "momentum": 0.0}]
    optimizer = cls(groups, **FLAGS[name])
    for step in range(6):
        if step == 3 and change is not None:
            change(optimizer, params)
        if fresh:
            optimizer._table = None
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [p.detach().contiguous() for p in params]


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
    one, other = (optimizer.state.pop(p) for p in params[:2])
    optimizer.state.update({params[0]: other, params[1]: one})


def clear_an_entry(optimizer, params):
    optimizer.state[params[0]].clear()


def ask_for_a_moment(optimizer, params):
    """Of SGD; the others have no such setting."""
    optimizer.param_groups[1]["momentum"] = 0.9


def to_channels_last(optimizer, params):
    params[2].data = params[2].data.to(memory_format=torch.channels_last)


def load(optimizer, params):
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for key, value in entry.items():
            entry[key] = value.clone() + 1
    optimizer.load_state_dict(saved)


HARMLESS = (swap_within_a_group, make_a_tuple, add_a_group, to_channels_last)
OTHERS = (
    move_between_groups, replace_entries, swap_states, swap_entries, clear_an_entry,
    ask_for_a_moment, load,
)  # fmt: skip


@names
@pytest.mark.parametrize("change", [*HARMLESS, *OTHERS])
def test_a_change_is_noticed(name, change):
    """Steps with a kept table equal steps that inspect everything, and torch's."""
    kept = stepped(ours(name), name, change)
    assert all(map(torch.equal, kept, stepped(ours(name), name, change, fresh=True)))
    if name in TORCH_NAMES:
        torch.testing.assert_close(kept, stepped(stock(name), name, change))
    if change in OTHERS and (change, name == "SGD") != (ask_for_a_moment, False):
        assert not all(map(torch.equal, kept, stepped(ours(name), name)))


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


def test_settings_on_a_device_stay_in_their_memory():
    """Captured steps read them there; here on the meta device."""
    meta, settings = torch.device("meta"), torch.rand(2, 11, dtype=torch.float64)
    assert contract.on_device(settings, torch.device("cpu"), None) is None
    first = contract.on_device(settings, meta, None)
    assert first.device == meta and first.shape == settings.shape and first.dtype == settings.dtype
    assert contract.on_device(settings * 2, meta, first) is first
    assert contract.on_device(settings[:1], meta, first).shape == (1, 11)


# ---- states whose memory other code exchanges ---------------------------------------------------


def share(entry):
    entry.share_memory_()


def set_data(entry):
    entry.data = entry.data.clone()


def set_storage(entry):
    entry.set_(entry.clone())


CHANGES = (share, set_data, set_storage)
OF_ADAMW = ("fp32", "remainder16, bfloat16", "stochastic", "int8", "all")
CASES = [*((name, "own state") for name in ALL), *(("AdamW", mode) for mode in OF_ADAMW)]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def of_case(case, gaps=False):
    """A new optimizer, with gaps between the elements of a parameter if asked for."""
    optimizer = like(*case, F32 if case[1] in ("own state", "int8") else BF16)
    if gaps:
        p = members(optimizer)[1]
        p.data = p.detach().repeat_interleave(2, -1)[..., ::2]
    return optimizer


def change_all(optimizer, change):
    for entry in optimizer.state.values():
        for value in entry.values():
            change(value)


@cases
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.grid(2)
def test_states_in_other_memory_are_the_same_run(change, gaps, case):
    expected, found = (steps(of_case(case, gaps), 2) for _ in range(2))
    change_all(found, change)
    steps(expected, 2, first=2)
    steps(found, 2, first=2)
    assert_same(snapshot(found), snapshot(expected))
    copied = copy.deepcopy(found)
    new = resumed(case[0], found, **options_of(*case))
    steps(expected, 1, first=4)
    for other in (found, copied, new):
        assert_same(snapshot(steps(other, 1, first=4)), snapshot(expected))


@cases
def test_the_new_memory_of_states_stays(case):
    """A process that shares it sees the steps."""
    optimizer = steps(of_case(case), 1)
    change_all(optimizer, share)
    entries = [v for entry in optimizer.state.values() for v in entry.values()]
    addresses = [entry.data_ptr() for entry in entries]
    steps(optimizer, 2, first=1)
    assert [v for entry in optimizer.state.values() for v in entry.values()] == entries
    assert [entry.data_ptr() for entry in entries] == addresses


def test_one_state_in_other_memory_of_muon_with_adamw():
    """Two operators' steps: none is made twice."""
    for number in range(3):
        expected, found = (steps(like("MuonWithAdamW", dtype=F32), 2) for _ in range(2))
        for value in found.state[members(found)[number]].values():
            set_data(value)
        assert_same(snapshot(steps(found, 1, 2)), snapshot(steps(expected, 1, 2)))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_other_memory_with_steps_in_backward(name):
    runs = []
    for change in (None, share):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = ours(name)(model.parameters(), **FLAGS[name])
        onepass.optim.fused_accumulate(optimizer, in_backward=True)
        for number in range(4):
            if change and number == 2:
                change_all(optimizer, change)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same(*runs)


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


# ---- what is let go -----------------------------------------------------------------------------


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


def followed(optimizer):
    params = members(optimizer)
    entries = [value for p in params for value in optimizer.state.get(p, {}).values()]
    tensors = [*params, *(p.grad for p in params), *entries]
    return [weakref.ref(thing) for thing in (optimizer, *tensors)]


def alive(references):
    gc.collect()
    return [thing for thing in (reference() for reference in references) if thing is not None]


@names
@pytest.mark.parametrize("mode", ["own state", "remainder16", "all"])
def test_an_optimizer_that_is_gone_keeps_nothing(mode, name):
    optimizer = steps(made(name, SHAPES, BF16, **MODES[mode]), 2)
    members(optimizer)[0].grad = None  # a second table
    optimizer.step()
    give_gradients(optimizer, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    optimizer.step()
    references = followed(optimizer)
    del optimizer
    assert alive(references) == []


@names
def test_a_refused_load_and_a_refused_step_keep_nothing(name):
    optimizer = steps(made(name, SHAPES), 1)
    other = steps(made(name, SHAPES), 2)
    checkpoint = other.state_dict()
    checkpoint["param_groups"][0]["lr"] = "x"
    with pytest.raises(TypeError):
        optimizer.load_state_dict(checkpoint)
    del checkpoint
    references = followed(other)
    del other
    assert alive(references) == []
    good = members(optimizer)[1].grad
    members(optimizer)[1].grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    members(optimizer)[1].grad = good
    references = followed(optimizer)
    del optimizer, good
    assert alive(references) == []


@torch_names
@pytest.mark.parametrize("first", ["old", "new"])
def test_fused_optimizers_that_are_gone_keep_nothing(first, name):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    held = {"old": steps(stock(name)(params, lr=0.1), 1)}
    held["new"] = steps(onepass.optim.fuse(held["old"]), 1)
    references = [weakref.ref(held["old"]), *followed(held["new"])]
    del params, held[first]
    gc.collect()
    held.clear()
    assert alive(references) == []


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
