"""`make gpu-report`: one command that tests and measures onepass on a machine with a CUDA device.

Builds onepass for the device that torch sees, for the Python that runs this and without changing
it, then runs every kernel once, the device tests, the benchmarks, profiles of the kernels, a
comparison of a whole model and compute-sanitizer. Prints each figure as soon as it is known. Writes
a JSON file for each step, report.json, report.log and table.md to benchmarks/results/<device>/, and
all of them to gpu-report.tar.gz beside it. If a step fails, the others still run.

Exit codes: 0, 1 if a step failed, 2 if there is nothing to run on: no torch with CUDA, no device,
no nvcc, a missing package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from gpu_archive import NAME, pack
from gpu_machine import ROOT, Obstacle, find_all, slug
from gpu_table import markdown

WORK = ROOT / "build" / "gpu-report"
WRITTEN = ("report.json", "table.md")
SITE = WORK / "site"  # where onepass is installed, for the steps alone
# One process each: after an illegal access by a kernel no other kernel runs in that process.
TESTS = {
    "device tests": (
        "tests/device/test_first_call.py",
        "tests/device/test_operators.py",
        "tests/device/test_operators_torch.py",
        "tests/device/test_optim.py",
        "tests/norm/test_values.py",
        "tests/branch/test_layouts.py",
        "tests/branch/test_values.py",
        "tests/dropout/test_values.py",
        "tests/rotary/test_values.py",
        "tests/rotary/test_layouts.py",
        "tests/rotary/test_inplace.py",
        "tests/rotary/test_extremes.py",
        "tests/gate/test_extremes.py",
        "tests/gate/test_layouts.py",
        "tests/gate/test_values.py",
        "tests/group_norm/test_extremes.py",
        "tests/group_norm/test_layouts.py",
        "tests/group_norm/test_values.py",
        "tests/loss/test_extremes.py",
        "tests/loss/test_layouts.py",
        "tests/loss/test_values.py",
        "tests/modulated_norm/test_layouts.py",
        "tests/modulated_norm/test_values.py",
        "tests/optimizer/test_clipping.py",
    ),
    "attention tests": (
        "tests/device/test_attention.py",
        "tests/device/test_attention_torch.py",
        "tests/attention/test_values.py",
        "tests/attention/test_contract.py",
        "tests/attention/test_dropout.py",
        "tests/attention/test_extremes.py",
        "tests/attention/test_layouts.py",
        "tests/attention/test_packed.py",
    ),
    "decode tests": (
        "tests/device/test_attention_decode.py",
        "tests/attention_decode/test_values.py",
        "tests/attention_decode/test_contract.py",
        "tests/attention_decode/test_extremes.py",
        "tests/attention_decode/test_pages.py",
    ),
}
# The families that a step measures, and the seconds that it may take: enough for the first part of
# attention's standard shapes; `onepass bench attention --device cuda` by itself measures all.
BENCHMARKS = {"decode": (("decode",), 75), "attention": (("attention",), 150)}
BENCHMARKS |= {
    "norm": (("norm", "dropout", "gate", "group_norm", "loss"), 180),
    "rotary": (("rotary",), 60),
}
BENCHMARKS |= {"optimizer": (("optimizer",), 60)}
# Of gpu_kernels.py and gpu_sweep.py, and the seconds that each may take.
KERNELS = {"ceilings": 60, "split": 90, "profile": 150, "sweep": 200}
NO_COUNTERS = 3  # its exit code if it may not read the device's counters
SMOKE = ("tests/device/test_smoke.py",)  # every instance once
SANITIZERS = ("memcheck", "racecheck", "synccheck")
BUDGET = 570.0  # seconds; the rest of ten minutes is for ending and reporting the last step
# How a step that still runs is ended, and the seconds that it then has. First as by Ctrl-C: pytest
# and `onepass bench` then print what they have found so far.
ENDINGS = {signal.SIGINT: 12.0, signal.SIGTERM: 4.0, signal.SIGKILL: 4.0}
HANGS = 90  # seconds of one test after which pytest prints its stack
TAIL = 30  # lines of a failed step that are shown
FIGURE = "figure "  # a line of a step's output that begins so is printed as soon as it is written
POLL = 0.5  # seconds between two looks for such lines


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        result: "ok", "failed", "skipped" (its tool is missing) or "left out" (no time for it).
        detail: the findings, or the reason.
    """

    result: str
    detail: str = ""


def by_exit_code(code: int, log: str) -> Outcome:
    return Outcome("ok") if code == 0 else Outcome("failed", f"exit code {code}")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        least: with fewer seconds left it is not begun.
        limit: seconds that it may take at most.
        command: gives its arguments, for the seconds that it has.
        judge: gives its outcome, from the exit code and the output.
        environment: variables added to the environment of all steps.
        folder: where it runs. Steps that write figures run in the folder of the results: the
            command in a result then contains no path of this machine.
        skip: why it cannot run here; empty if it can.
    """

    name: str
    least: float
    limit: float
    command: Callable[[float], Sequence[str]]
    judge: Callable[[int, str], Outcome] = by_exit_code
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT
    skip: str = ""


# ---- the steps -----------------------------------------------------------------------------------


def plan(
    facts: Mapping, tools: Mapping[str, str], folder: Path, python: str = sys.executable
) -> list[Step]:
    """All steps; those that give figures come before those that may take long."""
    onepass = [python, "-m", "onepass"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["-o", f"faulthandler_timeout={HANGS}"]
    quick, slow = ([*pytest, "-m", f"device and {words}"] for words in ("not slow", "slow"))
    every_file = [file for files in TESTS.values() for file in files]
    build = Step(
        "build",
        60,
        300,
        lambda seconds: build_command(facts, python),
        lambda code, log: judge_build(code, python),
        {"CUDACXX": tools["nvcc"]},
    )
    return [
        build,
        tests("smoke", SMOKE, pytest, limit=90),
        Step("doctor", 20, 90, lambda seconds: [*onepass, "doctor"], judge_doctor),
        *(kernels(name, facts, tools, folder, python) for name in KERNELS if name != "sweep"),
        *(tests(name, files, quick) for name, files in TESTS.items()),
        *(bench(name, onepass, folder) for name in BENCHMARKS),
        *(compare(dtype, onepass, folder) for dtype in ("float32", "bfloat16")),
        kernels("sweep", facts, tools, folder, python),
        tests("slow tests", every_file, slow),
        *(
            sanitizer(tool, name, files, pytest, tools["compute-sanitizer"])
            for name, files in TESTS.items()
            for tool in SANITIZERS
        ),
    ]


def tests(name: str, files: Sequence[str], pytest: Sequence[str], limit: float = 200) -> Step:
    results = WORK / f"{slug(name)}.xml"
    words = [*pytest, f"--junit-xml={results}", *files]
    judge = functools.partial(judge_tests, results=results)
    return Step(name, min(60, limit / 2), limit, lambda seconds: words, judge)


def kernels(name: str, facts: Mapping, tools: Mapping[str, str], folder: Path, python: str) -> Step:
    file = f"{name}.json"
    program = ["gpu_sweep.py"] if name == "sweep" else ["gpu_kernels.py", name]
    words = [python, str(ROOT / "benchmarks" / program[0]), *program[1:], "--json", folder / file]
    words += ["--nvcc", tools["nvcc"], "--arch", str(facts["capability"])]
    words += ["--ncu", tools["ncu"]] if name == "profile" else []
    judge = functools.partial(judge_kernels, file=folder / file)
    no_ncu = "ncu (Nsight Compute) is not on this machine"
    skip = no_ncu if name == "profile" and not tools["ncu"] else ""
    return Step(name, 30, KERNELS[name], lambda seconds: words, judge, skip=skip)


def bench(name: str, onepass: Sequence[str], folder: Path) -> Step:
    families, limit = BENCHMARKS[name]
    file = f"bench-{name}.json"

    def command(seconds: float) -> list[str]:
        # Its imports, and the case that runs when the limit is reached, take time as well.
        within = f"{max(seconds - 45, seconds / 3):.0f}"
        words = [*onepass, "bench", *families, "--device", "cuda", "--seconds", "0.3", "--stream"]
        return [*words, "--limit", within, "--json", file]

    judge = functools.partial(judge_bench, file=folder / file)
    return Step(f"bench {name}", 45, limit, command, judge, folder=folder)


def compare(dtype: str, onepass: Sequence[str], folder: Path) -> Step:
    file = f"compare-{dtype}.json"
    words = [*onepass, "compare", "--device", "cuda", "--dtype", dtype, "--json", file]
    words += ["--layers", "12", "--heads", "12", "--width", "768", "--batch", "8"]
    words += ["--dropout", "0.1", "--steps", "60"]
    judge = functools.partial(judge_compare, file=folder / file)
    return Step(f"compare {dtype}", 45, 120, lambda seconds: words, judge, folder=folder)


def sanitizer(
    tool: str, of: str, files: Sequence[str], pytest: Sequence[str], program: str
) -> Step:
    words = [program, "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":
        words += ["--report-api-errors", "no"]  # torch probes the device with calls that may fail
    words += [*pytest, *files, "-k", "small_for_sanitizers"]
    return Step(
        f"{tool}, {of}",
        45,
        120,
        lambda seconds: words,
        judge_sanitizer,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor in an allocation of its own
        skip="" if program else "compute-sanitizer is not on this machine",
    )


def build_command(facts: Mapping, python: str) -> list[str]:
    """Installs into SITE; the build folder is one per Python, torch and architecture. Of the CPU's
    levels only the least: the others would take about half of the time."""
    tag = f"py{sys.version_info.major}{sys.version_info.minor}-torch-{slug(facts['torch'])}"
    settings = {
        "build-dir": WORK / f"{tag}-sm{facts['capability']}",
        "cmake.define.ONEPASS_CPU_LEVELS": "baseline",
        "cmake.define.ONEPASS_CUDA": "ON",
        "cmake.define.ONEPASS_CUDA_ARCHS": facts["capability"],
    }
    words = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    words += ["--disable-pip-version-check", "--target", str(SITE)]
    words += [f"--config-settings={name}={value}" for name, value in settings.items()]
    return [*words, str(ROOT)]


def judge_build(code: int, python: str) -> Outcome:
    """Fails if another onepass in this Python, an editable one, comes before the one just built."""
    if code:
        return by_exit_code(code, "")
    find = "import importlib.util as u; print(u.find_spec('onepass').origin)"
    result = subprocess.run(
        [python, "-c", find], capture_output=True, text=True, env=environment_of_steps()
    )
    found = Path(result.stdout.strip() or ".")
    if found.is_relative_to(SITE):
        return Outcome("ok")
    return Outcome("failed", f"another onepass comes first in this Python: {found.parent}")


def judge_doctor(code: int, log: str) -> Outcome:
    return Outcome("ok" if code == 0 else "failed", (log.strip().splitlines() or [""])[-1])


def judge_tests(code: int, log: str, results: Path) -> Outcome:
    """From the JUnit file; a step whose tests were all skipped failed."""
    try:
        cases = list(ElementTree.parse(results).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Outcome("failed", f"exit code {code}, and no results")
    found = lambda case, tags: any(case.find(tag) is not None for tag in tags)  # noqa: E731
    bad = [case for case in cases if found(case, ("failure", "error"))]
    skipped = [case for case in cases if found(case, ("skipped",))]
    passed = len(cases) - len(bad) - len(skipped)
    detail = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    if bad:
        detail += f"; first {bad[0].get('name')}"
    return Outcome("ok" if code == 0 and passed and not bad else "failed", detail)


def judge_bench(code: int, log: str, file: Path) -> Outcome:
    bench = read_json(file)
    if bench is None:
        return Outcome("failed", f"exit code {code}, and no figures")
    wrong = [row["name"] for row in bench["rows"] if not row["right"]]
    counts = {"failed": len(bench["failed"]), "wrong": len(wrong)}
    counts |= {"left out": len(bench["left_out"])}
    detail = f"{len(bench['rows'])} cases"
    detail += "".join(f", {count} {word}" for word, count in counts.items() if count)
    first = next(iter([*bench["failed"], *wrong]), "")
    return Outcome("ok" if code == 0 else "failed", detail + (f"; first {first}" if first else ""))


def judge_kernels(code: int, log: str, file: Path) -> Outcome:
    if code == NO_COUNTERS:
        return Outcome("skipped", "only administrators may read this device's counters")
    found = read_json(file)
    if code or not found:
        return Outcome("failed", f"exit code {code}")
    return Outcome("ok", f"{len(found)} rows")


def judge_compare(code: int, log: str, file: Path) -> Outcome:
    compared = read_json(file)
    if code or compared is None:
        return Outcome("failed", f"exit code {code}")
    verdict = compared["verdict"]
    return Outcome("ok" if verdict["same"] else "failed", verdict["sentence"])


def judge_sanitizer(code: int, log: str) -> Outcome:
    if "Device not supported" in log:
        return Outcome("skipped", "compute-sanitizer says: Device not supported")
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", log)
    detail = summary[-1].strip() if summary else f"exit code {code}"
    return Outcome("ok" if code == 0 and re.search(r"\d passed", log) else "failed", detail)


def read_json(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


# ---- running the steps ---------------------------------------------------------------------------


def environment_of_steps() -> dict[str, str]:
    """The caller's, with the new build first on the path. pytest loads no plugins: the tests need
    none, and one may change their order or seeds. Swapped models run onepass's attention, which the
    report is to measure."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["ONEPASS_CUDA_ATTENTION"] = "always"
    environment.pop("ONEPASS_TEST_DEVICE", None)
    return environment


def judged(step: Step, code: int, text: str) -> Outcome:
    try:
        return step.judge(code, text)
    except Exception as error:  # of results in an unknown form; the other steps still run
        return Outcome("failed", f"exit code {code}; its results could not be read: {error!r}")


def execute(
    steps: Sequence[Step],
    budget: float,
    log: Path,
    say: Callable[[str], object] = print,
    keep: Callable[[list[dict]], object] = lambda records: None,
) -> list[dict]:
    """Runs the steps one by one within `budget` seconds; returns a record of each.

    A step gets the time that is left, at most its limit; all output goes to the file `log`. If the
    first step, the build, fails, no other runs. `keep` gets the records so far after each step, so
    that they survive if this process is ended early.
    """
    end = time.monotonic() + budget
    records, built = [], True
    for step in steps:
        seconds = min(step.limit, end - time.monotonic())
        start = time.monotonic()
        text = ""
        if not built:
            outcome = Outcome("left out", "nothing was built")
        elif step.skip:
            outcome = Outcome("skipped", step.skip)
        elif seconds < step.least:
            outcome = Outcome("left out", f"{max(seconds, 0):.0f} s of the budget were left")
        else:
            code, text = run(step, seconds, log, say)
            if code is not None:
                outcome = judged(step, code, text)
            else:  # its own fault only if it had its full limit
                result = "failed" if seconds >= step.limit else "left out"
                outcome = Outcome(result, f"did not end within {seconds:.0f} s")
        taken = time.monotonic() - start
        if step is steps[0]:
            built = outcome.result == "ok"
        say(f"{step.name:<18} {outcome.result:<9} {taken:5.0f} s  {outcome.detail}")
        if outcome.result == "failed":
            for line in text.splitlines()[-TAIL:]:
                say(f"    {line}")
        records.append({"name": step.name, **asdict(outcome), "seconds": round(taken, 1)})
        keep(records)
    return records


def run(
    step: Step, seconds: float, log: Path, say: Callable[[str], object] = print
) -> tuple[int | None, str]:
    """(exit code, or None if it did not end in time; its output, which goes to the log too).

    `say` gets its figures while it runs: if this process is ended, they are known.
    """
    words = [str(word) for word in step.command(seconds)]
    with open(log, "a+", encoding="utf-8", errors="replace") as file:
        file.write(f"\n$ {' '.join(words)}\n")
        file.flush()
        begin = file.tell()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=step.folder,
                env=environment_of_steps() | step.environment,
                start_new_session=True,
                # It is ignored if the report runs in a shell's background; _end sends it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        except OSError as error:
            return 127, str(error)
        try:
            with open(log, encoding="utf-8", errors="replace") as output:
                output.seek(begin)
                code = _wait(process, seconds, output, say)
        finally:
            _end(process)
        file.seek(begin)
        return code, file.read()


def _wait(
    process: subprocess.Popen, seconds: float, output: TextIO, say: Callable[[str], object]
) -> int | None:
    """Its exit code, or None if it does not end in time."""
    end, begun = time.monotonic() + seconds, ""
    while True:
        left = end - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(min(POLL, left), 0))
        *lines, begun = (begun + output.read()).split("\n")
        for line in lines:
            if line.startswith(FIGURE):
                say(f"    {line.removeprefix(FIGURE)}")
        if process.returncode is not None or left <= 0:
            return process.returncode


def _end(process: subprocess.Popen) -> None:
    """Ends a step that still runs, and the processes that it left behind."""
    for ending, seconds in ENDINGS.items():
        if ending != signal.SIGKILL and process.poll() is not None:
            continue
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, ending)
            process.wait(seconds)


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for all")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER",
        help="the results go into a folder in it, named after the device",
    )  # fmt: skip
    parser.add_argument(
        "--archive", type=Path, metavar="FOLDER",
        help="where gpu-report.tar.gz goes, if not to the folder of --out",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="GLOB",
        help="of the steps after the build; what other runs found on this machine is kept",
    )  # fmt: skip
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        machine, tools = find_all(os.environ)
    except Obstacle as obstacle:
        print(f"gpu-report: {obstacle}", file=sys.stderr)
        return 2
    folder = args.out.resolve() / slug(machine["gpu"])
    build, *others = plan(machine, tools, folder)
    names = [step.name for step in (build, *others)]
    if unknown := [of for of in args.only or () if not any(fnmatchcase(n, of) for n in names)]:
        text = f"gpu-report: --only: no step is named {', '.join(unknown)}; steps are: "
        print(text + ", ".join(map(repr, names)), file=sys.stderr)
        return 2
    archive = (args.archive or args.out).resolve()
    try:
        WORK.mkdir(parents=True, exist_ok=True)
        for name in [folder / name for name in WRITTEN] + [archive / f"{NAME}.new"]:
            name.parent.mkdir(parents=True, exist_ok=True)
            output_files().OutputFile(name)
    except OSError as error:
        at = error.filename or folder
        print(f"gpu-report: --out must be writable: {error.strerror}: {at}", file=sys.stderr)
        return 2
    shutil.rmtree(SITE, ignore_errors=True)
    chosen = [step for step in others if any(fnmatchcase(step.name, of) for of in args.only or "*")]
    figures = folder.glob("*.json")
    if args.only:  # results of other steps stay in the table
        figures = [folder / f"{slug(step.name)}.json" for step in chosen]
    earlier = read_json(folder / "report.json") if args.only else None
    for stale in [*figures, *WORK.glob("*.xml"), *([] if earlier else [folder / "report.log"])]:
        stale.unlink(missing_ok=True)
    print(f"{machine['gpu']}, torch {machine['torch']}, {tools['nvcc']}; results in {folder}")
    before = [
        step
        for step in (earlier or {}).get("steps", ())
        if earlier["machine"] == machine and step["name"] not in {s.name for s in [build, *chosen]}
    ]
    keep = functools.partial(write, folder, machine, args.budget, start, before, archive=archive)
    left = args.budget - (time.monotonic() - start)
    say = functools.partial(print, flush=True)
    steps = execute([build, *chosen], left, folder / "report.log", say, keep)
    table, written = keep(steps)
    print(f"\n{table}")
    return 1 if not written or any(step["result"] == "failed" for step in steps) else 0


def output_files():
    """onepass's own module, which needs no build."""
    path = ROOT / "python" / "onepass" / "_output_file.py"
    spec = importlib.util.spec_from_file_location("output_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(
    folder: Path,
    machine: dict,
    budget: float,
    start: float,
    before: list[dict],
    steps: list[dict],
    archive: Path,
) -> tuple[str, bool]:
    """Writes report.json and table.md, from these records and from the files of their steps, and
    the archive of the folder.

    `before`: records of earlier runs on the same machine, with other steps. Returns the table, and
    whether all could be written; if not, stderr says why.
    """
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "budget": budget,
        "seconds": round(time.monotonic() - start, 1),
        "steps": [*before, *steps],
    }
    measured = [read_json(folder / f"bench-{name}.json") for name in BENCHMARKS]
    compared = [read_json(folder / f"compare-{dtype}.json") for dtype in ("float32", "bfloat16")]
    module, written = output_files(), True
    try:
        table = markdown(report, list(filter(None, measured)), list(filter(None, compared)))
    except Exception as error:  # of figures in an unknown form; the files stay as they are
        print(f"gpu-report: there is no table: {error!r}", file=sys.stderr)
        table, written = f"There is no table: {error!r}\n", False
    for name, text in zip(WRITTEN, (json.dumps(report, indent=1) + "\n", table), strict=True):
        file = module.OutputFile(folder / name, trial=False)
        written &= module.write_or_say("gpu-report", name, file, text.encode())
    try:
        pack(folder, archive)
    except OSError as error:
        print(f"gpu-report: the archive could not be written: {error}", file=sys.stderr)
        written = False
    return table, written


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its step too
    raise SystemExit(main())
