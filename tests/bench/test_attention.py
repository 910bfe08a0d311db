"""`onepass bench attention`: useful operations, ceilings, goals, the arguments of each variant."""

import functools
import itertools
import math
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from onepass.tools import bench, harness
from onepass.tools.bench import attention_parts, report
from onepass.tools.bench import case as cases
from onepass.tools.bench.case import Case, Row
from onepass.tools.bench.families import attention
from onepass.tools.ceilings import Ceilings
from tests.compare.cases import run_json

LIMITS = Ceilings(2, 1 << 20, 10.0, 20.0, 100.0, 400.0)


def parts(case: Case) -> tuple[str, torch.dtype, tuple[int, ...], str]:
    """(kind, dtype, (batch, heads, seq, head_dim), phase)."""
    _, kind, dtype, shape, phase = case.name.split("/")
    return kind, getattr(torch, dtype), tuple(map(int, shape.split("x"))), phase


def with_flops(quick: bool = False) -> list[Case]:
    return [case for case in attention.cases(quick) if case.flops is not None]


@functools.cache
def pairs(kind: str, batch: int, seq: int) -> int:
    """How many keys all queries see together."""
    return int(seen_by_queries(kind, batch, seq).sum())


def seen_by_queries(kind: str, batch: int, seq: int) -> torch.Tensor:
    """(batch, seq, seq): which keys each query sees, written down independently."""
    square = torch.ones(batch, seq, seq, dtype=torch.bool)
    if kind.startswith("window"):
        return square.tril().triu(1 - attention.WINDOW)
    if kind.endswith("causal") or kind.startswith("grouped"):
        return square.tril()
    if kind == "padding-mask":
        square[::2, :, seq - seq // 4 :] = False
    if kind == "documents":
        for begin, end in itertools.pairwise([0, *attention._ends(seq)]):
            square[:, begin:end, :begin] = square[:, begin:end, end:] = False
        return square.tril()
    if kind == "packed":
        for sequence, share in zip(square, attention_parts.FILL, strict=True):
            sequence[int(seq * share) :] = False
            sequence[:, int(seq * share) :] = False
    return square


@pytest.mark.parametrize("quick", [False, True])
def test_operations_of_every_case_by_counting(quick):
    """Two products forward, five backward, of head_dim multiply-adds for a pair and head."""
    products = {"forward": 2, "backward": 5, "forward+backward": 7}
    for case in with_flops(quick):
        kind, _, (batch, heads, seq, head_dim), phase = parts(case)
        expected = 2 * products[phase] * pairs(kind, batch, seq) * heads * head_dim
        if kind == "multihead":  # four projections, each with two products backward
            expected += 4 * 3 * 2 * batch * seq * (heads * head_dim) ** 2
        assert case.flops == expected, case.name
    assert sum(attention_parts.FILL) == attention.PACKED[0] / 2 == len(attention_parts.FILL) / 2


def row_of(case: Case, limits: Ceilings = LIMITS) -> Row:
    times = {"ours": [2.0, 1.0, 4.0], "eager": [2.0, 2.0, 2.0]}
    times |= {name: [1.0] * 3 for name in case.operator.others}
    timing = harness.Timing(times, dict.fromkeys(times, 1), dict.fromkeys(times, 0.0))
    return Row(case, timing, "", 0.5, "", 0, limits.arithmetic_gflops(case.unit))


def test_share_is_of_the_fastest_round_and_of_the_unit_that_computes(capsys):
    for case in with_flops():
        row = row_of(replace(case, flops=50 * 10**9))
        assert row.gflops == 50.0
        assert row.share == (0.125 if case.unit == "bfloat16" else 0.5)
        without = replace(LIMITS, bf16_dot_gflops=0.0)
        assert row_of(replace(case, flops=50 * 10**9), without).share == 0.5
        written = row.to_dict()
        assert written["share_of_arithmetic"] == row.share and written["gflops"] == 50.0
        assert written["times"]["ours"]["fastest_us"] == 1e6
    report.print_tables([row])
    printed = capsys.readouterr().out
    assert "GFLOP/s" in printed and " 50 " in printed and "50%" in printed


def test_a_share_needs_a_measured_ceiling():
    case = next(iter(with_flops(quick=True)))
    assert cases.measure(case, seconds=0, compiled=False, places=1).share is None
    unknown = replace(LIMITS, fma_gflops=None)
    assert row_of(case, unknown).share is None and "not measured" in str(unknown)


def test_long_cases_are_checked_on_less():
    """The reference keeps all scores: they must be small enough in every case."""
    for case in with_flops():
        kind, dtype, (batch, heads, seq, head_dim), phase = parts(case)
        if case.make_checked is None:
            assert batch * heads * seq * seq <= attention_parts.CHECKED_SCORES or kind == "packed"
            continue
        query, key, value = case.make_checked()
        assert query.shape == key.shape == value.shape
        assert query.shape[1] * query.shape[2] ** 2 <= attention_parts.CHECKED_SCORES
        assert query.shape[2] == min(seq, 2048) and query.shape[3] == head_dim
        assert query.dtype is dtype and query.requires_grad == (phase != "forward")


def test_torch_has_the_packed_batch_padded():
    """Ours is always called without padding, torch's always with it; both compute all gradients."""
    wanted = ("packed", "forward+backward")
    case = next(case for case in with_flops(quick=True) if parts(case)[0::3] == wanted)
    seen = {"ours": set(), "stock": set()}

    def watched(name: str):
        def call(*tensors):
            seen[name].add(tuple(tensors[0].shape))
            return getattr(case.operator, name)(*tensors)

        return call

    operator = replace(case.operator, **{name: watched(name) for name in seen})
    row = cases.measure(replace(case, operator=operator), seconds=0, compiled=False, places=1)
    assert not row.check
    batch, heads, seq, head_dim = parts(case)[2]
    assert seen["stock"] == {(batch, heads, seq, head_dim)}
    assert seen["ours"] == {(batch * seq // 2, heads, head_dim)}


# For every variant the case that has all of its parts.
@pytest.mark.parametrize("glob", ["*/forward+backward", pytest.param("*", marks=pytest.mark.slow)])
def test_quick_runs_every_case(monkeypatch, glob):
    """On one thread, since threads that wait for a busy core would take most of the time."""
    monkeypatch.setattr(bench, "QUICK_SECONDS", math.inf)
    words = ("--quick", "--threads", "1", "--case", f"attention/{glob}")
    result = run_json("bench", "attention", *words)
    names = [case.name for case in attention.cases(quick=True) if fnmatch(case.name, glob)]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["right"], f"{row['name']}: {row['check']}"
        assert "compile" not in row["times"]
    shares = [row["share_of_arithmetic"] for row in result["rows"] if row["gflops"]]
    counted = [case for case in with_flops(quick=True) if case.name in names]
    assert len(shares) == len(counted) and all(0 < share < 1 for share in shares)
