"""`onepass bench --goals`: the project's own goals, other files, and the table."""

import argparse
import fnmatch
import json
from pathlib import Path

import pytest

from onepass._policy.precision import HAS_PAIR_PRODUCTS
from onepass.tools import bench
from onepass.tools.bench import case as cases
from onepass.tools.bench.goals import Goal, read_goals
from tests.compare.cases import refusal, run_json

FILE = Path(__file__).parents[2] / "benchmarks" / "goals.json"
SECTIONS = [("cpu", "avx2"), ("cpu", "avx512_bf16"), ("cuda", "")]


def all_cases(device: str, quick: bool = False) -> list[cases.Case]:
    return bench._cases(argparse.Namespace(families=["all"], quick=quick, device=device))


@pytest.mark.parametrize(("device", "level"), SECTIONS)
def test_every_goal_is_of_a_case_and_its_variants(device, level):
    """One under a name that no case has would silently never be shown."""
    goals = read_goals(str(FILE), device, level)
    unused = set(goals.patterns)
    for case in all_cases(device):
        if goal := goals.of(case.name):
            unused.discard(next(p for p in goals.patterns if fnmatch.fnmatchcase(case.name, p)))
            assert goal.others.keys() <= case.operator.others.keys(), case.name
            assert goal.share is None or case.tensors or case.moved or case.reads or case.flops
    if not HAS_PAIR_PRODUCTS:  # then no case is of medium precision
        unused = {pattern for pattern in unused if "medium" not in pattern}
    assert not unused


@pytest.mark.parametrize(
    ("device", "level", "name", "goal"),
    [
        ("cpu", "avx2", "norm/rms_norm/float32/512x768/forward", Goal(3.0, 2.0, 0.55)),
        ("cpu", "avx2", "gate/silu_mul/float32/2048x11008/forward+backward", Goal(2.5)),
        ("cpu", "avx2", "gate/silu_mul, halves/float32/2048x11008/forward+backward", Goal()),
        ("cpu", "baseline", "attention/causal/float32/1x8x512x64/backward", Goal(2.2, share=0.75)),
        ("cpu", "avx512", "attention/full/bfloat16/1x4x2048x64/forward", Goal(share=0.8)),
        ("cpu", "avx512_bf16", "attention/full/bfloat16/1x4x2048x64/forward", Goal(2.8)),
        ("cpu", "avx512_bf16", "attention/causal/float32/2x8x128x64/forward", Goal()),
        ("cuda", "avx2", "optimizer/adamw/float32/64x16777216", Goal(1.0, share=0.9)),
        ("cuda", "avx2", "norm/rms_norm/float32/512x768/forward", Goal(1.0, 1.0, 0.9)),
    ],
)
def test_goals_of_a_level(device, level, name, goal):
    assert read_goals(str(FILE), device, level).of(name) == goal


def test_measured_rows_have_their_goals(tmp_path):
    file, name = tmp_path / "goals.json", "dropout/dropout/float32/64x96/forward+backward"
    file.write_text(json.dumps({"cpu": {name: {"eager": 1e9}}, "avx2": {}}))
    words = ("dropout", "--quick", "--no-compile", "--case", name)
    for more, goals in ((("--goals", str(file)), [1e9]), ((), [])):
        (row,) = run_json("bench", *words, *more)["rows"]
        assert [goal for goal in row["goal"].values() if goal] == goals


WRONG = [None, "{", "[]", "{}", '{"cpu": {"x": {"eagre": 2}}, "avx2": {}}']


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_holds_no_goals_is_refused_before_anything_is_measured(text, tmp_path):
    file = tmp_path / "goals.json"
    if text is not None:
        file.write_text(text)
    told = refusal("bench", "dropout", "--quick", "--goals", str(file))
    assert told.startswith("bench: --goals must name a file of goals, got ")
