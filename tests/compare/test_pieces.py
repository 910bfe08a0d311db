"""The pieces of `onepass compare`: text, model, attribution, memory, statistics, sentences."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass.swapping.reasons import Reason
from onepass.tools.compare import attribution, measure, memory, optimizers, pairs, report, train
from onepass.tools.compare.attribution import PARTS, part_of_module
from onepass.tools.compare.optimizers import BASELINE, Choice
from onepass.tools.compare.pairs import time_rounds
from onepass.tools.compare.products import Products
from onepass.tools.compare.workload import GptWorkload
from onepass.tools.data import Batches, held_out_batch, load_text, standard_library
from onepass.tools.errors import BadInput
from onepass.tools.harness import Timing
from onepass.tools.model import GPT, cast
from onepass.tools.user_model import objective_of, tokens_in
from tests.compare.cases import TINY, FakeClock, settings_of, tokens

pytestmark = pytest.mark.usefixtures("one_thread")  # tiny tensors gain nothing from a second


def test_default_text_is_the_sorted_standard_library():
    files = standard_library()
    of_json = [path.name for path in files if path.parent.name == "json"]
    assert of_json[:2] == ["__init__.py", "decoder.py"]
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert sum(path.stat().st_size for path in files) > 1_000_000


def test_held_out_part_is_the_last_tenth_of_every_file(tmp_path):
    for name, byte in (("a", b"a"), ("b", b"b")):
        (tmp_path / name).write_bytes(byte * 90 + byte.upper() * 10)
    text = load_text([str(tmp_path / "a"), str(tmp_path / "b")])
    assert bytes(text.train.tolist()) == b"a" * 90 + b"b" * 90
    assert bytes(text.held_out.tolist()) == b"A" * 10 + b"B" * 10


def test_batches_follow_their_own_seed_and_step_alone(text):
    batches = Batches(text, block=8, batch=3, seed=1)
    torch.manual_seed(0)
    first = batches(5)
    torch.rand(10)
    again = batches(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], batches(6)[0])
    assert not torch.equal(first[0], Batches(text, 8, 3, seed=2)(5)[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])  # targets are the next bytes


def test_held_out_windows_reach_from_end_to_end(text):
    inputs, targets = held_out_batch(text, block=8, rows=4)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs[0].tolist() == text.held_out[:8].tolist()
    assert targets[-1].tolist() == text.held_out[-8:].tolist()


@pytest.mark.parametrize("rmsnorm", [False, True])
def test_gpt_layouts(rmsnorm):
    model = GPT(TINY, dropout=0.1, rmsnorm=rmsnorm)
    norms = [module for module in model.modules() if part_of_module(module) == "norm"]
    assert {type(norm) for norm in norms} == {nn.RMSNorm if rmsnorm else nn.LayerNorm}
    assert len(norms) == 2 * TINY.layers + 1
    assert model.head.weight is model.tokens.weight
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) is not rmsnorm
    data = tokens()
    assert model(data[:, :-1], data[:, 1:]).item() == pytest.approx(5.545, abs=0.1)  # log 256


def test_gpt_is_causal():
    model = GPT(TINY).eval()
    logits = []
    model.head.register_forward_hook(lambda _module, _args, output: logits.append(output))
    data = tokens()[:, :-1]
    model(data, data)
    changed = data.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    model(changed, data)
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


@pytest.mark.parametrize("rmsnorm", [False, True])
def test_reordered_features_change_nothing_but_rounding(rmsnorm):
    model, other = GPT(TINY, rmsnorm=rmsnorm).double(), GPT(TINY, rmsnorm=rmsnorm).double()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for module in (model, other):
            torch.manual_seed(1)
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    other.reorder_features(torch.Generator().manual_seed(3))
    data = tokens()
    losses = []
    for module in (model, other):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            loss = module(data[:, :-1], data[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert not torch.equal(model.tokens.weight, other.tokens.weight)
    # The loss itself is taken in float32, whatever the model's dtype.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_loss_of_an_output():
    scalar, values = torch.tensor(2.0), torch.tensor([3.0, 4.0])
    logits, loss = values.clone().requires_grad_(), scalar.clone().requires_grad_()
    for output in (
        loss, (logits, loss), (logits, scalar, loss), [logits, {"all": loss}],
        {"logits": logits, "loss": loss}, SimpleNamespace(loss=loss),
    ):  # fmt: skip
        assert objective_of(output) == (loss, "the model's loss")
    assert objective_of(SimpleNamespace(loss=values)).loss == 3.5  # of DataParallel, one per copy
    for output in ((torch.tensor([1, 2]), values), {"logits": values}, (logits, scalar)):
        found = objective_of(output)
        assert found.loss.item() == 12.5
        assert found.name == "mean square of the output: it has no loss"
    with pytest.raises(BadInput, match="must return a floating-point tensor"):
        objective_of("nothing")


def test_items_of_a_batch():
    assert tokens_in((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2))) == 10
    assert tokens_in({"x": torch.zeros(3, 4)}) == 3
    assert tokens_in(torch.zeros(6, 4)) == 6


def test_cast_changes_floating_point_tensors_alone():
    batch = {"x": (torch.zeros(2), torch.zeros(2, dtype=torch.long)), "name": "text"}
    x, index = cast(batch, torch.bfloat16)["x"]
    assert x.dtype == torch.bfloat16 and index.dtype == torch.long
    assert cast(batch, torch.bfloat16)["name"] == "text"
    assert cast(batch, None) is batch


def test_saved_bytes_are_unique_storages_without_parameters():
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    trainer = train.Trainer(model, settings_of())
    x = torch.randn(4, 8)
    # The input, ReLU's output (saved by ReLU and by the second Linear: once), and for the mean
    # square the output.
    assert trainer.saved_bytes((x,)) == 4 * (4 * 8 + 4 * 32 + 4 * 16)


def test_peak_memory_of_a_step():
    mebibytes = 64
    peak = memory._cpu_peak(lambda: torch.ones(mebibytes * 2**18).sum())
    assert mebibytes * 2**20 <= peak + 2**20 < (mebibytes + 16) * 2**20


def test_peak_memory_on_cuda_is_the_allocators(monkeypatch):
    done, told = [], {"memory_allocated": 100, "max_memory_allocated": 350}
    for name in ("synchronize", "reset_peak_memory_stats", *told):
        monkeypatch.setattr(torch.cuda, name, lambda n=name: done.append(n) or told.get(n))
    assert memory._cuda_peak(lambda: done.append("step")) == 250
    assert done[:4] == ["synchronize", "reset_peak_memory_stats", "memory_allocated", "step"]
    assert done[4:] == ["synchronize", "max_memory_allocated"]


def test_rounds_turn_around_and_share_their_number():
    calls = []
    steps = {name: lambda number, name=name: calls.append((number, name)) for name in "ab"}
    timing = time_rounds(steps, rounds=3, seconds=0.0, max_rounds=9, advance=lambda: None)
    assert calls == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert timing.rounds == 3
    longer = time_rounds(steps, rounds=3, seconds=9.0, max_rounds=5, advance=lambda: None)
    assert longer.rounds == 5


def test_what_comes_before_a_step_is_not_timed(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(pairs, "time", SimpleNamespace(perf_counter=clock))

    def take(seconds):
        clock.now += seconds

    steps = {"a": lambda number: take(1.0), "b": lambda number: take(2.0)}
    timing = time_rounds(steps, 2, 0.0, 2, lambda: None, before=lambda *_: take(50.0))
    assert timing.times == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert clock.now == 2 * (1.0 + 2.0) + 4 * 50.0


def test_a_step_of_another_process_counts_as_that_says():
    steps = {"here": lambda number: None, "there": lambda number: (5.0 + number, 7)}
    timing = time_rounds(steps, 2, 0.0, 2, lambda: None)
    assert timing.times["there"] == [5.0, 6.0] and timing.faults["there"] == 7
    assert max(timing.times["here"]) < 5.0


def test_worst_gradient_names_the_parameter():
    reference = {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([2.0]), "c": torch.zeros(1)}
    gradients = {"a": torch.tensor([1.0, 101.0]), "b": torch.tensor([2.1]), "c": torch.zeros(1)}
    name, error = measure.worst_gradient(gradients, reference)
    assert name == "b" and error == pytest.approx(0.05)
    gradients["a"][0] = torch.nan
    assert measure.worst_gradient(gradients, reference)[0] == "a"
    assert measure.worst_gradient({"a": reference["a"]}, reference) == ("b", float("inf"))


class Cancelling(nn.Module):
    """The bias of a key, which softmax cancels: its gradient is zero but for rounding."""

    def __init__(self, p):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT
        return self.drop(torch.softmax(scores, -1) @ self.value(x)).square().sum()


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_error(dtype, p):
    settings = settings_of("--dtype", dtype)
    torch.manual_seed(0)
    model = Cancelling(p)
    made = {"stock": train.Trainer(model, settings)}
    made["swapped"] = train.Trainer(copy.deepcopy(model), settings)
    with torch.no_grad():
        made["swapped"].model.query.weight.mul_(1 + 1e-3)
    found = measure._first_steps(made, torch.randn(4, 64, 32), bool(p))["swapped"]
    assert found.gradient_error < 0.1 and found.gradient_name != "key.bias"


@pytest.mark.parametrize("value", [0.0, 1e-42, torch.nan, torch.inf])
def test_gradients_without_digits_have_no_error(value):
    reference = {"a": torch.full((2,), value), "b": torch.zeros(0)}
    assert measure.worst_gradient(reference, reference) == ("a", None)
    assert measure.worst_gradient(reference | {"a": torch.ones(2)}, reference) == ("a", torch.inf)
    assert measure.worst_gradient({}, reference)[1] == torch.inf
    assert measure.worst_gradient({}, {}) == ("", None)


def sameness(swapped, stock=((2.0, 1.0), (2.0, 1.001)), dropout=0.0):
    curves = (list(stock), list(swapped))
    return train.Sameness(dropout, "summation order", "loss", [0, 10], *curves, {})


def test_sameness_is_the_band_doubled():
    assert sameness((2.0, 1.0019)).same and not sameness((2.0, 1.0021)).same
    assert not sameness((2.0, float("nan"))).same
    assert sameness((2.0, 1.0)).gap == 0.0


@pytest.mark.parametrize("loss", [0.0, 3.0, float("nan"), float("inf")])
def test_losses_that_never_change_cannot_tell(loss):
    stock = ((loss, loss), (loss, loss))
    assert sameness((loss, loss), stock).same is None
    if loss in (0.0, 3.0):
        assert sameness((loss, loss + 1.0), stock).same is False


def compared(ratio=None, swapped=(2.0, 1.0)):
    """Steps of torch default (6 s), torch fused (1 s) and, with a ratio to that, onepass."""
    choices = [Choice("default"), BASELINE, Choice("onepass")][: 3 if ratio else 2]
    seconds = {"torch default": 6.0, "torch fused": 1.0, "onepass": 1.0 / (ratio or 1.0)}
    times = {choice.name: [seconds[choice.name]] * 8 for choice in choices}
    outcomes = {
        c.name: optimizers.Outcome(c, 32, 32, sameness(swapped) if c.is_trained else None)
        for c in choices
    }
    timing = Timing(times, {}, dict.fromkeys(times, 0.0))
    return optimizers.Comparison(0.0, 4, 10.0, timing, outcomes, {})


def result(
    ratio, phases=(), dropouts=(0.0,), kinds=("norm",), linear=0.6, other="norm", optimizer=None
):
    spent = {phase: dict.fromkeys(PARTS, 0.0) for phase in attribution.PHASES}
    spent["forward"] |= {"linear": linear, other: 1 - linear}
    variant = measure.Variant(spent, 1, 1, None)
    speeds = [
        measure.Speed(
            dropout, 10, Timing({"stock": [ratio] * 8, "swapped": [1.0] * 8}, {}, {}),
            {"stock": variant, "swapped": variant}, Products(10**6, 4.0),
            {"swapped": [{"kind": kind} for kind in kinds], "skipped": [], "unknown": []},
        )
        for dropout in dropouts
    ]  # fmt: skip
    phases = list(phases or [sameness((2.0, 1.0))])
    return report.Result(
        settings_of(), {}, "text", 1, speeds, phases, optimizer or compared(), 1
    )  # fmt: skip


TWO = [sameness((2.0, 1.5), dropout=0.1), sameness((2.0, 1.000002))]
# What the verdict says of a result.
VERDICTS = {
    "faster": (dict(ratio=1.32), "1.32x [1.32-1.32]; training is the same", "layers, 60 %."),
    "slower and different": (
        dict(ratio=0.9, phases=[sameness((2.0, 1.5))], linear=0.05),
        "0.90x [0.90-0.90]: slower; training is DIFFERENT", " at most 0.5 (", " by 0.001)",
    ),
    "slower by little": (dict(ratio=0.996, linear=0.05), "0.996x [0.996-0.996]: slower"),
    "no difference": (
        dict(ratio=1.0, kinds=()), "1.000x [1.000-1.000]: no difference", "Nothing was swapped.",
        "linear layers, 60 %; norm, 40 %.",
    ),
    "two dropouts": (
        dict(ratio=1.5, phases=TWO, dropouts=(0.1, 0.0), kinds=("norm", "linear")),
        "1.50x [1.50-1.50] with dropout 0.1, 1.50x [1.50-1.50] without dropout; ",
        "0.5 with dropout 0.1 (", "; different), 2e-6 without dropout (stock runs 0.001)",
    ),
    "the optimizer": (
        dict(ratio=1.32, optimizer=compared(2.0)),
        "AdamW's step: 2.00x [2.00-2.00] torch fused; training is the same",
    ),
    "an optimizer that is slower and different": (
        dict(ratio=1.32, optimizer=compared(0.5, (2.0, 1.5))),
        "0.50x [0.50-0.50] torch fused: slower; training is DIFFERENT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name):
    options, *words = VERDICTS[name]
    outcome = result(**options)
    said = report.verdict(outcome)
    assert all(word in said for word in words), said
    is_linear = options.get("linear", 0.6) > 0.05 and "linear" not in options.get("kinds", ())
    assert ("Not accelerated" in said) == is_linear
    wanted = {"the optimizer": True, "an optimizer that is slower and different": False}
    assert outcome.optimizer_same is wanted.get(name)
    assert outcome.same == ("phases" not in options)  # that of the models is its own matter


def test_share_of_a_step_has_this_optimizer_in_it():
    outcome = compared(2.0)  # of 10 s, 1 s is torch's fused step
    shares = {"torch fused": 1 / 10, "torch default": 6 / 15, "onepass": 0.5 / 9.5}
    assert {name: outcome.share_of_step(name) for name in shares} == shares


def test_speed_of_linear_layers():
    (speed,) = result(1.0).speeds  # 0.6 ms of its parts are linear
    assert report.linear_text(speed).count("2 GFLOP/s (42 %)") == 2
    assert report.linear_text(dataclasses.replace(speed, products=Products(0, 1.0))) == ""


@pytest.mark.parametrize("section", ["skipped", "unknown"])
def test_verdict_names_attention_by_hand_that_was_left(section):
    reason = {"skipped": Reason.BY_HAND, "unknown": Reason.BY_HAND_ELSEWHERE}[section]
    entries = [{"reason": why.format("read by max")} for why in (reason, reason, Reason.HOOKS)]
    outcome = result(1.32, linear=0.3, other="attention")
    assert report.verdict(outcome).endswith("attention, 70 %; linear layers, 30 %.")
    outcome.speeds[-1].swap_report[section] = entries
    assert "Not accelerated: 2 x softmax(q k^T) v by hand, 70 %; linear" in report.verdict(outcome)


def trained(text, dropout):
    settings = settings_of("--steps", "20")
    workload = GptWorkload(settings, text, TINY, dropout)
    return train.compare_training(workload, settings, lambda: None)


@pytest.mark.slow
def test_a_norm_that_is_off_by_little_is_different(monkeypatch, text):
    class Off(nn.LayerNorm):
        def forward(self, x):
            return 1.0001 * super().forward(x)

    def swap(model, **options):
        for module in model.modules():
            if type(module) is nn.LayerNorm:
                module.__class__ = Off

    monkeypatch.setattr(onepass, "swap", lambda model, **options: None)
    unchanged = trained(text, 0.0)
    assert unchanged.same and unchanged.stock_gap > 0
    monkeypatch.setattr(onepass, "swap", swap)
    assert not trained(text, 0.0).same


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_swapped_training_is_the_same(text, dropout):
    outcome = trained(text, dropout)
    assert outcome.same, outcome.to_dict()
    assert len(outcome.steps) == len(outcome.swapped) == train.CURVE_POINTS + 1
    assert outcome.swapped[-1] < outcome.swapped[0]
