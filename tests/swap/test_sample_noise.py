"""`swap(sample=)` on a busy machine, and its choice, saved and made again."""

import json
import re
import time

import pytest
import torch
from torch import nn

import onepass
from onepass.bench.harness import Timing
from onepass.swapping import sample
from onepass.swapping.classes import Swapped
from onepass.swapping.reasons import Reason

STEADY, SMALL, WIDE = [1.0] * 6, [0.97, 1.03] * 3, [0.5, 1.6] * 3  # times of a swapped call


MEASURE = "onepass.bench.harness.measure_pairs"


def timing(functions, swapped) -> Timing:
    times = {n: [1.0] * len(swapped) if n == sample.STOCK else swapped for n in functions}
    return Timing(times, dict.fromkeys(functions, 1), dict.fromkeys(functions, 0.0))


def net():
    return nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 8))


@pytest.fixture
def timings(monkeypatch):
    """The swapped times of each measurement, in turn; stock's are 1."""
    answers = []
    monkeypatch.setattr(MEASURE, lambda functions, **_: timing(functions, answers.pop(0)))
    return answers


def swap(model, **options):
    return onepass.swap(model, sample=torch.randn(4, 8), kinds="norm", **options)


@pytest.mark.parametrize("times", [STEADY, SMALL])
def test_a_narrow_interval_around_1_is_no_gain(timings, times):
    timings[:] = [times]
    report = swap(net())
    assert [entry["reason"].kind for entry in report.skipped] == [Reason.NO_GAIN]
    assert not timings and not any("busy" in note for note in report.notes)


def test_a_wide_interval_around_1_is_measured_again_and_told(timings):
    timings[:] = [WIDE, WIDE]
    report = swap(net())
    (entry,) = report.skipped
    assert entry["reason"].kind is Reason.TOO_NOISY and not timings
    assert re.fullmatch(
        r"norm: too noisy to tell: 1\.\d\d \[0\.\d\d-\d\.\d\d\] times as fast", entry["reason"]
    )
    assert report.notes[0].startswith("the machine is busy: 1 of 1 measurement")


def test_more_rounds_can_decide(timings):
    timings[:] = [WIDE, [0.5] * 60, [0.5] * 6]  # the last is of a whole step
    report = swap(net())
    assert [entry["name"] for entry in report.swapped] == ["0"] and not timings
    assert report.notes[0].startswith("measured on the sample")


def test_a_step_that_is_too_noisy_is_told(timings):
    timings[:] = [[0.5] * 6, WIDE, WIDE]
    report = swap(net())
    assert not report.swapped and not timings
    assert [entry["reason"].kind for entry in report.skipped] == [Reason.TOO_NOISY_IN_ALL]
    assert report.notes[0].startswith("the machine is busy: 1 of 2 measurements")


@pytest.mark.parametrize(("threads", "now"), [(1, time.thread_time), (2, time.perf_counter)])
def test_one_thread_is_timed_by_its_own_time(monkeypatch, threads, now):
    """So that other programs do not count."""
    clocks = []

    def measured(functions, *, clock, **_):
        clocks.append(clock.now)
        return timing(functions, STEADY)

    monkeypatch.setattr(MEASURE, measured)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    swap(net())
    assert clocks == [now]


@pytest.fixture
def chosen(timings):
    """A choice of the dropout alone, through JSON."""
    timings[:] = [[0.5] * 6, [2.0] * 6, [0.5] * 6]
    report = onepass.swap(net(), sample=torch.randn(4, 8), kinds=("norm", "dropout"))
    assert [(entry["name"], entry["kind"]) for entry in report.swapped] == [("1", "dropout")]
    return report, json.loads(json.dumps(report.choice))


def test_a_choice_is_made_again_without_measuring(chosen):
    report, choice = chosen
    model = net()
    repeated = onepass.swap(model, choice=choice, kinds=("norm", "dropout"))
    assert repeated.to_dict() == report.to_dict() and repeated.choice == report.choice
    assert [isinstance(module, Swapped) for module in model] == [False, True, False]


def test_a_choice_takes_nothing_that_it_does_not_name(chosen):
    model = nn.Sequential(*net(), nn.Dropout(0.2))
    report = onepass.swap(model, choice=chosen[1])
    assert [entry["name"] for entry in report.swapped] == ["1"]
    assert {e["name"]: e["reason"].kind for e in report.skipped}["3"] is Reason.NOT_CHOSEN


def test_what_is_chosen_and_cannot_be_swapped_is_told(chosen):
    model = net()
    model[1] = nn.Identity()
    report = onepass.swap(model, choice=chosen[1])
    assert report.notes[0] == "chosen and not swapped: dropout of 1"


def test_a_swap_without_a_sample_has_a_choice_too():
    report = onepass.swap(net(), kinds="norm")
    assert report.choice == {"swapped": [["0", "norm"]], "left_out": [], "notes": []}


def test_sample_and_choice_exclude_each_other(chosen):
    with pytest.raises(ValueError, match="swap: choice must be None beside sample, got both"):
        swap(net(), choice=chosen[1])


@pytest.mark.parametrize("wrong", [torch.ones(1), {"x": 1}, "text", {"swapped": 1}])
def test_other_objects_are_no_choice(wrong):
    with pytest.raises(TypeError, match=r"swap: choice must be a report's choice, got \w+"):
        onepass.swap(net(), choice=wrong)
