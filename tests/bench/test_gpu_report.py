"""`make gpu-report`, as far as it goes without a device: its plan, budget, verdicts and table."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.bench.machines import FACTS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_report.py"
TOOLS = {name: f"/usr/bin/{name}" for name in ("nvcc", "compute-sanitizer", "ncu")}


def load():
    sys.path.insert(0, str(SCRIPT.parent))  # as where it is run as a script
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_report"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


gpu_report = load()


def python_step(name: str, code: str, **fields) -> gpu_report.Step:
    fields = {"least": 0.1, "limit": 20.0} | fields
    return gpu_report.Step(name, command=lambda seconds: [sys.executable, "-c", code], **fields)


def results_of(records) -> list[str]:
    return [record["result"] for record in records]


def test_without_a_device_it_says_so_and_exits_2():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=hidden, timeout=120
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("gpu-report: torch ")
    assert "built without CUDA" in result.stderr or "sees no CUDA device" in result.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_passes_the_python_and_the_flags_on():
    words = ["make", "--dry-run", "gpu-report", "PYTHON=my-python", "ARGS=--budget 60"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=alone)
    assert result.stdout.strip() == "my-python benchmarks/gpu_report.py --budget 60"


# ---- the plan ------------------------------------------------------------------------------------


def test_plan(tmp_path):
    steps = {step.name: step for step in gpu_report.plan(FACTS, TOOLS, tmp_path, "python")}
    assert list(steps) == [
        "build", "smoke", "doctor", "ceilings", "split", "profile", *gpu_report.TESTS,
        "bench decode", "bench attention", "bench norm", "bench rotary", "bench optimizer",
        "compare float32", "compare bfloat16", "sweep", "slow tests",
        *(f"{tool}, {tests}" for tests in gpu_report.TESTS for tool in gpu_report.SANITIZERS),
    ]  # fmt: skip
    words = {name: " ".join(map(str, step.command(100.0))) for name, step in steps.items()}
    assert "--no-build-isolation --no-deps --no-index" in words["build"]
    assert f"--target {gpu_report.SITE}" in words["build"]
    assert "cmake.define.ONEPASS_CUDA=ON" in words["build"]
    assert "cmake.define.ONEPASS_CPU_LEVELS=baseline" in words["build"]
    assert "cmake.define.ONEPASS_CUDA_ARCHS=90" in words["build"]
    assert "torch-2-11-0-cu130-sm90" in words["build"]
    assert "bench norm dropout gate group_norm loss --device cuda" in words["bench norm"]
    assert "bench rotary --device cuda" in words["bench rotary"]
    assert words["bench attention"].endswith("--limit 55 --json bench-attention.json")
    assert "--limit 20" in " ".join(steps["bench decode"].command(60.0))
    assert "compare --device cuda --dtype bfloat16 --json" in words["compare bfloat16"]
    for name, files in gpu_report.TESTS.items():
        for tool in gpu_report.SANITIZERS:
            step = f"{tool}, {name}"
            assert words[step].startswith(f"{TOOLS['compute-sanitizer']} --tool {tool} ")
            assert not steps[step].skip
        for file in files:
            assert file in words[name] and file in words["slow tests"] and (ROOT / file).is_file()
        assert "-m device and not slow" in words[name]
    assert "-m device and slow" in words["slow tests"]
    assert words["smoke"].endswith("tests/device/test_smoke.py")
    for name in gpu_report.KERNELS:
        script = "gpu_sweep.py" if name == "sweep" else f"gpu_kernels.py {name}"
        assert f"{script} --json {tmp_path / name}.json --nvcc /usr/bin/nvcc" in words[name]
        assert "--arch 90" in words[name] and ("--ncu /usr/bin/ncu" in words[name]) == (
            name == "profile"
        )
    assert all(0 < step.least < step.limit for step in steps.values())


def test_every_device_test_is_run():
    run = {file for files in gpu_report.TESTS.values() for file in files} | {*gpu_report.SMOKE}
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/device/test_*.py")}
    for path in ROOT.glob("tests/*/test_*.py"):
        if re.search(
            r"^@everywhere$|^pytestmark = .*\beverywhere\b|def test_\w+\(executor\b",
            path.read_text(),
            re.MULTILINE,
        ):
            found.add(str(path.relative_to(ROOT)))
    assert run == found


def test_every_family_is_measured():
    from onepass.bench import FAMILIES

    measured = [family for families, _ in gpu_report.BENCHMARKS.values() for family in families]
    assert sorted(measured) == sorted(set(FAMILIES) - {"linear"})  # on CUDA that is torch's


def test_figures_name_no_folder_of_the_machine(tmp_path):
    """A result may be committed; onepass writes its command line into it."""
    for step in gpu_report.plan(FACTS, TOOLS, tmp_path, "python"):
        if step.folder == tmp_path:
            assert not [word for word in step.command(100.0) if "/" in word]
    assert {step.folder for step in gpu_report.plan(FACTS, TOOLS, tmp_path)} == {tmp_path, ROOT}


def test_flags_of_the_plan_are_flags_of_the_commands(tmp_path):
    import argparse
    from importlib import import_module

    for step in gpu_report.plan(FACTS, TOOLS, tmp_path, "python"):
        words = step.command(100.0)
        if words[1:3] == ["-m", "onepass"]:
            module, parser = import_module(f"onepass.{words[3]}"), argparse.ArgumentParser()
            module.add_arguments(parser)
            parser.parse_args(words[4:])


@pytest.mark.slow
def test_sanitizers_choose_tests_that_exist(tmp_path):
    for step in gpu_report.plan(FACTS, TOOLS, tmp_path):
        if step.name.startswith("memcheck"):
            words = step.command(100.0)
            words = [*words[words.index("-m") :], "--collect-only"]
            result = subprocess.run(
                [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
            )
            count = {"device tests": 5, "attention tests": 7, "decode tests": 3}
            found = result.stdout.count("test_small_for_sanitizers")
            assert found == count[step.name.partition(", ")[2]], result.stdout


def test_without_compute_sanitizer_its_steps_are_skipped(tmp_path):
    steps = gpu_report.plan(FACTS, TOOLS | {"compute-sanitizer": ""}, tmp_path)
    skipped = {step.name.partition(",")[0] for step in steps if step.skip}
    assert skipped == set(gpu_report.SANITIZERS)
    records = gpu_report.execute(steps[-1:], 100.0, tmp_path / "log", say=lambda line: None)
    assert results_of(records) == ["skipped"]
    assert records[0]["detail"] == "compute-sanitizer is not on this machine"


# ---- running -------------------------------------------------------------------------------------


def test_a_step_that_fails_takes_no_other_with_it(tmp_path):
    said = []
    steps = [
        python_step("first", "import os; print('hello', os.environ['FLAG'])"),
        python_step("second", "import sys; print('so it goes'); sys.exit(3)"),
        python_step("third", "print('there')"),
        gpu_report.Step("fourth", 0.1, 5.0, lambda seconds: ["no-such-program"]),
    ]
    steps[0].environment["FLAG"] = "on"
    records = gpu_report.execute(steps, 60.0, tmp_path / "log", said.append)
    assert results_of(records) == ["ok", "failed", "ok", "failed"]
    assert records[1]["detail"] == "exit code 3" and "    so it goes" in said
    assert records[3]["detail"] == "exit code 127"
    assert json.loads(json.dumps(records)) == records
    log = (tmp_path / "log").read_text()
    assert "hello on" in log and "so it goes" in log and "there" in log


def test_results_in_an_unknown_form_cost_one_step(tmp_path):
    def judge(code: int, log: str) -> gpu_report.Outcome:
        raise KeyError("verdict")

    steps = [python_step("build", ""), python_step("odd", "", judge=judge), python_step("next", "")]
    records = gpu_report.execute(steps, 60.0, tmp_path / "log", say=lambda line: None)
    assert results_of(records) == ["ok", "failed", "ok"]
    assert records[1]["detail"] == "exit code 0; its results could not be read: KeyError('verdict')"


def test_ending_the_last_step_fits_ten_minutes():
    """With ten seconds for Python's imports, the archive and the table."""
    assert gpu_report.BUDGET + sum(gpu_report.ENDINGS.values()) <= 590


def test_steps_see_what_was_built_first(tmp_path):
    code = "import os; print(os.environ['PYTHONPATH']); print(os.getcwd())"
    step = python_step("only", code, folder=tmp_path)
    _, text = gpu_report.run(step, 20.0, tmp_path / "log")
    path, folder = text.splitlines()
    assert path.split(os.pathsep)[0] == str(gpu_report.SITE) and folder == str(tmp_path)


def test_figures_are_printed_while_their_step_runs(tmp_path):
    """Each line once, also one that is written in two parts."""
    code = (
        "import time\n"
        "print('figure one: 1 us', flush=True)\n"
        "print('figure tw', end='', flush=True)\n"
        f"time.sleep(3 * {gpu_report.POLL})\n"
        "print('o: 2 us\\nno figure', flush=True)\n"
        "time.sleep(60)\n"
    )
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "two" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_report.execute([python_step("bench", code)], 60.0, tmp_path / "log", say)
    assert said == ["    one: 1 us", "    two: 2 us"]
    assert "no figure" in (tmp_path / "log").read_text()


def test_nothing_runs_after_a_build_that_failed(tmp_path):
    steps = [python_step("build", "raise SystemExit(1)"), python_step("next", "")]
    records = gpu_report.execute(steps, 60.0, tmp_path / "log", say=lambda line: None)
    assert results_of(records) == ["failed", "left out"]
    assert records[1]["detail"] == "nothing was built"


def test_a_step_gets_no_more_than_its_limit_and_ends_with_its_children(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', child])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    step = python_step("sleeps", code, limit=1.0)
    records = gpu_report.execute([step], 60.0, tmp_path / "log", say=lambda line: None)
    assert time.monotonic() - start < 30
    assert results_of(records) == ["failed"]
    assert records[0]["detail"] == "did not end within 1 s"
    child = next(int(line) for line in (tmp_path / "log").read_text().split() if line.isdigit())
    for _ in range(100):
        status = Path(f"/proc/{child}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("its child still runs")


@pytest.mark.parametrize(
    "handler", [signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"]
)
def test_tests_that_do_not_end_tell_what_they_found(tmp_path, monkeypatch, handler):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the time until they begin
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_one(): assert False, 'so it goes'\ndef test_two(): time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    step = gpu_report.Step("tests", 0.1, 3.0, lambda seconds: words)
    before = signal.signal(signal.SIGINT, handler)  # in the background of a shell it is ignored
    try:
        gpu_report.execute([step], 60.0, tmp_path / "log", say=lambda line: None)
    finally:
        signal.signal(signal.SIGINT, before)
    log = (tmp_path / "log").read_text()
    assert "so it goes" in log and "1 failed" in log


def test_ending_the_report_ends_its_step(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import signal, runpy, pathlib, gpu_report as g\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "words = [sys.executable, '-c', 'import os, time; print(os.getpid()); time.sleep(60)']\n"
        "step = g.Step('sleeps', 0.1, 50.0, lambda seconds: words)\n"
        "g.run(step, 50.0, pathlib.Path(sys.argv[2]))\n"
    )
    log = tmp_path / "log"
    report = subprocess.Popen([sys.executable, "-c", code, str(SCRIPT.parent), str(log)])
    lines: list[str] = []
    for _ in range(200):
        lines = log.read_text().split("\n") if log.exists() else []
        if len(lines) > 1 and lines[-1] == "" and lines[-2].isdigit():
            break
        time.sleep(0.05)
    report.terminate()
    assert report.wait(20) == 1
    status = Path(f"/proc/{lines[-2]}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_does_not_fit_the_budget_is_named(tmp_path):
    steps = [
        python_step("first", ""),
        python_step("sleeps", "import time; time.sleep(60)"),
        python_step("long", "", least=50.0, limit=60.0),
    ]
    records = gpu_report.execute(steps, 3.0, tmp_path / "log", say=lambda line: None)
    assert results_of(records) == ["ok", "left out", "left out"]
    assert records[1]["detail"].startswith("did not end within ")
    assert records[2]["detail"].endswith(" s of the budget were left")


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "outcome"),
    [
        ("def test_one(): pass", 0, ("ok", "1 passed, 0 failed, 0 skipped")),
        (
            "def test_one(): pass\ndef test_two(): assert False",
            1,
            ("failed", "1 passed, 1 failed, 0 skipped; first test_two"),
        ),
        (
            "import pytest\n@pytest.mark.skip\ndef test_one(): pass",
            0,
            ("failed", "0 passed, 0 failed, 1 skipped"),
        ),
    ],
)
def test_verdict_on_the_device_tests(tmp_path, body, code, outcome):
    (tmp_path / "test_it.py").write_text(body)
    words = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={tmp_path / 'tests.xml'}"]
    result = subprocess.run(
        [*words, "--rootdir", tmp_path, tmp_path], capture_output=True, cwd=tmp_path
    )
    assert result.returncode == code
    judged = gpu_report.judge_tests(result.returncode, "", tmp_path / "tests.xml")
    assert judged == gpu_report.Outcome(*outcome)


def test_tests_that_left_no_results_failed(tmp_path):
    judged = gpu_report.judge_tests(-11, "", tmp_path / "tests.xml")
    assert judged == gpu_report.Outcome("failed", "exit code -11, and no results")


@pytest.mark.parametrize(
    ("code", "log", "outcome"),
    [
        (0, "5 passed\n========= ERROR SUMMARY: 0 errors\n", ("ok", "ERROR SUMMARY: 0 errors")),
        (
            9,
            "5 passed\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
            ("failed", "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"),
        ),
        (
            0,
            "5 skipped\n========= ERROR SUMMARY: 0 errors\n",
            ("failed", "ERROR SUMMARY: 0 errors"),
        ),
        (
            1,
            "========= Error: Device not supported. Please refer to ...",
            ("skipped", "compute-sanitizer says: Device not supported"),
        ),
        (255, "", ("failed", "exit code 255")),
    ],
)
def test_verdict_on_sanitizers(code, log, outcome):
    assert gpu_report.judge_sanitizer(code, log) == gpu_report.Outcome(*outcome)


def test_verdict_on_a_build(monkeypatch, tmp_path):
    assert gpu_report.judge_build(1, sys.executable).result == "failed"
    package = tmp_path / "site" / "onepass"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "site")
    # -S: an editable onepass of this Python would come first, which the second verdict is about.
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    wrapper.chmod(0o755)
    assert gpu_report.judge_build(0, str(wrapper)).result == "ok"
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    judged = gpu_report.judge_build(0, str(wrapper))
    assert judged.result == "failed" and "another onepass comes first" in judged.detail


# ---- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(1)", 1)])
def test_main_writes_the_report(tmp_path, monkeypatch, capsys, code, expected):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))
    steps = [python_step("build", ""), python_step("tests", code)]
    monkeypatch.setattr(gpu_report, "plan", lambda *_: steps)
    folder = tmp_path / "out" / "nvidia-h100-80gb-hbm3"
    folder.mkdir(parents=True)
    (folder / "bench-norm.json").write_text("of an earlier run")
    assert gpu_report.main(["--out", str(tmp_path / "out"), "--budget", "30"]) == expected
    report = json.loads((folder / "report.json").read_text())
    assert results_of(report["steps"]) == ["ok", "failed" if expected else "ok"]
    assert report["machine"] == FACTS and report["budget"] == 30 and 0 <= report["seconds"] < 30
    assert not (folder / "bench-norm.json").exists()
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out and "| build | ok |" in table


def test_main_runs_the_steps_that_are_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))
    names = ("build", "device tests", "bench norm", "bench decode", "memcheck, device tests")
    steps = [python_step(name, "") for name in names]
    monkeypatch.setattr(gpu_report, "plan", lambda *_: steps)
    folder = tmp_path / "nvidia-h100-80gb-hbm3"
    folder.mkdir()
    for name in ("bench-norm", "bench-attention"):
        (folder / f"{name}.json").write_text("of another run")
    gpu_report.main(["--out", str(tmp_path), "--only", "bench*", "*check,*"])
    report = json.loads((folder / "report.json").read_text())
    assert [step["name"] for step in report["steps"]] == ["build", *names[2:]]
    assert not (folder / "bench-norm.json").exists()
    assert (folder / "bench-attention.json").exists()
    (folder / "report.log").write_text("of the first run\n")
    gpu_report.main(["--out", str(tmp_path), "--only", "device tests"])
    report = json.loads((folder / "report.json").read_text())
    of_both = ["bench norm", "bench decode", "memcheck, device tests", "build", "device tests"]
    assert [step["name"] for step in report["steps"]] == of_both
    assert (folder / "report.log").read_text().startswith("of the first run\n")
    gpu_report.main(["--out", str(tmp_path), "--only", "device tests"])  # once more
    report = json.loads((folder / "report.json").read_text())
    assert [step["name"] for step in report["steps"]] == of_both


def test_a_wrong_name_of_a_step_costs_no_build(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))
    monkeypatch.setattr(gpu_report, "execute", lambda *_: pytest.fail("a step runs"))
    words = ["--out", str(tmp_path), "--only", "smoke", "device-tests", "bench*", "profiles"]
    assert gpu_report.main(words) == 2
    said = capsys.readouterr().err
    assert "no step is named device-tests, profiles; steps are: 'build', 'smoke'" in said
    assert not list(tmp_path.iterdir())


def test_the_archive_alone_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))
    monkeypatch.setattr(gpu_report, "plan", lambda *_: [python_step("build", "")])
    carried = tmp_path / "carried"
    assert gpu_report.main(["--out", str(tmp_path / "out"), "--archive", str(carried)]) == 0
    assert [file.name for file in carried.iterdir()] == ["gpu-report.tar.gz"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["nvidia-h100-80gb-hbm3"]


@pytest.mark.parametrize("when", ["before", "while"])
def test_what_cannot_be_written_is_no_success(tmp_path, monkeypatch, capsys, when):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "work" / "site")
    monkeypatch.setattr(gpu_report, "find_all", lambda environment: (dict(FACTS), TOOLS))
    folder = tmp_path / "out" / "nvidia-h100-80gb-hbm3"
    blocked = folder / "table.md" if when == "before" else folder / "report.json"
    make = f"import os; os.makedirs({str(blocked)!r})"  # a folder in the place of the file
    monkeypatch.setattr(gpu_report, "plan", lambda *_: [python_step("build", make)])
    if when == "before":
        blocked.mkdir(parents=True)
    code = gpu_report.main(["--out", str(tmp_path / "out"), "--budget", "30"])
    output, errors = capsys.readouterr()
    if when == "before":
        assert (code, output) == (2, "") and "gpu-report: --out must be writable: Is a" in errors
    else:
        assert code == 1 and "| build | ok |" in output
        assert "gpu-report: report.json could not be written: " in errors


def test_the_report_is_written_after_each_step(tmp_path):
    """Also as the archive that is carried away."""
    counts, folder = [], tmp_path / "device"
    folder.mkdir()
    steps = [python_step("build", ""), python_step("next", "")]

    def keep(records) -> None:
        gpu_report.write(folder, FACTS, 60.0, time.monotonic(), [], records, tmp_path)
        counts.append(len(json.loads((folder / "report.json").read_text())["steps"]))
        assert f"| {records[-1]['name']} | ok |" in (folder / "table.md").read_text()
        with tarfile.open(tmp_path / "gpu-report.tar.gz") as archive:
            packed = json.loads(archive.extractfile("report.json").read())
        assert len(packed["steps"]) == counts[-1]

    gpu_report.execute(steps, 60.0, tmp_path / "log", lambda line: None, keep)
    assert counts == [1, 2]


def test_figures_in_an_unknown_form_cost_the_table_alone(tmp_path, capsys):
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "bench-norm.json").write_text('{"machine": {}}')
    records = [{"name": "build", "result": "ok", "detail": "", "seconds": 1.0}]
    table, written = gpu_report.write(folder, FACTS, 60.0, 0.0, [], records, tmp_path)
    assert not written and "There is no table: KeyError('ceilings')" in table
    assert "there is no table: KeyError('ceilings')" in capsys.readouterr().err
    with tarfile.open(tmp_path / "gpu-report.tar.gz") as archive:
        assert {"bench-norm.json", "report.json", "table.md"} == set(archive.getnames())


# ---- half an hour in three calls -----------------------------------------------------------------


def test_three_calls_run_every_step_once(tmp_path):
    """Those of CONTRIBUTING.md; each fits ten minutes by the least times of its steps."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    calls = [shlex.split(of) for of in re.findall(r'--archive FOLDER --only ([^"]+)"', text)]
    build, *steps = gpu_report.plan(FACTS, TOOLS, tmp_path)
    of_call = [[s for s in steps if any(fnmatchcase(s.name, o) for o in only)] for only in calls]
    assert len(calls) == 3
    assert sorted(s.name for of in of_call for s in of) == sorted(s.name for s in steps)
    for of in of_call:
        assert build.least + sum(step.least for step in of) <= gpu_report.BUDGET


# ---- the kernels' steps --------------------------------------------------------------------------


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
    judged = gpu_report.judge_kernels(code, "", tmp_path / "profile.json")
    assert judged == gpu_report.Outcome(*outcome)


def test_without_nsight_compute_there_is_no_profile(tmp_path):
    steps = {s.name: s for s in gpu_report.plan(FACTS, TOOLS | {"ncu": ""}, tmp_path)}
    assert steps["profile"].skip == "ncu (Nsight Compute) is not on this machine"
    assert not steps["split"].skip and not steps["ceilings"].skip
