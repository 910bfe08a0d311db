"""Everything here works on the parameters' device, whatever torch's default device is."""

import pytest
import torch

import onepass
from onepass.optim.checks import refuse_shared_memory
from tests.optim import test_ema, test_fuse, test_state
from tests.optim.cases import ALL, MODES, give_gradients, kin_names, like, made, members
from tests.support.dtypes import BF16, F32, F64


@pytest.mark.parametrize("name, mode", [*((n, "own state") for n in ALL), ("AdamW", "fp32"),
                                        ("AdamW", "remainder16, bfloat16"), ("AdamW", "stochastic"),
                                        ("AdamW", "int8"), ("AdamW", "all")])  # fmt: skip
def test_steps_copies_and_checkpoints(mode, name):
    with torch.device("meta"):
        optimizer = like(name, mode, max_grad_norm=1.0)
        optimizer.step()  # without gradients
        assert optimizer.grad_norm.device.type == "cpu"
        test_state.test_ours_continued_is_bitwise_the_run_that_was_not_interrupted(
            BF16 if "master" in MODES[mode] else F32, mode, name
        )
        test_fuse.test_copies_go_on_by_themselves(2, mode, name)


@kin_names
def test_what_is_fused(name):
    taken = 0 if name == "Adafactor" else 2  # torch's own cannot make a step here
    with torch.device("meta"):
        test_fuse.test_fuse_takes_groups_and_state(name, taken)


def test_swapped_averages():
    with torch.device("meta"):
        test_ema.test_swap_ema("fp32")


def test_clipping():
    optimizer = made("SGD", (50,))
    give_gradients(optimizer, 0)
    norm = members(optimizer)[0].grad.norm()
    with torch.device("meta"):
        found = onepass.optim.clip_grad_norm_(members(optimizer), 0.5)
    assert found.device.type == "cpu" and torch.isclose(found, norm)


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_taken_in_backward(in_backward):
    with torch.device("meta"):
        optimizer = made("AdamW", (50,), BF16, master="fp32", amsgrad=False)
        sums = onepass.optim.fused_accumulate(optimizer, in_backward=in_backward)
        (p,) = members(optimizer)
        before = p.detach().clone()
        with sums.accumulating():
            p.square().sum().backward()
            p.square().sum().backward()
        p.square().sum().backward()
        optimizer.step()
    assert not torch.equal(p, before)


def test_averages_of_torch():
    model = torch.nn.Linear(4, 4)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.device("meta"):
        optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=0.9)
        optimizer.ema_from(averaged, model)
        optimizer.ema_to(averaged, model)
    assert torch.equal(averaged.module.weight, model.weight)


def test_checks_of_memory():
    both = torch.randn(10)
    with torch.device("meta"):
        refuse_shared_memory("test", "params", [both[::2], both[1::2]])
        with pytest.raises(RuntimeError, match="must not share memory"):
            refuse_shared_memory("test", "params", [both[::2], both[::3]])


@pytest.mark.parametrize("dtype", [F64, BF16])
def test_another_default_dtype(dtype):
    """The codes' values and the steps of sums stay float32."""
    (p,), before = members(made("AdamW", (4096,), BF16)), torch.get_default_dtype()
    codes = onepass.optim.codes
    codes._magnitudes.cache_clear()
    codes._table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        optimizer = onepass.optim.AdamW([p], state_dtype="int8", master="fp32")
        onepass.optim.fused_accumulate(optimizer)
        for _ in range(2):
            p.float().square().sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is F32
    finally:
        torch.set_default_dtype(before)
        codes._magnitudes.cache_clear()
        codes._table.cache_clear()
