"""Plants each fault of `FAULTS` and runs the tests that should notice it.

    python -m tests.mutations [--only WORDS] [--folder FOLDER]

Works on a copy of the last commit. Faults of csrc are expressions, and all of them are compiled at
once, each behind a switch that the environment sets: one build serves all. Faults of Python are
written into the copy one at a time. Exits with 1 if a fault goes unnoticed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.mutations.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
FIRST_LINES = 3  # of the failing test's name and error, that are shown


def planted(text: str, fault: Fault, number: int) -> str:
    """The text of a file with a fault.

    Raises:
        ValueError: the place is not there, or there are several.
    """
    if text.count(fault.before) != 1:
        count = text.count(fault.before)
        raise ValueError(f"{fault.file}: {fault.before!r} must occur once, got {count} times")
    after = fault.after
    if fault.is_compiled:
        after = f"(is_planted({number}) ? ({fault.after}) : ({fault.before}))"
    return text.replace(fault.before, after)


def prepare(folder: Path) -> None:
    """A copy of the last commit, with all faults of csrc compiled in."""
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for number, fault in enumerate(FAULTS):
        file = folder / fault.file
        text = planted(file.read_text(), fault, number)
        if fault.is_compiled:
            file.write_text(text)
    flags = f"-include {folder / 'tests/mutations/planted.h'}"
    subprocess.run(["make", "build"], cwd=folder, check=True, env=os.environ | {"CXXFLAGS": flags})
    subprocess.run(["make", ".venv/test.stamp"], cwd=folder, check=True)


def is_noticed(folder: Path, number: int, fault: Fault) -> bool:
    """Runs the fault's tests until one fails."""
    file = folder / fault.file
    text = file.read_text()
    if not fault.is_compiled:
        file.write_text(planted(text, fault, number))
    tests = [folder / ".venv/bin/python", "-m", "pytest", "-x", "-q", "-m", "not slow"]
    try:
        run = subprocess.run(
            [*tests, "-p", "no:cacheprovider", *fault.tests.split()],
            cwd=folder,
            env=os.environ | {"ONEPASS_PLANTED": str(number)},
            capture_output=True,
            text=True,
        )
    finally:
        if not fault.is_compiled:
            file.write_text(text)
    told = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("   ", *[line[:160] for line in told[:FIRST_LINES]], sep="\n    ")
    # 4 and 5: no such test. A process that crashed noticed it too.
    if run.returncode in (4, 5):
        raise RuntimeError(f"{fault.tests} must hold tests, got {run.stdout[-2000:]}")
    return run.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--only", default="", help="words of a fault's file or tests")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutations")
    parser.add_argument("--built", action="store_true", help="the folder is prepared already")
    options = parser.parse_args()
    if not options.built:
        prepare(options.folder)
    missed = []
    for number, fault in enumerate(FAULTS):
        if options.only not in f"{fault.file} {fault.tests}":
            continue
        begin = time.time()
        print(f"{number}: {fault.file}: {fault.before!r} -> {fault.after!r}", flush=True)
        noticed = is_noticed(options.folder, number, fault)
        print(
            f"    {'noticed' if noticed else 'MISSED'} in {time.time() - begin:.0f} s", flush=True
        )
        if not noticed:
            missed.append(number)
    print(f"missed: {missed or 'none'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
