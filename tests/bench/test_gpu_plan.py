"""The plan of `make gpu-report` and its verdicts, as far as they go without a device."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.machines import FACTS, ROOT, TOOLS, program
from tests.support import resumed

import gpu_build  # isort: skip
import gpu_plan  # isort: skip
import gpu_step  # isort: skip


def where(folder: Path, **changes) -> gpu_plan.Where:
    fields = dict(facts=FACTS, tools=TOOLS, folder=folder, logs=folder / "logs", environment={})
    return gpu_plan.Where(**fields | {"python": "python"} | changes)


def steps_of(folder: Path, **changes) -> dict[str, dict[str, gpu_step.Step]]:
    calls = gpu_plan.plan(where(folder, **changes))
    return {name: {step.name: step for step in call.steps} for name, call in calls.items()}


def all_steps(folder: Path, *without: str) -> list[gpu_step.Step]:
    """Those of all calls, on a machine without these tools."""
    calls = steps_of(folder, tools=TOOLS | dict.fromkeys(without, ""))
    return [step for steps in calls.values() for step in steps.values()]


def words_of(step: gpu_step.Step, seconds: float = 100.0) -> str:
    return " ".join(map(str, step.command(seconds)))


# ---- the plan ------------------------------------------------------------------------------------


def test_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_build, "CARRIED", tmp_path / "nothing")
    steps = steps_of(tmp_path)
    check, measure = list(steps["check"]), list(steps["measure"])
    assert check[:2] == ["build", "smoke norm"] and check[10:12] == ["smoke optimizer", "doctor"]
    assert {"tests device attention", "tests norm values", "memcheck attention_decode"} < {*check}
    assert check[-1].startswith("racecheck ")
    benches = [f"bench {family}" for family in gpu_plan.BENCHMARKS]
    assert measure == ["build", "ceilings", *benches, "profile"]
    words = {s.name: words_of(s) for s in all_steps(tmp_path)}
    build = "--no-build-isolation --no-deps --no-index", f"--target {gpu_build.SITE}"
    build += tuple(f"ONEPASS_{n}" for n in ("CUDA=ON", "CPU_LEVELS=baseline", "CUDA_ARCHS=90"))
    assert all(said in words["build"] for said in build)
    assert words["bench attention"].endswith("--limit 88 --json bench-attention.json")
    assert "--limit 20" in words_of(steps["measure"]["bench decode"], 32.0)
    for tool in gpu_plan.SANITIZERS:
        run = words[f"{tool} operators"]
        assert run.startswith(f"{TOOLS['compute-sanitizer']} --tool {tool} ")
        assert run.endswith("tests/device/test_operators.py -k small_for_sanitizers")
    tests = words["tests norm values"]
    assert "--each 60 pytest" in tests and tests.endswith("not slow tests/norm/test_values.py")
    for name in gpu_plan.KERNELS:
        script = "gpu_sweep.py" if name == "sweep" else f"gpu_kernels.py {name}"
        assert f"{script} --json {tmp_path / name}.json --nvcc /usr/bin/nvcc" in words[name]
        assert "--arch 90" in words[name]
        assert ("--ncu /usr/bin/ncu" in words[name]) == (name == "profile")
    assert all(0 < step.least < step.limit for step in all_steps(tmp_path))


def test_two_calls_fit_fifteen_minutes(tmp_path):
    """With two minutes for each start, and four left before the second."""
    calls = gpu_plan.plan(where(tmp_path))
    ending = sum(gpu_step.ENDINGS.values())
    took = {name: call.budget + ending for name, call in calls.items()}
    assert took["check"] <= 330 and took["measure"] <= 205 and took["more"] <= 590
    assert 900 - (120 + took["check"]) >= 240
    assert 2 * 120 + took["check"] + took["measure"] <= 900
    benches = sum(limit for _, limit in gpu_plan.BENCHMARKS.values())
    assert benches <= calls["measure"].budget - 35  # the rest is for the build and the ceilings


def test_carried_libraries_are_taken_if_they_are_of_these_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_build, "CARRIED", tmp_path)
    (tmp_path / gpu_build.SOURCES).write_text(f"90 {gpu_build.digest()}\n")
    words = {step.name: words_of(step) for step in all_steps(tmp_path)}
    assert f"cmake.define.ONEPASS_PREBUILT={tmp_path}" in words["build"]
    assert "ONEPASS_CUDA" not in words["build"]
    assert words["ceilings"].endswith(f"--program {tmp_path / gpu_build.CEILINGS}")
    assert gpu_build.carried(80) == "what was carried is for sm_90"
    (tmp_path / gpu_build.SOURCES).write_text("90 0123\n")
    assert gpu_build.carried(90) == "what was carried is of other sources"
    assert "cmake.define.ONEPASS_CUDA=ON" in words_of(all_steps(tmp_path)[0])


@pytest.mark.slow
def test_every_device_test_is_run():
    """The files that pytest collects for a device; smoke has steps of its own, grids no kernel."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "device", "tests"]
    environment = os.environ | {"ONEPASS_TEST_DEVICE": "cpu"}
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = [line for line in run.stdout.splitlines() if line.startswith("tests/")]
    found = {line.partition("::")[0] for line in lines if "::" in line}
    found -= {"tests/device/test_smoke.py", "tests/support/test_grids.py"}
    assert found == set(gpu_plan.device_files()), run.stdout[-2000:]


def test_every_family_is_measured():
    from onepass.tools.bench import FAMILIES

    benchmarks = [*gpu_plan.BENCHMARKS.values(), *gpu_plan.OTHER_BENCHMARKS.values()]
    measured = {family for families, _ in benchmarks for family in families}
    by_torch = {"linear", "causal_conv", "quantized_linear", "selective_scan"}  # on CUDA
    by_torch |= {"mamba_chunk_scan", "delta_rule"}
    assert measured == set(FAMILIES) - by_torch


def test_figures_name_no_folder_of_the_machine(tmp_path):
    """A result may be committed; onepass writes its command line into it."""
    for step in all_steps(tmp_path):
        if step.folder == tmp_path:
            assert not [word for word in step.command(100.0) if "/" in word]
    assert {step.folder for step in all_steps(tmp_path)} == {tmp_path, ROOT}


def test_flags_of_the_plan_are_flags_of_the_commands(tmp_path):
    import argparse
    from importlib import import_module

    for step in all_steps(tmp_path):
        words = step.command(100.0)
        if words[1:3] == ["-m", "onepass"]:
            module, parser = import_module(f"onepass.tools.{words[3]}"), argparse.ArgumentParser()
            module.add_arguments(parser)
            parser.parse_args(words[4:])


def test_sanitizers_choose_tests_that_exist():
    names = ("attention_torch", "attention_decode", "attention", "operators")
    assert {Path(file).stem for file in gpu_plan.small()} == {f"test_{name}" for name in names}


def test_steps_of_tools_that_are_not_there_are_skipped(tmp_path):
    skipped = [s for s in all_steps(tmp_path, "compute-sanitizer") if s.skip]
    assert {step.name.partition(" ")[0] for step in skipped} == set(gpu_plan.SANITIZERS)
    records = gpu_step.Runner(tmp_path / "log", say=lambda line: None).execute(skipped[:1], 100.0)
    assert [record["result"] for record in records] == ["skipped"]
    assert records[0]["detail"] == "compute-sanitizer is not on this machine"
    without = {step.name: step.skip for step in all_steps(tmp_path, "ncu")}
    assert without["profile"].startswith("ncu") and not without["split"] + without["ceilings"]


# ---- verdicts ------------------------------------------------------------------------------------

PASSED, SKIPPED = resumed.Result("a::one", "passed"), resumed.Result("a::three", "skipped")
FAILED = resumed.Result("a::two[x]", "failed", 1.0, "assert 1 == 2")


@pytest.mark.parametrize(
    ("cases", "code", "outcome"),
    [
        ([PASSED], 0, ("ok", "1 passed, 0 failed, 0 skipped")),
        ([PASSED, FAILED], 1,
         ("failed", "1 passed, 1 failed, 0 skipped; first two[x]: assert 1 == 2")),
        ([SKIPPED], 0, ("failed", "0 passed, 0 failed, 1 skipped")),
        ([PASSED], 3, ("failed", "1 passed, 0 failed, 0 skipped; exit code 3")),
        ([], -11, ("failed", "exit code -11, and no results")),
    ],
)  # fmt: skip
def test_verdict_on_cases(tmp_path, cases, code, outcome):
    file = tmp_path / "cases"
    file.write_text("".join(json.dumps(case._asdict()) + "\n" for case in cases))
    assert gpu_plan.judge_cases(code, "", file) == gpu_step.Outcome(*outcome)


def test_verdict_on_cases_that_did_not_end(tmp_path):
    file = tmp_path / "cases"
    file.write_text(json.dumps(PASSED._asdict()) + '\n{"case": "a::hangs"}\n')
    judge = functools.partial(gpu_plan.judge_cases, results=file)
    found = "1 passed, 0 failed, 0 skipped; stopped in hangs"
    assert judge(None, "") == gpu_step.Outcome("ok", found)
    step = gpu_step.Step("tests", 15, 200, lambda seconds: [], judge)
    cut, whole = (gpu_step._unfinished(step, seconds, "") for seconds in (90.0, 200.0))
    assert cut == gpu_step.Outcome("left out", f"did not end within 90 s; {found}")
    assert whole.result == "failed"
    file.write_text(json.dumps(FAILED._asdict()) + "\n")
    assert gpu_step._unfinished(step, 90.0, "").result == "failed"


HAZARDS = "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"


@pytest.mark.parametrize(
    ("code", "log", "outcome"),
    [
        (0, "5 passed\n=== ERROR SUMMARY: 0 errors\n", ("ok", "ERROR SUMMARY: 0 errors")),
        (9, f"5 passed\n=== {HAZARDS}\n", ("failed", HAZARDS)),
        (0, "5 skipped\n=== ERROR SUMMARY: 0 errors\n", ("failed", "ERROR SUMMARY: 0 errors")),
        (1, "=== Error: Device not supported. Please refer to ...",
         ("skipped", "compute-sanitizer says: Device not supported")),
        (255, "", ("failed", "exit code 255")),
    ],
)  # fmt: skip
def test_verdict_on_sanitizers(code, log, outcome):
    log = log.replace("=== ", "========= ")
    assert gpu_plan.judge_sanitizer(code, log) == gpu_step.Outcome(*outcome)


def test_verdict_on_a_build(monkeypatch, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert gpu_build.judge_build(1, sys.executable, {}).result == "failed"
    package = tmp_path / "site" / "onepass"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(gpu_build, "SITE", tmp_path / "site")
    # -S: an editable onepass of this Python would come first, which the second verdict is about.
    wrapper = program(tmp_path / "python", f'exec "{sys.executable}" -S "$@"')
    assert gpu_build.judge_build(0, str(wrapper), environment).result == "ok"
    monkeypatch.setattr(gpu_build, "SITE", tmp_path / "elsewhere")
    judged = gpu_build.judge_build(0, str(wrapper), environment)
    assert judged.result == "failed" and "another onepass comes first" in judged.detail


@pytest.mark.parametrize(
    "code, rows, outcome",
    [
        (0, "[1, 2]", ("ok", "2 rows")),
        (0, "[]", ("failed", "exit code 0")),
        (1, "[1]", ("failed", "exit code 1")),
        (3, "", ("skipped", "only administrators may read this device's counters")),
    ],
)
def test_verdict_on_kernels(tmp_path, code, rows, outcome):
    (tmp_path / "profile.json").write_text(rows)
    judged = gpu_plan.judge_kernels(code, "", tmp_path / "profile.json")
    assert judged == gpu_step.Outcome(*outcome)
