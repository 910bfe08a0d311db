"""The optimizer axis of `onepass compare`: choice, measurement, training, verdict."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass.tools.compare import optimizers, train
from onepass.tools.compare.optimizers import Choice
from onepass.tools.compare.workload import GptWorkload
from tests.compare.cases import TINY, settings_of


def workload_of(model, batch, *flags):
    """A workload and settings, as --model makes them, for a given model."""
    settings = settings_of("--model", "here:model", "--steps", "3", *flags)
    return SimpleNamespace(
        dropout=None, curve_name="training loss", build=lambda: copy.deepcopy(model),
        batch=lambda step: batch, small_batch=lambda: batch,
        curve_point=lambda trainer, loss: float("nan") if loss is None else loss.item(),
    ), settings  # fmt: skip


NONE, REMAINDER = (
    "onepass{}, master none, int8 moments",
    "onepass{}, master remainder16, int8 moments",
)


@pytest.mark.parametrize(
    ("dtype", "flags", "names", "cast"),
    [
        (torch.float32, ["bfloat16"], ["onepass, bfloat16 moments"], None),  # parameters stay
        (torch.float32, ["int8", "--master", "none", "remainder16"],
         ["torch fused bf16", NONE.format(" bf16"), REMAINDER.format(" bf16")], torch.bfloat16),
        (torch.bfloat16, ["int8", "--master", "none", "remainder16"],
         [NONE.format(""), REMAINDER.format("")], None),
    ],
)  # fmt: skip
def test_masters_cast_a_float32_model_and_keep_a_16_bit_one(dtype, flags, names, cast):
    batch = torch.randn(2, 4).to(dtype)
    workload, settings = workload_of(nn.Linear(4, 4).to(dtype), batch, "--state-dtype", *flags)
    choices, _ = optimizers.choose(settings, workload)
    assert [choice.name for choice in choices[3:]] == names
    assert {choice.dtype for choice in choices[3:]} == {cast}
    assert not any(choice.is_plain for choice in choices[3:])


def test_choices_make_what_they_say():
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    default, fused = (Choice(library)(parameters) for library in ("default", "fused"))
    assert type(default) is type(fused) is torch.optim.AdamW
    assert default.defaults["fused"] is None and default.defaults["foreach"] is None
    assert fused.defaults["fused"] is True
    ours = Choice("onepass", torch.bfloat16, "remainder16", "bfloat16")(parameters)
    assert type(ours) is onepass.optim.AdamW
    assert ours.master == "remainder16" and ours.state_dtype is torch.bfloat16
    ours = Choice("onepass", torch.bfloat16, "none", "int8")(parameters)
    assert ours.master is None and ours.state_dtype == "int8"
    for optimizer in (default, fused, ours):
        assert {key: optimizer.defaults[key] for key in train.ADAMW} == train.ADAMW


STOCK = train.Sameness(None, "", "loss", [1, 3], [[1.0, 1.0]], [1.0, 1.0], {})


def compare_optimizers(workload, settings, stock, step_seconds=1.0):
    choices, left_out = optimizers.choose(settings, workload)
    return optimizers.compare_optimizers(
        choices, left_out, step_seconds, workload, workload, stock, settings, lambda: None
    )


def test_bytes_are_those_of_the_tensors():
    """8 bytes of float32 moments, and so on, by 4096 parameters, and 4 of a step count."""
    model = nn.Linear(64, 64, bias=False)
    masters = {"none": 0, "fp32": 4, "remainder16": 2, "stochastic": 0}
    flags = ("--master", *masters, "--state-dtype")
    for state_dtype, moments in (("bfloat16", 4), ("int8", 2 + 2 * 4 / 256)):  # and scales
        workload, settings = workload_of(model, torch.randn(2, 64), *flags, state_dtype)
        outcome = compare_optimizers(workload, settings, STOCK)
        assert outcome.parameters == 4096
        expected = {"torch default": 8, "torch fused": 8, "onepass": 8, "torch fused bf16": 4}
        name = f"onepass bf16, master {{}}, {state_dtype} moments".format
        expected |= {name(master): size + moments for master, size in masters.items()}
        state = {name: outcome.state_bytes(name) - 4 / 4096 for name in outcome.outcomes}
        assert state == expected
        for name, size in state.items():
            total = outcome.all_bytes(name) - 4 / 4096
            assert total == size + (4 if "bf16" in name else 8)


def test_every_optimizer_steps_its_own_parameters(monkeypatch):
    made = []
    make = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda params, **kwargs: made.append(params) or make(params, **kwargs)
    )
    workload, settings = workload_of(nn.Linear(4, 4), torch.randn(2, 4), "--optimizers", "default")
    outcome = compare_optimizers(workload, settings, STOCK)
    default, fused = made[-2:]
    start = list(workload.build().parameters())
    for mine, other, before in zip(default, fused, start, strict=True):
        assert mine is not other and mine.grad is other.grad
        assert not torch.equal(mine, before)
        torch.testing.assert_close(mine, other)
    assert outcome.timing.rounds == settings.pairs


@pytest.mark.slow
def test_an_optimizer_that_is_off_by_little_is_different(monkeypatch, text):
    settings = settings_of("--steps", "20")
    workload = GptWorkload(settings, text, TINY, dropout=0.0)
    stock = train.compare_training(workload, settings, lambda: None)
    outcome = compare_optimizers(workload, settings, stock)
    ours = outcome.outcomes["onepass"]
    assert ours.same is True and ours.training.stock == stock.stock
    assert ours.training.swapped[-1] < ours.training.swapped[0]
    assert outcome.to_dict()["variants"]["onepass"]["gap"] <= 2 * outcome.to_dict()["stock_gap"]
    make = onepass.optim.AdamW
    monkeypatch.setattr(
        onepass.optim, "AdamW", lambda params, lr, **kwargs: make(params, 1.001 * lr, **kwargs)
    )
    outcome = compare_optimizers(workload, settings, stock)
    assert outcome.outcomes["onepass"].same is False
