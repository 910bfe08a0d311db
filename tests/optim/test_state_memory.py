"""States whose memory other code exchanges: steps use the new memory, checkpoints show it."""

import copy

import pytest
import torch

import onepass
from tests.optim.cases import (
    ALL,
    FLAGS,
    assert_same,
    like,
    members,
    options_of,
    ours,
    resumed,
    snapshot,
    steps,
)
from tests.support.dtypes import BF16, F32


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


def made(case, gaps=False):
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
def test_other_memory_is_the_same_run(change, gaps, case):
    expected, found = steps(made(case, gaps), 2), steps(made(case, gaps), 2)
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
def test_the_new_memory_stays(case):
    """A process that shares it sees the steps."""
    optimizer = steps(made(case), 1)
    change_all(optimizer, share)
    entries = [v for entry in optimizer.state.values() for v in entry.values()]
    addresses = [entry.data_ptr() for entry in entries]
    steps(optimizer, 2, first=1)
    assert [v for entry in optimizer.state.values() for v in entry.values()] == entries
    assert [entry.data_ptr() for entry in entries] == addresses


def test_one_state_of_muon_with_adamw():
    """Two operators' steps: none is made twice."""
    for number in range(3):
        expected, found = (steps(like("MuonWithAdamW", dtype=F32), 2) for _ in range(2))
        for value in found.state[members(found)[number]].values():
            set_data(value)
        assert_same(snapshot(steps(found, 1, 2)), snapshot(steps(expected, 1, 2)))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_steps_in_backward(name):
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
