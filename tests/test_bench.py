"""The benchmark harness: statistics, ceilings, and a whole quick run with its JSON."""

from __future__ import annotations

import json
import math
import time

import pytest

from onepass import cli
from onepass.bench import dropout, norm
from onepass.bench.harness import Timing, bootstrap_median, measure_pairs


def test_bootstrap_interval():
    interval = bootstrap_median([1.0] * 20 + [100.0])
    assert interval.median == interval.low == interval.high == 1.0
    wide = bootstrap_median([1.0, 2.0, 3.0, 4.0, 5.0])
    assert wide.low < wide.median == 3.0 < wide.high
    assert str(interval) == "1.00 [1.00-1.00]"
    with pytest.raises(ValueError):
        bootstrap_median([])


def test_ratios_are_taken_round_by_round():
    # The machine doubles its speed midway: the ratio does not move.
    timing = Timing({"a": [2.0, 2.0, 1.0, 1.0], "b": [4.0, 4.0, 2.0, 2.0]}, {}, {})
    ratio = timing.ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_measured_times_tell_slow_from_fast():
    timing = measure_pairs(
        {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}, rounds=5, seconds=0
    )
    assert timing.rounds == 5
    assert 2 < timing.ratio("fast", "slow").median < 6


def test_cases_have_names_of_their_own_and_goals():
    names = [case.name for module in (norm, dropout) for case in module.cases(quick=True)]
    assert len(names) == len(set(names))
    assert any(goal is not None for goals in norm.GOALS.values() for goal in goals)


def test_a_quick_run(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["bench", "all", "--quick", "--no-compile", "--json", str(path)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "ceilings: copy" in text and "onepass" in text
    result = json.loads(path.read_text())
    assert result["machine"]["threads"] and result["ceilings"]["copy_gbps"] > 0
    assert {row["name"].split("/")[0] for row in result["rows"]} == {"norm", "dropout"}
    for row in result["rows"]:
        assert math.isfinite(row["against_eager"]["median"])
        assert row["correct"] in ("yes", "see tests")
        assert row["times"]["ours"]["median_us"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "nothing*"], "--case must match a case"),
        (["--threads", "0"], "--threads must be at least 1"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message, capsys):
    assert cli.main(["bench", "norm", "--quick", *arguments]) == 2
    assert message in capsys.readouterr().err
