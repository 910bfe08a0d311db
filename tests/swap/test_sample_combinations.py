"""`swap(sample=)`: whatever it leaves out, the report lists what runs, and unswap undoes that."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.bench.harness import Timing
from onepass.swapping import by_name, matchers, sample
from onepass.swapping.classes import Swapped
from onepass.swapping.plan import Plan
from tests.swap.small_models import small_llama

KINDS = ("norm", "attention", "mlp", "rotary", "linear", "loss")


def running(model):
    """(name, kind) of all that runs onepass, from classes and configs alone."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            found |= {(name, kind) for kind in module._onepass_to}
        match = matchers.match(module, ("attention",))
        if match and match.named and by_name.is_attached(module):
            found.add((name, "attention"))
    return found


@pytest.fixture
def gains(monkeypatch):
    """The variants of measurements that gain, each asked once, in the order of the units."""
    answers = []

    def timed(self, functions, seconds):
        times = {name: [1.0] * 5 for name in functions}
        for name in functions:
            if name != sample.STOCK:
                times[name] = [0.5 if answers.pop(0) else 2.0] * 5
        return Timing(times, dict.fromkeys(functions, 1), dict.fromkeys(functions, 0.0))

    judged, verdicts = Plan._judged, {}

    def judged_once(self, key, *args):
        """For all models of a test."""
        if key not in verdicts:
            verdicts[key] = judged(self, key, *args)
        return verdicts[key]

    monkeypatch.setattr(Plan, "_judged", judged_once)
    monkeypatch.setattr(sample._Measurement, "_timed", timed)
    monkeypatch.setattr(sample, "SECONDS", 0.0)
    monkeypatch.setattr(sample, "STEPS", 0)
    monkeypatch.setattr(matchers, "_as_fast", lambda weights, small=False: None)
    return answers


def check(model, report):
    assert {(e["name"], e["kind"]) for e in report.swapped} == running(model)
    left = {e["name"] for e in report.skipped} & {name for name, _ in running(model)}
    for entry in report.skipped:  # what runs for one kind, and not for another, is told apart
        if entry["name"] in left:
            kind = entry["reason"].partition(":")[0]
            assert kind in KINDS and (entry["name"], kind) not in running(model), entry


def test_the_report_lists_what_runs(gains):
    draw = random.Random(1)
    drawn = [[draw.random() < 0.5 for _ in range(20)] for _ in range(6)]
    singles = [[number == left for number in range(20)] for left in range(8)]
    for answers in singles + drawn:
        gains[:] = answers + [True] * 9
        model, batch = small_llama()
        report = onepass.swap(model, sample=batch, kinds=KINDS)
        check(model, report)
        restored = {name for name, _ in running(model)}
        assert {*onepass.unswap(model)} == restored and not running(model)


@pytest.mark.parametrize("kind", ["attention", "rotary", "norm"])
@pytest.mark.parametrize("gain", [True, False])
def test_what_an_earlier_swap_took_stays(gains, kind, gain):
    gains[:] = [gain] * 30
    model, batch = small_llama()
    onepass.swap(model, kinds=kind)
    report = onepass.swap(model, sample=batch, kinds=KINDS)
    check(model, report)
    assert {entry["kind"] for entry in report.swapped} >= {kind}


class Both(nn.Module):
    """One class for two kinds of calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        x = F.linear(x, self.weight)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("kind", ["attention", "linear"])
def test_a_choice_keeps_kinds_of_one_module_apart(gains, kind):
    choice = onepass.swap(Both(), kinds=kind).choice
    model = Both()
    report = onepass.swap(model, choice=choice)
    check(model, report)
    assert [entry["kind"] for entry in report.swapped] == [kind]
    assert onepass.swap(Both()).choice["swapped"] == [["", "attention"], ["", "linear"]]


def test_explain_gives_the_reason_of_the_sample(gains):
    gains[:] = [False] * 30
    model, batch = small_llama()
    onepass.swap(model, sample=batch, kinds=KINDS)

    def reasons():
        return {entry["reason"] for entry in onepass.explain(model, batch).not_accelerated}

    assert all("no gain on the sample: 0.50" in reason for reason in reasons())
    onepass.unswap(model)
    assert reasons() == {"not swapped: onepass.swap(model)"}
