"""The optimizers' state: checkpoints both ways with torch, and changes from outside."""

import copy
import io
from collections import defaultdict

import pytest
import torch

import onepass
from tests.optim.cases import (
    FLAGS,
    MODES,
    RUNS,
    SHAPES,
    assert_same,
    first_moment,
    give_gradients,
    kin_names,
    like,
    made,
    members,
    modes,
    names,
    options_of,
    ours,
    over_copies,
    resumed,
    same,
    shapes_of,
    snapshot,
    steps,
    stock,
    through_a_file,
    torch_names,
    unchanged,
    without_gradients,
)
from tests.support.dtypes import BF16, F16, F32

SAVED_BYTES = 128  # allowed difference between two saved files of tensors of one size


def saved_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


# ---- the form of a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flags",
    [("AdamW", {}), ("Adam", {}), ("SGD", {"momentum": 0.0}), ("SGD", {}), ("Adafactor", {})],
    ids=str,
)
def test_as_torchs(name, flags):
    first = made(name, SHAPES)
    found, expected = (
        steps(over_copies(name, first, cls=cls, **flags), 2).state_dict()
        for cls in (ours(name), stock(name))
    )
    assert list(found) == list(expected)
    assert found["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert list(found["state"][index]) == list(entries)
        for key, value in entries.items():
            one = found["state"][index][key]
            assert (type(one), one.dtype, one.shape) == (type(value), value.dtype, value.shape)
    # With the order of settings.
    assert str(found["param_groups"]) == str(expected["param_groups"])
    plain, torchs = (cls(members(first)) for cls in (ours(name), stock(name)))
    assert isinstance(plain, stock(name))
    assert plain.defaults == torchs.defaults and plain.param_groups == torchs.param_groups


@names
@modes
@pytest.mark.grid
def test_what_belongs_to_the_optimizer_is_not_saved(mode, name):
    """Except masters of 16-bit parameters, the count of averages and, with stochastic rounding, its
    seed: for parameters, and for second moments in Adam and AdamW."""
    plain = made(name, SHAPES, BF16).state_dict()["param_groups"][0]
    torch.manual_seed(5)
    optimizer = steps(made(name, SHAPES, BF16, **MODES[mode]), 1)
    (group,) = optimizer.state_dict()["param_groups"]
    master, state_dtype = (MODES[mode].get(key) for key in ("master", "state_dtype"))
    noisy = master == "stochastic" or ("Adam" in name and state_dtype in (BF16, "int8"))
    counted = {"ema_steps"} if "ema_decay" in MODES[mode] else set()
    assert set(group) - set(plain) == ({"seed"} if noisy else set()) | counted
    if noisy:
        assert type(group["seed"]) is int
    for entries in optimizer.state_dict()["state"].values():
        assert ("master" in entries) == (master in ("fp32", "remainder16"))
        assert "remainder" not in entries and entries.get("master", torch.empty(0)).dtype == F32
        key = first_moment(name)
        dtype = {None: BF16, "int8": F32}.get(state_dtype, state_dtype)
        assert entries[key].dtype == dtype
    for entries in steps(made(name, SHAPES, **MODES[mode]), 1).state_dict()["state"].values():
        assert not {"master", "remainder"} & set(entries)


@names
@modes
@pytest.mark.grid
def test_an_entry_is_saved_with_its_own_bytes_alone(mode, name):
    optimizer = steps(made(name, [(300,)] * 5 + [(4352,)], BF16, **MODES[mode]), 1)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                assert saved_bytes(value) <= saved_bytes(value.clone()) + SAVED_BYTES, (index, key)
    for p in members(optimizer):
        assert saved_bytes(p) <= saved_bytes(p.detach().clone().requires_grad_()) + 2 * SAVED_BYTES


# ---- continued -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, mode, dtype",
    [(*run, BF16) for run in RUNS]
    + [(*run, F32) for run in RUNS if run[1] in ("own state", "int8", "all")],
    ids=str,
)
def test_ours_continued_is_bitwise_the_run_that_was_not_interrupted(dtype, mode, name):
    """What was loaded is a copy: steps leave it alone."""
    whole = steps(like(name, mode, dtype), 3)
    torch.manual_seed(99)
    held = through_a_file(whole.state_dict())
    new = resumed(name, whole, held, **options_of(name, mode))
    saved = copy.deepcopy(held["state"])
    if (name, mode) != ("MuonWithAdamW", "int8"):  # its codes are rounded once more
        assert_same(without_gradients(whole), snapshot(new))
        assert_same(snapshot(steps(new, 3, first=3)), snapshot(steps(whole, 3, first=3)))
    for number, entry in saved.items():
        for key, value in entry.items():
            now = held["state"][number][key]
            assert same(now, value) if torch.is_tensor(value) else now == value


@kin_names
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_through_torch_and_back_is_bitwise(name, amsgrad):
    flags = {"amsgrad": amsgrad} if "Adam" in name else {}
    whole = steps(made(name, shapes_of(name), **flags), 3)
    between = resumed(name, whole, cls=stock(name), **flags)
    new = resumed(name, between, **flags)
    assert_same(snapshot(steps(new, 3, first=3)), snapshot(steps(whole, 3, first=3)))


@names
@pytest.mark.parametrize("mode", ["fp32", "remainder16", "stochastic"])
def test_the_order_of_loading_does_not_matter(mode, name):
    """A model loaded after its optimizer writes the same parameters once more."""
    whole = steps(made(name, SHAPES, BF16, **MODES[mode]), 3)
    new = over_copies(name, made(name, SHAPES, BF16, seed=7), **MODES[mode])
    new.load_state_dict(through_a_file(whole.state_dict()))
    with torch.no_grad():
        for p, loaded in zip(members(new), members(whole), strict=True):
            p.copy_(loaded)
    assert_same(snapshot(steps(new, 3, first=3)), snapshot(steps(whole, 3, first=3)))


@names
@pytest.mark.parametrize("mode", ["own state", "fp32", "remainder16"])
def test_a_checkpoint_of_parameters_laid_out_otherwise(mode, name):
    """Elements of states and parameters correspond by index, not by memory order."""
    shape = (2, 30, 4, 20)
    whole = steps(made(name, (shape, (50, 90)), BF16, **MODES[mode]), 3)
    new = over_copies(name, whole, **MODES[mode])
    images, matrix = members(new)
    images.data = images.data.clone(memory_format=torch.channels_last)
    matrix.data = matrix.data.t().contiguous().t()
    assert not images.is_contiguous() and not matrix.is_contiguous()
    new.load_state_dict(through_a_file(whole.state_dict()))
    back = resumed(name, new, **MODES[mode])
    expected = snapshot(steps(whole, 2, first=3))
    assert_same(snapshot(steps(new, 2, first=3)), expected)
    assert_same(snapshot(steps(back, 2, first=3)), expected)


# ---- loaded --------------------------------------------------------------------------------------


# Options of what was saved and of what loads it, and the dtype of the moments then.
LOADED = [
    ({"master": "fp32", "state_dtype": F32}, {"master": "fp32"}, F32),
    ({"master": "fp32", "state_dtype": F32}, {"master": "fp32", "state_dtype": F32}, F32),
    # Checkpoints from before float32 was the default hold narrow moments.
    ({"master": "fp32", "state_dtype": BF16}, {"master": "fp32"}, F32),
    ({"master": "remainder16", "state_dtype": BF16}, {"master": "remainder16"}, F32),
    ({"master": "fp32"}, {"master": "stochastic"}, F32),
    ({"master": "fp32"}, {}, F32),
    ({"master": "remainder16"}, {}, F32),
    ({}, {"state_dtype": F32}, F32),
]


@names
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("saved, loads, moments", LOADED, ids=str)
@pytest.mark.grid
def test_states_are_never_cast_down(saved, loads, moments, dtype, name):
    """Optimizer.load_state_dict of torch casts them to the parameter's dtype. Only masters that
    nobody asked for are dropped."""
    if saved.get("master") == "remainder16":
        dtype = BF16
    whole = steps(made(name, SHAPES, dtype, **saved), 3)
    new, states = resumed(name, whole, **loads), whole.state_dict()["state"]
    for index, p in enumerate(members(new)):
        for key in {first_moment(name), "master"} & new.state_dict()["state"][index].keys():
            found = new.state_dict()["state"][index][key]
            assert found.dtype is moments and same(found, states[index][key].to(F32))
            if key != "master" or loads["master"] == "fp32":
                assert same(new.state[p][key], found)
    steps(new, 2, first=3)
    for entries in new.state_dict()["state"].values():
        assert ("master" in entries) == (loads.get("master") in ("fp32", "remainder16"))
        assert "remainder" not in entries
    if saved == {"state_dtype": F32, **loads}:
        assert_same(snapshot(new), snapshot(steps(whole, 2, first=3)))


@torch_names
def test_keys_that_a_checkpoint_lacks_come_from_the_constructor(name):
    """Older checkpoints have fewer."""
    whole = steps(made(name, SHAPES), 2)
    checkpoint = copy.deepcopy(whole.state_dict())
    lacking = ("maximize", "foreach", "fused", "weight_decay")
    for key in lacking:
        del checkpoint["param_groups"][0][key]
    new = resumed(name, whole, checkpoint, maximize=True, weight_decay=0.25)
    (group,) = new.param_groups
    assert (group["maximize"], group["weight_decay"]) == (True, 0.25)
    assert set(whole.param_groups[0]) == set(group)
    steps(new, 1)


@names
def test_a_checkpoint_without_a_seed_gets_one(name):
    plain = steps(made(name, SHAPES, BF16, state_dtype=F32), 2)
    new = resumed(name, plain, master="stochastic", state_dtype=F32)
    assert type(new.state_dict()["param_groups"][0]["seed"]) is int
    steps(new, 1)


@names
def test_a_checkpoint_of_other_groups_is_refused_as_by_torch(name):
    optimizer = steps(made(name, SHAPES), 1)
    checkpoint = optimizer.state_dict()
    (group,) = checkpoint["param_groups"]
    for message, groups in (
        ("different number of parameter groups", [group, group]),
        ("doesn't match the size of optimizer's group", [{**group, "params": [0, 1]}]),
    ):
        with unchanged(optimizer), pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**checkpoint, "param_groups": groups})


def test_tensor_lr_and_names_of_parameters_survive():
    params = [
        ("first", torch.nn.Parameter(torch.ones(3))),
        ("second", torch.nn.Parameter(torch.ones(2))),
    ]
    optimizer = steps(onepass.optim.AdamW(params, lr=torch.tensor(0.5)), 1)
    checkpoint = through_a_file(optimizer.state_dict())
    assert checkpoint["param_groups"][0]["param_names"] == ["first", "second"]
    assert torch.equal(checkpoint["param_groups"][0]["lr"], torch.tensor(0.5))
    new = onepass.optim.AdamW([torch.nn.Parameter(torch.ones(n)) for n in (3, 2)])
    new.load_state_dict(checkpoint)
    assert torch.equal(new.param_groups[0]["lr"], torch.tensor(0.5))
    steps(new, 1)


# ---- masters and 8 bits through checkpoints ------------------------------------------------------


@names
@pytest.mark.parametrize(
    "kind, other, is_old",
    [("fp32", "remainder16", False)]
    + [
        ("remainder16", other, is_old)
        for other in ("fp32", "remainder16")
        for is_old in (False, True)
    ],
)
def test_masters_are_converted(kind, other, is_old, name):
    """Both forms hold the same master, so a run continues, bit for bit, with the other form. Older
    checkpoints held remainders."""
    whole = steps(made(name, SHAPES, BF16, master=kind), 3)
    saved = whole.state_dict()
    for p, entry in zip(members(whole), saved["state"].values(), strict=True):
        assert whole.state[p].keys() - {"remainder"} == entry.keys() - {"master"} or kind == "fp32"
        if is_old:
            del entry["master"]
            entry["remainder"] = whole.state[p]["remainder"]
    new = resumed(name, whole, through_a_file(saved), master=other)
    assert_same(snapshot(steps(new, 3, first=3)), snapshot(steps(whole, 3, first=3)))
    assert_same(snapshot(resumed(name, new, master=kind)), without_gradients(whole))


@names
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_masters_are_made_from_the_parameter(dtype, name):
    plain = steps(made(name, SHAPES, dtype), 3)
    new = resumed(name, plain, master="fp32", lr=0.0)
    new.param_groups[0].update(lr=0.0, weight_decay=0.0)
    before = [p.detach().clone() for p in members(new)]
    steps(new, 1)
    assert all(same(p, was) for p, was in zip(members(new), before, strict=True))
    for index, was in enumerate(before):
        assert same(new.state_dict()["state"][index]["master"], was.float())


@torch_names
@modes
@pytest.mark.grid
def test_torch_loads_ours(mode, name):
    """Entries that torch does not know are kept."""
    whole = steps(made(name, SHAPES, BF16, **MODES[mode]), 2)
    new = resumed(name, whole, cls=stock(name))
    for index, p in enumerate(members(new)):
        expected = whole.state_dict()["state"][index][first_moment(name)]
        assert same(new.state[p][first_moment(name)], expected.to(BF16))
    steps(new, 1)


@names
def test_8_bits_are_saved_as_float32_and_come_back(name):
    """Any float32 checkpoint is rounded to codes once, and then stays."""
    key = first_moment(name)
    plain = steps(made(name, SHAPES), 3)
    first = resumed(name, plain, state_dtype="int8")
    entry = first.state_dict()["state"][1][key]
    assert entry.dtype == F32 and entry.shape == (4352,)
    assert len(entry.unique()) <= 255 * (4352 // 256)
    assert not same(entry, plain.state_dict()["state"][1][key])
    for state_dtype in ("int8", F32):
        assert_same(snapshot(resumed(name, first, state_dtype=state_dtype)), snapshot(first))


# ---- changed from outside ------------------------------------------------------------------------


def test_replaced_steps_are_used():
    """As those of a checkpoint made after the change, and as those that are written."""
    replaced, written = (steps(made("AdamW", SHAPES), 2) for _ in range(2))
    replaced.state[members(replaced)[1]]["step"] = torch.tensor(50.0)
    written.state[members(written)[1]]["step"].fill_(50.0)
    ends = [written, resumed("AdamW", replaced), replaced]
    expected, *found = [snapshot(steps(one, 2, first=2)) for one in ends]
    assert [float(expected[index, "step"]) for index in range(4)] == [4, 52, 4, 4]
    for other in found:
        assert_same(other, expected)


@names
def test_codes_of_8_bits_are_replaced_by_codes(name):
    """A checkpoint shows float32; the state holds codes, and others raise before it changes."""
    optimizer, key = steps(made(name, SHAPES, state_dtype="int8"), 2), first_moment(name)
    second, third = members(optimizer)[1:3]
    optimizer.state[third][key] = torch.full(third.shape, 0.25)  # too small for them
    steps(optimizer, 1, first=2)
    codes = optimizer.state[second][key]
    optimizer.state[second][key] = torch.full(second.shape, 0.25)
    message = f"{key} of parameter 1 must have dtype uint8"
    with unchanged(optimizer), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.state[second][key] = codes.clone()
    expected = steps(made(name, SHAPES, state_dtype="int8"), 4)
    steps(optimizer, 1, first=3)
    assert same(second.detach(), members(expected)[1].detach())


@names
@pytest.mark.parametrize("how", ["one", "clear", "new"])
@pytest.mark.parametrize("mode", ["own state", "fp32", "remainder16", "bfloat16", "int8"])
@pytest.mark.grid(2)
def test_dropped_state_starts_again(mode, how, name):
    """As with a new optimizer, bit for bit, the noise too; the state of others stays."""
    found = steps(made(name, SHAPES, BF16, **MODES[mode]), 2)
    fresh = over_copies(name, found, **MODES[mode])
    for group, old in zip(fresh.param_groups, found.param_groups, strict=True):
        group.update({k: v for k, v in old.items() if k != "params"})
    if how == "one":
        p = members(found)[1]
        del found.state[p]
        kept = {k: v for k, v in snapshot(found).items() if k[0] != 1}
    elif how == "clear":
        found.state.clear()
    else:
        found.state = defaultdict(dict)
    steps(found, 1, first=2), steps(fresh, 1, first=2)
    found, fresh = snapshot(found), snapshot(fresh)
    if how == "one":
        assert not same(kept[2, first_moment(name)], found[2, first_moment(name)])
        found, fresh = ({k: v for k, v in s.items() if k[0] == 1} for s in (found, fresh))
    assert_same(found, fresh)


@names
@modes
@pytest.mark.grid(2)
def test_parameters_changed_from_outside_are_used(mode, name):
    """Whether overwritten or given other memory; masters restart from the new values."""
    extras = MODES[mode]
    results = []
    for how in ("written", "other memory", "loaded"):
        optimizer = steps(made(name, SHAPES, BF16, **extras), 2)
        values = [torch.full_like(p, 3.0, requires_grad=True) for p in members(optimizer)]
        if how == "loaded":  # the state without masters, which then are made from the parameters
            checkpoint = copy.deepcopy(optimizer.state_dict())
            for entries in checkpoint["state"].values():
                entries.pop("master", None)
            optimizer = ours(name)(values, **FLAGS[name], **extras)
            optimizer.load_state_dict(checkpoint)
        else:
            for p, value in zip(members(optimizer), values, strict=True):
                if how == "written":
                    with torch.no_grad():
                        p.copy_(value)
                else:
                    p.data = value.detach()
        results.append(snapshot(steps(optimizer, 2, first=2)))
    assert_same(results[0], results[2], "written")
    assert_same(results[1], results[2], "other memory")


@names
@pytest.mark.parametrize("master", ["fp32", "remainder16"])
def test_masters_of_parameters_without_gradients_are_reseeded_too(master, name):
    """Changed before a step without gradients for them, and before one with gradients."""
    found = steps(made(name, SHAPES, BF16, master=master), 2)
    first = members(found)[1]
    with torch.no_grad():
        first.fill_(1.5)
    expected = over_copies(name, found, master=master)
    checkpoint = copy.deepcopy(found.state_dict())
    del checkpoint["state"][1]["master"]
    expected.load_state_dict(checkpoint)
    for optimizer in (found, expected):
        for number in (2, 3):
            give_gradients(optimizer, number)
            if number == 2:
                members(optimizer)[1].grad = None
            optimizer.step()
    assert_same(snapshot(found), snapshot(expected))


@names
@modes
@pytest.mark.grid
def test_members_of_a_group_are_replaced(mode, name):
    optimizer = steps(made(name, SHAPES, BF16, **MODES[mode]), 2)
    old = members(optimizer)[1]
    was = old.detach().clone()
    new = torch.nn.Parameter(torch.ones(4352, dtype=BF16))
    optimizer.param_groups[0]["params"][1] = new
    steps(optimizer, 1, first=2)
    assert same(old, was) and (new != 1).any()
    assert optimizer.state[new][first_moment(name)].shape == (4352,)
    optimizer.param_groups[0]["params"].pop(0)
    steps(optimizer, 1, first=3)
    optimizer.param_groups.pop()
    assert optimizer.step() is None
