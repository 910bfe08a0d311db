"""Checkpoints of torch.distributed.checkpoint: saved by some processes, loaded by others."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.fsdp import fully_shard

import onepass
from tests.distributed.dtensors import mesh_of, spread, whole
from tests.distributed.ranks import distributed, on_ranks, run
from tests.optim.cases import assert_same
from tests.support.dtypes import BF16, F32

pytestmark = [*distributed, pytest.mark.filterwarnings("ignore::UserWarning")]

MASTERS = (None, "fp32", "remainder16", "stochastic")
STATE_DTYPES = (None, F32, BF16, "int8")
OPTIONS = {
    f"{master}, {state_dtype}": {"master": master, "state_dtype": state_dtype}
    for master, state_dtype in itertools.product(MASTERS, STATE_DTYPES)
}
# Nothing rounds at random, and no elements of different shards share a scale.
EXACT = [
    key
    for key, options in OPTIONS.items()
    if options["master"] != "stochastic" and options["state_dtype"] in (None, F32)
]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}


def network(size):
    """In bfloat16; quarters of the first weight are kept in 8 bits, rows are shared unevenly."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 5)).to(BF16)
    if size > 1:
        fully_shard(model, mesh=mesh_of((size,)))
    return model


def advance(model, optimizer, numbers):
    for number in numbers:
        for n, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * number + n)
            gradient = torch.randn(p.shape, generator=generator).to(BF16)
            sharded = hasattr(p, "placements")
            p.grad = spread(gradient, p.device_mesh, p.placements) if sharded else gradient
        optimizer.step()


def parts_of(model, optimizer):
    return {
        "model": helpers.get_model_state_dict(model),
        "optimizer": helpers.get_optimizer_state_dict(model, optimizer),
    }


def contents(model, optimizer):
    parts = parts_of(model, optimizer)
    found = {(name,): whole(value) for name, value in parts["model"].items()}
    for name, entry in parts["optimizer"]["state"].items():
        found.update({(name, key): whole(torch.as_tensor(v)) for key, v in entry.items()})
    return found


def made(size, key, seed=6):
    model = network(size)
    torch.manual_seed(seed)
    return model, onepass.optim.AdamW(model.parameters(), **SETTINGS, **OPTIONS[key])


def trained(size, folder, keys, loads):
    """The state that was saved after two steps, or is loaded, and that after two more."""
    results = {}
    for key in keys:
        model, optimizer = made(size, key, seed=6 + loads)
        place = str(Path(folder) / key)
        if loads:
            parts = parts_of(model, optimizer)
            dcp.load(parts, checkpoint_id=place)
            helpers.set_model_state_dict(model, parts["model"])
            helpers.set_optimizer_state_dict(model, optimizer, parts["optimizer"])
        else:
            advance(model, optimizer, range(2))
            dcp.save(parts_of(model, optimizer), checkpoint_id=place)
        before = contents(model, optimizer)
        advance(model, optimizer, range(2, 4))
        results[key] = before, contents(model, optimizer)
    return results


def on(size, folder, keys, loads):
    given = size, str(folder), list(keys), loads
    return run(size, trained, *given)[0] if size > 1 else trained(*given)


SIZES = [(2, 1), (2, 4), (1, 2), (2, 2), (4, 2), (4, 1)]
SLOW_SIZES = [(2, 2), (4, 2)]
PARTS = range(4)  # any two of master, dtype and sizes meet once


def part_of(master, state_dtype, sizes) -> int:
    places = MASTERS.index(master), STATE_DTYPES.index(state_dtype), SIZES.index(sizes)
    return sum(places) % len(PARTS)


@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[pytest.mark.slow] * (p > 0)) for p in PARTS]
)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(s, id=str(s), marks=[pytest.mark.slow] * (s in SLOW_SIZES)) for s in SIZES],
)
def test_a_checkpoint_of_some_processes_is_loaded_by_others(sizes, part, tmp_path):
    first, second = sizes
    chosen = {key: of for key, of in OPTIONS.items() if part_of(**of, sizes=sizes) == part}
    written, read = on(first, tmp_path, chosen, False), on(second, tmp_path, chosen, True)
    for key, options in chosen.items():
        (given, end), (found, other_end) = written[key], read[key]
        assert found.keys() == given.keys(), key
        names = {name[-1] for name in given}
        assert ("master" in names) == (options["master"] in ("fp32", "remainder16"))
        assert "remainder" not in names
        if options["state_dtype"] != "int8" or first == second:
            assert_same(found, given, key)
        else:  # other elements share a scale
            for name in given:
                largest = given[name].float().abs().max()
                error = (found[name].float() - given[name].float()).abs().max()
                assert error <= largest / 16, (key, name)
        if key in EXACT or first == second:
            assert_same(other_end, end, key)
        for name in other_end:
            assert other_end[name].isfinite().all()
            if len(name) == 1:
                assert not torch.equal(other_end[name], found[name]), (key, name)


@pytest.mark.parametrize("key", ["remainder16, None", "fp32, int8", "stochastic, None"])
@on_ranks(2)
def test_a_gathered_state_continues_bitwise(key):
    """One whole state on rank 0, handed to all by set_optimizer_state_dict."""
    model, optimizer = made(2, key)
    advance(model, optimizer, range(2))
    gathers = helpers.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = helpers.get_state_dict(model, optimizer, options=gathers)
    spreads = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, resumed = made(2, key, seed=7)
    helpers.set_model_state_dict(other, weights, options=spreads)
    helpers.set_optimizer_state_dict(other, resumed, states, options=spreads)
    assert_same(contents(other, resumed), contents(model, optimizer))
    for one, its in ((model, optimizer), (other, resumed)):
        advance(one, its, range(2, 4))
    assert_same(contents(other, resumed), contents(model, optimizer))


def test_masters_of_either_form_load_the_others(tmp_path):
    """The keys are the same, so that torch.distributed.checkpoint finds them."""
    pair = ["fp32, None", "remainder16, None"]
    written = on(2, tmp_path, pair, False)
    (tmp_path / pair[0]).rename(tmp_path / "moved")
    (tmp_path / pair[1]).rename(tmp_path / pair[0])
    (tmp_path / "moved").rename(tmp_path / pair[1])
    read = on(2, tmp_path, pair, True)
    for key in pair:
        assert_same(read[key][1], written[key][1], key)
