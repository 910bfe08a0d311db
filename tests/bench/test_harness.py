"""`onepass bench`: statistics, interleaving, the check, the flags. No time is ever asserted."""

import argparse
import gc
import importlib
import json
import math
import os
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from onepass.tools import bench, harness, machine
from onepass.tools.bench import case as cases
from onepass.tools.bench.families import dropout, gate, group_norm, loss, norm, rotary
from onepass.tools.ceilings import ceilings
from tests.compare.cases import refusal, run_json
from tests.support import fresh


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(words))


# ---- statistics ----------------------------------------------------------------------------------


def test_bootstrap_median_holds_the_middle_and_narrows_with_more_values():
    values = torch.randn(1000).tolist()
    few, many = harness.bootstrap_median(values[:20]), harness.bootstrap_median(values)
    for interval in (few, many):
        assert interval.low <= interval.median <= interval.high
    assert many.high - many.low < few.high - few.low
    assert many == harness.bootstrap_median(values), "the same figures give the same interval"
    assert harness.bootstrap_median([2.0] * 20).to_dict() == {"median": 2, "low": 2, "high": 2}
    with pytest.raises(ValueError, match="must hold at least one value"):
        harness.bootstrap_median([])


def test_bootstrap_median_covers_the_true_median():
    """95 % intervals: of 60 samples of a known distribution nearly all hold its median."""
    draws = torch.rand(60, 41, generator=torch.Generator().manual_seed(1)).tolist()
    held = sum(i.low <= 0.5 <= i.high for i in map(harness.bootstrap_median, draws))
    assert 51 <= held


def test_bootstrap_of_groups_covers_the_differences_between_them():
    """Within a place nothing varies, between places much does."""
    values = [1.0] * 30 + [2.0] * 30 + [3.0] * 30
    alone = harness.bootstrap_median(values)
    grouped = harness.bootstrap_median(values, [30, 30, 30])
    assert (alone.low, alone.high) == (2.0, 2.0)
    assert (grouped.median, grouped.low, grouped.high) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="groups must add up to 90, got \\[30, 30\\]"):
        harness.bootstrap_median(values, [30, 30])


def test_pooled_timings_keep_rounds_in_pairs_and_places_in_groups():
    def timing(factor: float, rounds: int) -> harness.Timing:
        times = {"ours": [factor] * rounds, "eager": [2 * factor] * rounds}
        return harness.Timing(times, {"ours": 1, "eager": 1}, {"ours": 0.0, "eager": factor})

    pooled = harness.pool([timing(1.0, 4), timing(3.0, 6)])
    assert pooled.groups == [4, 6] and pooled.rounds == 10
    assert pooled.times["ours"] == [1.0] * 4 + [3.0] * 6
    assert pooled.faults == {"ours": 0.0, "eager": 2.0}
    assert pooled.ratio("ours", "eager") == harness.Interval(2.0, 2.0, 2.0)


def test_ratio_is_taken_within_rounds():
    """The machine becomes ten times slower during the run: the ratio does not change."""
    slow = [1.0] * 10 + [10.0] * 10
    timing = harness.Timing({"ours": [t / 2 for t in slow], "eager": slow}, {}, {})
    assert timing.ratio("ours", "eager") == harness.Interval(2.0, 2.0, 2.0)
    assert timing.difference("ours", "eager").high < 0


# ---- interleaving --------------------------------------------------------------------------------


def test_variants_take_turns_and_each_follows_each():
    names = ["a", "b", "c"]
    orders = [harness._order(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    follows = {pair for order in orders for pair in zip(order, order[1:], strict=False)}
    assert follows == {(a, b) for a in names for b in names if a != b}


def test_garbage_collection_is_back_on_even_after_an_error():
    fails = Mock(side_effect=[*range(10), KeyError("here")])
    with pytest.raises(KeyError):
        harness.measure_pairs({"fails": fails}, rounds=50, batch_seconds=1e-9)
    assert gc.isenabled()


class FakeClock:
    """A clock that gives each call a set time."""

    def __init__(self, **seconds: float):
        self.seconds_of, self.batches = seconds, []

    def seconds(self, function, calls: int) -> float:
        name = function()
        self.batches.append(name)
        return self.seconds_of[name] * calls

    def page_faults(self) -> int:
        return 0


def test_a_batch_is_what_the_clock_says_it_is():
    clock = FakeClock(short=1e-5, long=4e-3)
    functions = {"short": lambda: "short", "long": lambda: "long"}
    timing = harness.measure_pairs(functions, rounds=6, seconds=0, batch_seconds=1e-3, clock=clock)
    assert timing.times["short"] == pytest.approx([1e-5] * 6)
    assert timing.times["long"] == pytest.approx([4e-3] * 6)
    assert timing.calls == {"short": 100, "long": 1}
    assert timing.faults == {"short": 0, "long": 0}
    assert timing.ratio("short", "long").median == pytest.approx(400)
    turns = ["short", "long", "long", "short", "long", "short"]
    assert clock.batches[-12:-6] == turns  # interleaved as on any clock
    assert len(clock.batches) > 12, "it was warmed up"


def test_nothing_to_measure_is_refused():
    for functions, rounds in (({}, 9), ({"a": int}, 0)):
        with pytest.raises(ValueError, match="must not be empty"):
            harness.measure_pairs(functions, rounds=rounds)


# ---- machine -------------------------------------------------------------------------------------


def test_machine_facts_are_plain_and_name_the_build():
    from onepass import _C

    facts = harness.machine_facts()
    assert facts["isa"] == _C.cpu_level() and facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(facts)) == facts
    assert not any("/" in str(facts[key]) for key in ("commit", "onepass", "system"))


def test_without_holes_outputs_come_from_one_address():
    code = """if True:
        import torch
        from onepass.tools import machine

        with machine.recycled_memory() as recycled:
            blocks = [torch.empty((1 << 20) + 1024) for _ in range(8)]
            del blocks[::2]  # four holes
            held = machine.fill_holes(4 << 20)
            addresses = set()
            for call in range(8):
                output, small = torch.empty(1 << 20), torch.empty(10)
                if call >= 4:  # the small one may move the first outputs
                    addresses.add(output.data_ptr())
                del output, small
        print(len(addresses), len(held) >= 4, recycled)
    """
    found = []
    for _ in range(3):  # another thread of a process may take from the heap at a bad moment
        output = fresh.run(code, check=True).stdout.split()
        if output[2] != "True":
            pytest.skip("this allocator has no mallopt")
        found.append(output[:2])
        if found[-1] == ["1", "True"]:
            return
    pytest.fail(f"addresses, holes taken: {found}")


def test_other_load_is_what_others_use():
    """Own work does not count; the CPU time of processes that are not children does."""
    load = machine.OtherLoad()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    alone = load.cores()
    if alone is None:
        pytest.skip("this system does not tell")
    assert 0 <= alone <= (os.cpu_count() or 1)
    load._start = (load._start[0] - 1.0, *load._start[1:])  # another second of other processes
    assert load.cores() > alone


def test_what_is_not_to_be_trusted_comes_first(monkeypatch, capsys):
    """Small shapes, a busy machine, and a wrong result."""
    good = norm.OPERATORS["rms_norm"]
    wrong = cases.Operator(lambda x, w: (x * 2,), good.stock, good.formula, good.base)
    monkeypatch.setitem(norm.OPERATORS, "rms_norm", wrong)
    for load, doubts in ((0.7, ["--quick", "NOT A QUIET", "WRONG: norm"]),
                         (0.01, ["--quick", "WRONG: norm"])):  # fmt: skip
        monkeypatch.setattr(machine.OtherLoad, "cores", lambda self, load=load: load)
        words = ("--quick", "--no-compile", "--case", "norm/rms_norm/float32/64x96/forward")
        assert run("norm", *words) == 1
        lines = capsys.readouterr().out.splitlines()
        assert not any("eager us" in line for line in lines[: len(doubts)])
        assert all(map(str.startswith, lines, doubts))
        assert any(f"other load: {load:.2f} cores" in line for line in lines) == (load < 0.1)


def test_quick_begins_no_case_after_its_seconds_of_a_family(monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(torch, "compile", None)  # would raise
    result = run_json("bench", "norm", "dropout", "--quick", "--case", "*/forward")
    families = [row["name"].partition("/")[0] for row in result["rows"]]
    assert sorted(families) == ["dropout", "norm"] and result["left_out"] and result["quick"]


def test_ceilings_are_positive_and_arithmetic_grows_with_the_level():
    from onepass import _C

    limits = ceilings(1 << 20)
    assert limits.threads == torch.get_num_threads()
    for value in (limits.copy_gbps, limits.update_gbps, limits.fma_gflops):
        assert value > 0 and math.isfinite(value)
    assert (limits.bf16_dot_gflops > 0) == (_C.cpu_level() == "avx512_bf16")


# ---- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_case_names_are_unique_and_carry_the_family(quick, device):
    for family in bench.FAMILIES:
        module = importlib.import_module(f"onepass.tools.bench.families.{family}")
        names = [case.name for case in module.cases(quick, device)]
        assert len(set(names)) == len(names)
        assert all(name.startswith(family + "/") for name in names)


def test_operators_agree_with_the_reference():
    for module in (norm, dropout, gate, group_norm, loss, rotary):
        for case in module.cases(quick=True):
            wrong, margin = cases._check(case)
            assert not wrong, f"{case.name}: {wrong}"
            assert 0 <= margin <= 1


def test_a_wrong_result_is_seen_in_outputs_and_in_gradients():
    good = norm.OPERATORS["layer_norm"]

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream * 1.01

    def off_by_little(x, w, b):
        return (good.ours(x, w, b)[0] * 1.001,)

    def off_in_gradient(x, w, b):
        return good.ours(WrongGradient.apply(x), w, b)

    for function, result in ((off_by_little, 0), (off_in_gradient, 1)):
        operator = cases.Operator(function, good.stock, good.formula, good.base)
        make = partial(norm._tensors, "layer_norm", (16, 64), torch.float32, True)
        wrong, margin = cases._check(cases.Case("x", operator, make, True, None))
        assert wrong.startswith(f"result {result}: error") and margin > 1


def test_cold_cases_never_take_the_same_tensors_twice_running(monkeypatch):
    """All variants draw from one ring, else a variant would warm the next one's tensors."""
    monkeypatch.setattr(cases, "COLD_BYTES", 64 * 1024)
    drawn = []

    def seen(x, *others):
        drawn.append((x.data_ptr(), x.untyped_storage().nbytes()))
        return good.ours(x, *others)

    good = norm.OPERATORS["rms_norm"]
    operator = cases.Operator(seen, seen, good.formula, good.base)
    make = partial(norm._tensors, "rms_norm", (16, 64), torch.float32, True)
    for cold in (False, True):
        case = cases.Case("x", operator, make, True, None, cold=cold)
        inputs = cases._inputs(case)
        drawn.clear()  # calls made while the inputs were built
        functions = [cases._call(case, function, inputs) for function in (operator.ours,) * 2]
        for _ in range(10):
            for function in functions:
                function()
        distinct = {pointer for pointer, _ in drawn}
        if not cold:
            assert len(distinct) == 1
            continue
        assert len(distinct) >= 6 and sum(size for _, size in set(drawn)) <= 64 * 1024
        for position in range(len(drawn) - 1):
            window = [pointer for pointer, _ in drawn[position : position + len(distinct)]]
            assert len(set(window)) == len(window)


def test_torch_compile_that_fails_is_reported(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler found\nand much more")

    case = next(c for c in norm.cases(quick=True))
    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    row = cases.measure(case, seconds=0, compiled=True)
    assert row.compile_error == "no compiler found"
    assert row.against_compile is None and row.to_dict()["compile_error"] == "no compiler found"


# ---- the command ---------------------------------------------------------------------------------


def test_command_prints_and_writes_the_same_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    code = run("norm", "--quick", "--no-compile", "--case", "*/layer_norm/*", "--json", str(file))
    printed = capsys.readouterr().out
    assert code == 0
    result = json.loads(file.read_text())
    names = [row["name"] for row in result["rows"]]
    assert len(names) == 7 and all("/layer_norm/" in name for name in names)
    for row in result["rows"]:
        assert row["name"] in printed and row["right"] is True
        assert {"ours", "eager"} <= row["times"].keys() and "compile" not in row["times"]
        low, high = row["against_eager"]["low"], row["against_eager"]["high"]
        assert 0 < low <= row["against_eager"]["median"] <= high
    assert result["machine"]["torch"] in printed
    assert result["ceilings"]["copy_gbps"] > 0


def test_threads_are_set_and_put_back_and_json_on_stdout_is_all_there_is():
    before = torch.get_num_threads()
    words = ("--quick", "--no-compile", "--case", "norm/rms_norm/*/no grad", "--threads", "1")
    result = run_json("bench", *words)
    assert result["machine"]["threads"] == 1 and torch.get_num_threads() == before
    assert {row["name"].split("/")[1] for row in result["rows"]} == {"rms_norm"}


def test_a_case_that_raises_takes_no_other_with_it(monkeypatch, capsys, tmp_path):
    def broken(x, w):
        raise RuntimeError("no such kernel\nand much more")

    good, file = norm.OPERATORS["rms_norm"], tmp_path / "rows.json"
    operator = cases.Operator(broken, good.stock, good.formula, good.base)
    monkeypatch.setitem(norm.OPERATORS, "rms_norm", operator)
    words = "--quick", "--no-compile", "--case", "norm/*_norm/float32/64x96/forward"
    assert run(*words, "--json", str(file)) == 1
    result = json.loads(file.read_text())
    assert result["failed"] == {
        "norm/rms_norm/float32/64x96/forward": "RuntimeError: no such kernel"
    }
    assert "norm/layer_norm/float32/64x96/forward" in [row["name"] for row in result["rows"]]
    assert "FAILED: norm/rms_norm/float32/64x96/forward: RuntimeError" in capsys.readouterr().out


def test_no_case_begins_after_the_limit():
    words = "--quick", "--no-compile", "--case", "norm/*/float32/64x96/forward"
    result = run_json("bench", *words, "--limit", "1e-9")
    assert result["rows"] == [] and len(result["left_out"]) == len(norm.OPERATORS)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--case", "nothing"), "--case must match a case"),
        (("--threads", "0"), "--threads must be at least 1, got 0"),
        (("--seconds", "-1"), "--seconds must be positive, got -1"),
        (("--limit", "0"), "--limit must be positive, got 0"),
        (("--quick", "--json", "no/such/folder/x.json"), "--json must name a file to write"),
        (("--quick", "--plot", "x.docx"), "--plot must end in one of "),
        (("--quick", "--plot", "no/such/folder/x.png"), "--plot must name a file to write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(words, message):
    assert refusal("bench", *words).startswith(f"bench: {message}")


def test_ctrl_c_keeps_what_was_measured(monkeypatch):
    whole = cases.measure

    def measure(case, **options):
        if case.name.endswith("/forward under grad"):
            raise KeyboardInterrupt
        return whole(case, **options)

    monkeypatch.setattr(cases, "measure", measure)
    words = ("norm", "--quick", "--no-compile", "--case", "norm/rms_norm/float32/4x8/*")
    result = run_json("bench", *words, code=130)
    phases = [[name.rpartition("/")[2] for name in names] for names in (
        (row["name"] for row in result["rows"]), result["left_out"]
    )]  # fmt: skip
    assert phases == [["no grad"], ["forward under grad", "forward+backward"]]
