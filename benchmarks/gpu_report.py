"""`make gpu-report`: tests and measures onepass on a machine with a CUDA device, in two calls.

    gpu_report.py prepare [--arch 90]   on a machine without a device: what a call need not build
    gpu_report.py check                 every instance of a kernel, every device test, sanitizers
    gpu_report.py measure               ceilings, and the families against torch's fastest
    gpu_report.py more                  the rest: a whole model, other tiles, slow tests

Without a name, check and measure. Builds onepass for the device that torch sees, for the Python
that runs this and without changing it; needs neither make nor a network. Prints each figure as soon
as it is known. Writes a JSON file for each step, report.json, table.md and logs/ to
benchmarks/results/<device>/, and all of them to gpu-report.tar.gz beside it, after each step. If a
step fails, the others still run.

Exit codes: 0, 1 if a step failed, 2 if there is nothing to run on: no torch with CUDA, no device,
no nvcc, a missing package.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import gpu_build
from gpu_archive import NAME, pack
from gpu_machine import ROOT, Obstacle, find_all, find_tool, slug
from gpu_step import Runner, read_json
from gpu_table import markdown

WRITTEN = ("report.json", "table.md")
LOGS = "logs"
USUAL = ("check", "measure")


def environment_of_steps(rehearses: bool = False) -> dict[str, str]:
    """The caller's, with the new build first on the path. pytest loads no plugins: the tests need
    none, and one may change their order or seeds. Swapped models run onepass's attention, which the
    report is to measure."""
    paths = [str(gpu_build.SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["ONEPASS_CUDA_ATTENTION"] = "always"
    environment.pop("ONEPASS_TEST_DEVICE", None)
    return environment | ({"ONEPASS_TEST_DEVICE": "cpu"} if rehearses else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_report.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "calls", nargs="*", default=USUAL, metavar="CALL", help="prepare, check, measure, more"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of each call")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="FOLDER",
        help="the results go into a folder in it, named after the device",
    )
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="FOLDER",
        help="where gpu-report.tar.gz goes, if not to the folder of --out",
    )
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="of the steps after the build")
    parser.add_argument("--arch", type=int, default=90, help="of prepare: 90 for sm_90")
    parser.add_argument(
        "--rehearse", action="store_true",
        help="on the CPU, with stand-ins for the device and its tools",
    )  # fmt: skip
    args = parser.parse_args(argv)
    start = time.monotonic()
    if args.calls == ["prepare"]:
        return prepare(args.arch)
    try:
        machine, tools, python = (
            stand_ins() if args.rehearse else (*find_all(os.environ), sys.executable)
        )
    except Obstacle as obstacle:
        print(f"gpu-report: {obstacle}", file=sys.stderr)
        return 2
    import gpu_plan  # needs pytest

    folder = args.out.resolve() / slug(machine["gpu"])
    where = gpu_plan.Where(
        machine, tools, folder, folder / LOGS, environment_of_steps(args.rehearse), python,
        device="cpu" if args.rehearse else "cuda",
    )  # fmt: skip
    calls = gpu_plan.plan(where)
    if wrong := [name for name in args.calls if name not in calls]:
        names = ", ".join(["prepare", *calls])
        print(
            f"gpu-report: no call is named {', '.join(wrong)}; calls are: {names}", file=sys.stderr
        )
        return 2
    chosen = {name: calls[name] for name in args.calls}
    if args.only:
        names = [step.name for call in chosen.values() for step in call.steps]
        if unknown := [of for of in args.only if not any(fnmatchcase(n, of) for n in names)]:
            text = f"gpu-report: --only: no step is named {', '.join(unknown)}; steps are: "
            print(text + ", ".join(map(repr, dict.fromkeys(names))), file=sys.stderr)
            return 2
        chosen = {name: _those(call, args.only) for name, call in chosen.items()}
    archive = (args.archive or args.out).resolve()
    try:
        for name in [folder / name for name in WRITTEN] + [archive / f"{NAME}.new"]:
            name.parent.mkdir(parents=True, exist_ok=True)
            output_files().OutputFile(name)
        where.logs.mkdir(exist_ok=True)
    except OSError as error:
        at = error.filename or folder
        print(f"gpu-report: --out must be writable: {error.strerror}: {at}", file=sys.stderr)
        return 2
    shutil.rmtree(gpu_build.SITE, ignore_errors=True)
    of_steps = {slug(step.name) for call in chosen.values() for step in call.steps}
    for file in [*folder.glob("*.json"), *where.logs.iterdir()]:  # of an earlier run
        if file.stem in of_steps:
            file.unlink()
    print(f"{machine['gpu']}, torch {machine['torch']}, {tools['nvcc']}; results in {folder}")
    if because := gpu_build.carried(machine["capability"]):
        print(f"all libraries are built here: {because}")
    earlier = _earlier(folder, machine, of_steps)
    keep = functools.partial(write, folder, machine, start, earlier, archive=archive)
    runner = Runner(where.logs, where.environment, functools.partial(print, flush=True), keep)
    for call in chosen.values():
        runner.execute(call.steps, args.budget or call.budget, call.at_once)
    table, written = keep(runner.records)
    print(f"\n{table}")
    bad = any(step["result"] == "failed" for step in runner.records)
    return 1 if bad or not written else 0


def _those(call, only: Sequence[str]):
    build, *others = call.steps
    return replace(
        call, steps=[build, *(s for s in others if any(fnmatchcase(s.name, o) for o in only))]
    )


def _earlier(folder: Path, machine: Mapping, of_steps: set[str]) -> list[dict]:
    """What runs before this one found on the same machine, in steps that do not run now."""
    try:
        report = read_json(folder / "report.json") or {}
        same = all(
            report["machine"][name] == of for name, of in machine.items() if name != "commit"
        )
        return [step for step in report["steps"] if same and slug(step["name"]) not in of_steps]
    except KeyError:
        return []


def prepare(arch: int) -> int:
    nvcc = find_tool("nvcc", os.environ)
    if not nvcc:
        print("gpu-report: there is no nvcc on PATH or in CUDA_HOME", file=sys.stderr)
        return 2
    return gpu_build.prepare(arch, nvcc)


def stand_ins() -> tuple[dict, dict[str, str], str]:
    import gpu_rehearsal

    return gpu_rehearsal.machine(), gpu_rehearsal.tools(), gpu_rehearsal.python()


def output_files():
    """onepass's own module, which needs no build."""
    path = ROOT / "python" / "onepass" / "tools" / "output_file.py"
    spec = importlib.util.spec_from_file_location("output_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(
    folder: Path,
    machine: Mapping,
    start: float,
    earlier: list[dict],
    steps: list[dict],
    archive: Path,
) -> tuple[str, bool]:
    """Writes report.json and table.md, from these records and from the files of their steps, and
    the archive of the folder.

    `earlier`: records of earlier runs on the same machine, with other steps. Returns the table, and
    whether all could be written; if not, stderr says why.
    """
    commit = {"commit": machine["commit"]}
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": dict(machine),
        "seconds": round(time.monotonic() - start, 1),
        "steps": [*earlier, *(step | commit for step in steps)],
    }
    measured = [read_json(file) for file in sorted(folder.glob("bench-*.json"))]
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its steps too
    raise SystemExit(main())
