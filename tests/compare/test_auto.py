"""`onepass compare --auto`: what does not gain on the batch is left out, in every phase."""

import json

import pytest
import torch
from torch import nn

from onepass._policy.precision import precision_of
from onepass.swapping import engine, sample
from onepass.swapping.plan import LeftOut
from onepass.swapping.reasons import Reason
from onepass.tools.compare import report
from onepass.tools.compare.settings import FLOAT32, Settings
from tests.compare.cases import refusal, run_here, run_json, settings_of
from tests.swap.linear_calls import SLOW, set_facts

AUTO = ("--quick", "--threads", "1", "--pairs", "2", "--auto", "--model", f"{__name__}:model")
GAIN = "measured on the sample, forward: 1.50 [1.40-1.60] times as fast on this CPU"
NO_GAIN = "no gain on the sample: 0.50 [0.40-0.60] times as fast"
NORMS = {"modules": ["0", "2"], "kinds": ["norm"], "reason": NO_GAIN}


def model():
    layers = nn.LayerNorm(8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 1)
    return nn.Sequential(*layers), torch.randn(4, 8)


def broken():
    return model()[0], torch.randn(4, 9)


@pytest.fixture
def norms_do_not_gain(monkeypatch):
    """In place of the measurement; returns (whether the model trained, autocast) of each."""
    modes = []

    def decide(self):
        norms = [c for c in self.plan.classes if "norm" in c.cls._onepass_to]
        for change in norms:
            reason = Reason.NO_GAIN.format("0.50 [0.40-0.60]")
            self.plan.leave_out({id(change.module)}, reason, False)
        self.step()
        modes.append((self.model.training, torch.is_autocast_enabled("cpu")))
        return [GAIN]

    monkeypatch.setattr(sample._Measurement, "decide", decide)
    return modes


def swapped_in(monkeypatch):
    """The names that each swap of a model took."""
    names, swap = [], engine.swap

    def noted(model, *args, **options):
        made = swap(model, *args, **options)
        names.append([entry["name"] for entry in made.swapped])
        return made

    monkeypatch.setattr("onepass.swap", noted)
    return names


def test_training(monkeypatch, norms_do_not_gain):
    """One measurement, for the timed and the trained model; other processes are told."""
    told, names = [], swapped_in(monkeypatch)

    def peaks(variants, dropout, settings):
        told.append(Settings.from_dict(json.loads(json.dumps(settings.task())), "").decisions)
        return dict.fromkeys(variants, 1)

    flags = ("--steps", "2", "--optimizers", "fused", "--dtype", "bfloat16")
    flags += ("--kinds", "norm", "dropout")
    found = run_json("compare", *AUTO, *flags, peaks=peaks)
    assert norms_do_not_gain == [(True, True)]
    assert found["settings"]["auto"] and "decisions" not in found["settings"]
    assert found["speed"][0]["auto"] == {"left_out": [NORMS], "notes": [GAIN], "precisions": {}}
    assert [entry["name"] for entry in found["swap_report"]["swapped"]] == ["1"]
    assert names == [["1"]] * 3  # decided, timed, trained
    assert " --auto" in found["command"]
    (decisions,) = told
    assert report.auto_dict(decisions) == found["speed"][0]["auto"]


LAYERS = [str(number) for number in range(4)]


def linear_model():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in LAYERS)), torch.randn(200, 64)


def test_each_precision_is_decided_apart(monkeypatch):
    """At float32 the first layer gains, at medium the second, at int8 the third: of each row,
    timed and trained, and of what other processes are told."""
    set_facts(monkeypatch, SLOW)
    kept = {(None, "highest"): "0", (None, "medium"): "1", ("int8", "highest"): "2"}
    told, made, swap = [], [], engine.swap

    def decide(self):
        key = self.plan.precision, torch.get_float32_matmul_precision()
        others = {id(c.module) for c in self.plan.classes if c.name != kept[key]}
        self.plan.leave_out(others, Reason.NO_GAIN.format(key), False)
        return [f"decided at {key}"]

    def noted(model, *args, **options):
        report = swap(model, *args, **options)
        precisions = {n: precision_of(m) for n, m in model.named_children()}
        names = [entry["name"] for entry in report.swapped]
        made.append((options["precision"], report.dry_run, names, precisions))
        return report

    def peaks(variants, dropout, settings):
        told.append(Settings.from_dict(json.loads(json.dumps(settings.task())), "").decisions)
        return dict.fromkeys(variants, 1)

    monkeypatch.setattr(sample._Measurement, "decide", decide)
    monkeypatch.setattr("onepass.swap", noted)
    flags = ("--steps", "2", "--optimizers", "fused", "--precision", "medium,int8")
    flags += ("--model", f"{__name__}:linear_model", "--kinds", "linear")
    found = run_json("compare", *AUTO, *flags, peaks=peaks)
    plain = dict.fromkeys(LAYERS)
    rows = [(None, ["0"], plain), (None, ["1"], plain), ("int8", ["2"], plain | {"2": "int8"})]
    assert [(row[0], row[2]) for row in made if row[1]] == [row[:2] for row in rows]
    assert [(row[0], *row[2:]) for row in made if not row[1]] == rows * 2  # timed, trained
    auto = found["speed"][0]["auto"]
    assert auto["notes"] == ["decided at (None, 'highest')"]
    assert list(auto["precisions"]) == ["medium", "int8"]
    assert auto["precisions"]["medium"]["notes"] == ["decided at (None, 'medium')"]
    of_int8 = auto["precisions"]["int8"]
    assert of_int8["notes"] == ["decided at ('int8', 'highest')"]
    assert of_int8["left_out"][0]["modules"] == ["0", "1", "3"]
    (decisions,) = told
    assert report.auto_dict(decisions) == auto
    lines = [line for line in report.auto_lines(decisions) if not line.startswith("  ")]
    assert [line.partition(":")[0] for line in lines] == [
        "--auto",
        "--auto, medium",
        "--auto, int8",
    ]


def test_inference(norms_do_not_gain):
    out, _ = run_here("compare", *AUTO, "--generate", "2")
    assert norms_do_not_gain == [(False, False)]
    assert GAIN in " ".join(out.split()) and f"norm of *: {NO_GAIN}" in out


def test_a_choice_is_repeated_by_the_names_of_modules():
    """The smaller model of the sameness phase has fewer of them."""
    settings = settings_of("--auto", "--kinds", "norm")
    left = LeftOut(["0", "9"], ["norm"], False, "NO_GAIN", NO_GAIN)
    swapped = []
    norms = [["0", "norm"], ["2", "norm"]]
    for chosen in (sample.Decision(norms[1:], [left], []), sample.Decision(norms, [], [GAIN])):
        decisions = {FLOAT32: chosen.to_dict()}
        found = Settings.from_dict(settings.task() | {"decisions": decisions}, "")
        found = found.swap(model()[0])
        swapped.append([entry["name"] for entry in found.swapped])
    assert swapped == [["2"], ["0", "2"]]


def test_nothing_gains():
    left = LeftOut(["a.0", "a.1"], ["norm"], False, "NO_GAIN", NO_GAIN)
    assert report.auto_lines({}) == []
    first, second = report.auto_lines({FLOAT32: sample.Decision([], [left], [])})
    assert "nothing gains" in first and second == f"  left out, norm of a.*: {NO_GAIN}"


def test_a_model_that_does_not_run_is_one_sentence():
    told = refusal("compare", "--quick", "--auto", "--model", f"{__name__}:broken")
    assert "--model must run on its batch, got RuntimeError" in told
