"""The calls of `make gpu-report` and their steps, in the order of what is learnt per second."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_build
from gpu_machine import ROOT, slug
from gpu_step import Outcome, Step, by_exit_code, read_json

sys.path.insert(0, str(ROOT))
from tests.device.families import FAMILIES
from tests.support import resumed

AT_ONCE = 12  # of the steps that measure nothing
CASE = 60  # seconds of one test or call, after which its process ends
# The families that a step measures, and the seconds that it may take: enough for the first part of
# attention's standard shapes; `onepass bench attention --device cuda` by itself measures all.
BENCHMARKS = {"attention": (("attention",), 60), "norm": (("norm",), 25)}
BENCHMARKS |= {"optimizer": (("optimizer",), 20), "loss": (("loss",), 20)}
BENCHMARKS |= {"decode": (("decode",), 25)}
OTHER_BENCHMARKS = {"gate": (("dropout", "gate", "group_norm"), 90), "rotary": (("rotary",), 60)}
OTHER_BENCHMARKS |= {"all of attention": (("attention",), 150)}
# Of gpu_kernels.py and gpu_sweep.py, and the seconds that each may take.
KERNELS = {"ceilings": 40, "split": 90, "profile": 150, "sweep": 200}
NO_COUNTERS = 3  # its exit code if it may not read the device's counters
SANITIZERS = ("memcheck", "racecheck", "synccheck")
EVERYWHERE = re.compile(
    r"^@everywhere$|^pytestmark = .*\beverywhere\b|def test_\w+\(executor\b|params=CUDA\b",
    re.MULTILINE,
)
SMALL = "small_for_sanitizers"
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Call:
    """Steps that fit one command on a lent device.

    Attributes:
        budget: seconds for the steps; ending the last one takes up to 16 more.
        at_once: how many steps run together.
    """

    budget: float
    at_once: int
    steps: list[Step]


@dataclass(frozen=True)
class Where:
    """What steps need to know of the machine.

    Attributes:
        facts, tools: of `gpu_machine.find_all`.
        folder: of the results.
        logs: of the steps' output and of the single tests' results.
        environment: of all steps.
        device: "cuda", or "cpu" in a rehearsal.
    """

    facts: Mapping
    tools: Mapping[str, str]
    folder: Path
    logs: Path
    environment: Mapping[str, str]
    python: str = sys.executable
    device: str = "cuda"


def plan(where: Where) -> dict[str, Call]:
    build = Step(
        "build",
        60,
        300,
        lambda seconds: gpu_build.build_command(where.facts, where.python),
        lambda code, log: gpu_build.judge_build(code, where.python, where.environment),
        {"CUDACXX": where.tools["nvcc"]},
    )
    memcheck, racecheck, synccheck = ([sanitizer(where, t, f) for f in small()] for t in SANITIZERS)
    onepass = [where.python, "-m", "onepass"]
    doctor = Step("doctor", 20, 90, lambda seconds: [*onepass, "doctor"], judge_doctor)
    check = [*(smoke(where, family) for family in FAMILIES), doctor]
    check += [tests(where, file) for file in device_files()]
    measure = [kernels(where, "ceilings"), *(bench(where, *of) for of in BENCHMARKS.items())]
    more = [
        kernels(where, "split"),
        kernels(where, "profile"),
        *(bench(where, *of) for of in OTHER_BENCHMARKS.items()),
    ]
    more += [compare(where, dtype) for dtype in ("float32", "bfloat16")]
    more += [kernels(where, "sweep"), slow_tests(where), *synccheck]
    return {
        "check": Call(310, AT_ONCE, [build, *check, *memcheck, *racecheck]),
        "measure": Call(185, 1, [build, *measure, kernels(where, "profile", most=8)]),
        "more": Call(570, 1, [build, *more]),
    }


# ---- tests ---------------------------------------------------------------------------------------


def device_files() -> list[str]:
    """Files with tests that a device runs: those of tensors there first, then the longest."""
    found = [p for p in ROOT.glob("tests/*/test_*.py") if EVERYWHERE.search(p.read_text())]
    found += [p for p in ROOT.glob("tests/device/test_*.py") if "needs_device" in p.read_text()]
    found = {path for path in found if path.stem != "test_smoke"}  # smoke has steps of its own
    key = lambda path: (path.parent.name != "device", -path.stat().st_size)  # noqa: E731
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=key)]


def small() -> list[str]:
    """Device files with small tests for the sanitizers."""
    return [file for file in device_files() if f"def test_{SMALL}(" in (ROOT / file).read_text()]


def resumed_step(where: Where, name: str, limit: float, words: Sequence[str]) -> Step:
    """A step whose cases go on after one that ends the process."""
    results = where.logs / f"{slug(name)}.jsonl"
    program = [where.python, "-m", "tests.support.resumed", "--results", str(results)]
    command = [*program, "--each", str(CASE), *words]
    judge = functools.partial(judge_cases, results=results)
    return Step(name, 15, limit, lambda seconds: command, judge)


def smoke(where: Where, family: str) -> Step:
    return resumed_step(where, f"smoke {family}", 120, ["tests.device.smoke", family])


def tests(where: Where, file: str) -> Step:
    name = file.removeprefix("tests/").removesuffix(".py").replace("/test_", " ")
    words = [*PYTEST, "-m", "device and not slow", file]
    return resumed_step(where, f"tests {name}", 200, words)


def slow_tests(where: Where) -> Step:
    words = [*PYTEST, "-m", "device and slow", *device_files()]
    return resumed_step(where, "slow tests", 200, words)


def sanitizer(where: Where, tool: str, file: str) -> Step:
    program = where.tools["compute-sanitizer"]
    words = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=onepass"]
    if tool == "memcheck":
        words += ["--report-api-errors", "no"]  # torch probes the device with calls that may fail
    words += [where.python, "-m", *PYTEST, file, "-k", SMALL]
    return Step(
        f"{tool} {Path(file).stem.removeprefix('test_')}",
        30,
        120,
        lambda seconds: words,
        judge_sanitizer,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor in an allocation of its own
        skip="" if program else "compute-sanitizer is not on this machine",
    )


# ---- figures -------------------------------------------------------------------------------------


def kernels(where: Where, name: str, most: int | None = None) -> Step:
    """`most`: the calls of a profile that the time suffices for."""
    file = where.folder / f"{name}.json"
    program = ["gpu_sweep.py"] if name == "sweep" else ["gpu_kernels.py", name]
    words = [where.python, str(ROOT / "benchmarks" / program[0]), *program[1:], "--json", file]
    words += ["--nvcc", where.tools["nvcc"], "--arch", str(where.facts["capability"])]
    if name == "profile":  # those first that the figures of this folder say to look at
        words += ["--ncu", where.tools["ncu"], "--figures", str(where.folder)]
        words += ["--most", str(most)] if most else []
    if name == "ceilings" and not gpu_build.carried(where.facts["capability"]):
        words += ["--program", str(gpu_build.CARRIED / gpu_build.CEILINGS)]
    if name in ("split", "profile") and where.device == "cpu":
        words += ["--device", "cpu", "--scale", "64"]
    judge = functools.partial(judge_kernels, file=file)
    no_ncu = "ncu (Nsight Compute) is not on this machine"
    skip = no_ncu if name == "profile" and not where.tools["ncu"] else ""
    return Step(name, 15, KERNELS[name], lambda seconds: words, judge, skip=skip)


def bench(where: Where, name: str, of: tuple[Sequence[str], float]) -> Step:
    families, limit = of
    file = f"bench-{name.replace(' ', '-')}.json"

    def command(seconds: float) -> list[str]:
        # Its imports, and the case that runs when the limit is reached, take time as well.
        within = f"{max(seconds - 12, seconds / 3):.0f}"
        words = [where.python, "-m", "onepass", "bench", *families, "--device", where.device]
        words += ["--seconds", "0.2", "--stream", "--limit", within, "--json", file]
        return [*words, "--quick"] if where.device == "cpu" else words

    judge = functools.partial(judge_bench, file=where.folder / file)
    return Step(f"bench {name}", 15, limit, command, judge, folder=where.folder)


def compare(where: Where, dtype: str) -> Step:
    file = f"compare-{dtype}.json"
    words = [where.python, "-m", "onepass", "compare", "--device", where.device]
    words += ["--dtype", dtype, "--json", file, "--layers", "12", "--heads", "12"]
    words += ["--width", "768", "--batch", "8", "--dropout", "0.1", "--steps", "60"]
    judge = functools.partial(judge_compare, file=where.folder / file)
    return Step(f"compare {dtype}", 45, 120, lambda seconds: words, judge, folder=where.folder)


# ---- verdicts ------------------------------------------------------------------------------------


def judge_doctor(code: int | None, log: str) -> Outcome:
    found = by_exit_code(code)
    return found if code is None else Outcome(found.result, (log.splitlines() or [""])[-1].strip())


def judge_cases(code: int | None, log: str, results: Path) -> Outcome:
    """From the results of the cases; a step whose cases were all skipped failed."""
    found, running = resumed.results(results)
    if not found and code is not None:
        return Outcome("failed", f"exit code {code}, and no results")
    count = lambda outcome: sum(case.outcome == outcome for case in found.values())  # noqa: E731
    passed, bad = count("passed"), count("failed")
    detail = f"{passed} passed, {bad} failed, {count('skipped')} skipped"
    if first := next((case for case in found.values() if case.outcome == "failed"), None):
        detail += f"; first {first.case.rpartition('::')[2]}: {first.why}"
    if code is None:
        detail += f"; stopped in {running.rpartition('::')[2]}" if running else ""
        return Outcome("failed" if bad else "ok", detail)
    if code and not bad:
        detail += f"; exit code {code}"
    return Outcome("ok" if code == 0 and passed and not bad else "failed", detail)


def judge_bench(code: int | None, log: str, file: Path) -> Outcome:
    bench = read_json(file)
    if bench is None:
        detail = f"exit code {code}, and no figures"
        return by_exit_code(code) if code is None else Outcome("failed", detail)
    wrong = [row["name"] for row in bench["rows"] if not row["right"]]
    counts = {"failed": len(bench["failed"]), "wrong": len(wrong)}
    counts |= {"left out": len(bench["left_out"])}
    detail = f"{len(bench['rows'])} cases"
    detail += "".join(f", {count} {word}" for word, count in counts.items() if count)
    first = next(iter([*bench["failed"], *wrong]), "")
    return Outcome(
        "ok" if not code and not first else "failed", detail + (f"; first {first}" if first else "")
    )


def judge_kernels(code: int | None, log: str, file: Path) -> Outcome:
    if code == NO_COUNTERS:
        return Outcome("skipped", "only administrators may read this device's counters")
    if code is None:
        return by_exit_code(code)
    found = read_json(file)
    if code or not found:
        return Outcome("failed", f"exit code {code}")
    return Outcome("ok", f"{len(found)} rows")


def judge_compare(code: int | None, log: str, file: Path) -> Outcome:
    if code is None:
        return by_exit_code(code)
    compared = read_json(file)
    if code or compared is None:
        return Outcome("failed", f"exit code {code}")
    verdict = compared["verdict"]
    return Outcome("ok" if verdict["same"] else "failed", verdict["sentence"])


def judge_sanitizer(code: int | None, log: str) -> Outcome:
    if "Device not supported" in log:
        return Outcome("skipped", "compute-sanitizer says: Device not supported")
    if code is None:
        return by_exit_code(code)
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", log)
    detail = summary[-1].strip() if summary else f"exit code {code}"
    return Outcome("ok" if code == 0 and re.search(r"\d passed", log) else "failed", detail)
