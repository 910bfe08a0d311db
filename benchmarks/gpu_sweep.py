"""Other tiles of attention than those of csrc/cuda/attention/table.h, timed on this device.

For each case and candidate it compiles gpu_sweep.cu with an edited copy of the table, for one head
dimension, several at a time and without torch; then runs the programs one by one, prints each
figure as soon as it is known, with the device's clock and power, and at the end the best of each
case and the line of the table that would have to be changed. A candidate whose results differ from
the first one's, which is the table's own, by more than rounding is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_load
from gpu_machine import ROOT

SOURCES = ROOT / "csrc" / "cuda" / "attention"
TABLE = SOURCES / "table.h"
ROUNDING = 2**-6  # of the largest result: bfloat16 keeps 8 bits
TILE = "{{.queries = {}, .keys = {}, .warps = {}}}"
NO_DEVICE = 2
SECONDS = 20  # of a program, which takes one or two; a candidate may wait for ever


@dataclass(frozen=True)
class Case:
    """A line of the table, and what may stand in its place; the first candidate is there now."""

    name: str
    bucket: int
    line: str  # with {} for the candidate
    candidates: tuple[str, ...]

    @property
    def is_backward(self) -> bool:
        return self.name.startswith("backward")


def _tiles(*sizes: tuple[int, int, int]) -> tuple[str, ...]:
    return tuple(TILE.format(*size) for size in sizes)


CASES = (
    Case(
        "forward 64", 64, "if (bucket == 64 && !terms) return {};",
        _tiles((128, 96, 4), (128, 64, 4), (128, 128, 4), (64, 128, 4), (128, 128, 8)),
    ),
    Case(
        "forward 128", 128, "if (bucket <= 128) return {};",
        _tiles((128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8)),
    ),
    Case(
        "forward 256", 256, "  return {};\n}}\n\n// Q, K and V",
        _tiles((64, 64, 4), (64, 32, 4), (128, 32, 8), (128, 64, 8)),
    ),
    Case(
        "backward 128", 128, "has_wide_layout(int bucket, bool terms) {{ return {}; }}",
        ("bucket == 128 && !terms", "false"),
    ),
)  # fmt: skip


def edited(table: str, case: Case, candidate: str) -> str:
    """The table with the candidate, and with no instance but the one that is timed."""
    before, after = (case.line.format(of) for of in (case.candidates[0], candidate))
    kind = "kWhole" if case.bucket <= 128 else "kPart"
    bodies = {
        "void visit_bucket(const Attention&": f"f.template operator()<BFloat16, {case.bucket}>();",
        "constexpr bool has_instance(": f"return kind == ForwardKind::{kind} && !narrow;",
        "constexpr bool has_narrow_tile(": "return false;",
    }
    table = _replaced(table, before, after)
    for head, body in bodies.items():
        pattern = rf"^({re.escape(head)}[^{{]*)\{{.*?\}}\n(?=\n)"
        table, count = re.subn(
            pattern, lambda found, body=body: f"{found[1]}{{ {body} }}\n", table, flags=re.M | re.S
        )
        if count != 1:
            raise ValueError(f"gpu_sweep: {head!r} is in the table {count} times")
    return re.sub(r"^static_assert\((two_fit|is_narrow).*\n", "", table, flags=re.M)


def _replaced(text: str, before: str, after: str) -> str:
    if text.count(before) != 1:
        raise ValueError(f"gpu_sweep: {before!r} is in the table {text.count(before)} times")
    return text.replace(before, after)


def compile_command(nvcc: str, arch: str, case: Case, folder: Path, program: Path) -> list[str]:
    words = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "--fmad=false"]
    words += [f"-arch=sm_{arch}", f"-I{folder}", f"-I{ROOT / 'csrc'}", "-diag-suppress=177"]
    words += [f"-DONEPASS_SWEPT={case.bucket}", str(ROOT / "benchmarks" / "gpu_sweep.cu")]
    if case.is_backward:
        words += ["-DONEPASS_SWEPT_BACKWARD"]
        words += [str(SOURCES / "backward.cu"), str(SOURCES / "backward_ends.cu")]
    return [*words, "-o", str(program)]


def built(nvcc: str, arch: str, case: Case, number: int, work: Path) -> tuple[Path, str]:
    """(the program, what the compiler says if there is none)."""
    folder = work / f"{case.name.replace(' ', '-')}-{number}"
    (folder / "cuda" / "attention").mkdir(parents=True)
    table = edited(TABLE.read_text(), case, case.candidates[number])
    (folder / "cuda" / "attention" / "table.h").write_text(table)
    program = folder / "gpu_sweep"
    words = compile_command(nvcc, arch, case, folder, program)
    result = subprocess.run(words, capture_output=True, text=True)
    said = (result.stderr + result.stdout).strip().splitlines() or [f"exit {result.returncode}"]
    return program, "" if result.returncode == 0 else next(
        (line for line in said if "error" in line), said[0]
    )


def values(data: bytes) -> list[float]:
    """Of bfloat16."""
    words = struct.unpack(f"<{len(data) // 2}H", data)
    return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(
        word << 16 for word in words
    ))))  # fmt: skip


def same(ones: list[float], others: list[float]) -> bool:
    largest = max(map(abs, ones))
    return len(ones) == len(others) and all(
        abs(one - other) <= ROUNDING * largest for one, other in zip(ones, others, strict=True)
    )


def microseconds(output: str) -> dict[str, float]:
    """Of each figure that a program has printed, by the case that it names."""
    found = re.findall(r"^figure sweep, ([^,]+), .*?: ([\d.]+) us", output, re.MULTILINE)
    return {name: float(us) for name, us in found}


def run_case(case: Case, programs: Sequence[tuple[Path, str]], say: Callable, sensors: Any) -> dict:
    """The figures of a case's candidates, which run one after the other."""
    figures: dict[str, dict[str, float]] = {}
    loads: dict[str, dict[str, dict]] = {}
    wrong: dict[str, str] = {}
    first: list[float] | None = None
    for candidate, (program, error) in zip(case.candidates, programs, strict=True):
        if error:
            wrong[candidate] = error
            continue
        file = program.with_suffix(".values")
        printed: list[tuple[str, Any]] = []
        code, errors = gpu_load.run(
            [program, candidate, file], sensors, lambda *both, to=printed: to.append(both), SECONDS
        )
        if code == NO_DEVICE:
            raise SystemExit(errors.strip())
        if code is None:
            wrong[candidate] = f"did not end within {SECONDS} s"
            continue
        if code:
            wrong[candidate] = errors.strip() or f"exit code {code}"
            continue
        found = values(file.read_bytes())
        first = first or found
        if not same(first, found):
            wrong[candidate] = "other results than the first"
            continue
        figures[candidate] = microseconds("\n".join(line for line, _ in printed))
        of_figures = [asdict(load) for _, load in printed]
        loads[candidate] = dict(zip(figures[candidate], of_figures, strict=True))
        for line, load in printed:
            say(gpu_load.with_load(line, load))
    for candidate, reason in wrong.items():
        say(f"figure sweep, {case.name}, {candidate}: left out: {reason}")
    return {"case": case.name, "microseconds": figures, "load": loads, "left_out": wrong}


def best(row: dict) -> str:
    """The candidate whose times, with and without a diagonal, have the smallest sum."""
    return min(row["microseconds"], key=lambda of: sum(row["microseconds"][of].values()))


def summary(case: Case, row: dict) -> str:
    if not row["microseconds"]:
        return f"figure sweep, {case.name}: no candidate ran"
    found = best(row)
    if found == case.candidates[0]:
        return f"figure sweep, {case.name}: the table's own is best"
    line = case.line.format(found).strip().splitlines()[0]
    return f"figure sweep, {case.name}: best with, in csrc/cuda/attention/table.h: {line}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--nvcc", default="nvcc", metavar="PROGRAM")
    parser.add_argument("--arch", default="80", help="90 for sm_90")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    rows = []
    with (
        tempfile.TemporaryDirectory() as work,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        closing(gpu_load.sensors()) as sensors,
    ):
        compiling = {
            case: [
                pool.submit(built, args.nvcc, args.arch, case, number, Path(work))
                for number in range(len(case.candidates))
            ]
            for case in CASES
        }
        for case, futures in compiling.items():
            try:
                programs = [future.result() for future in futures]
                rows.append(run_case(case, programs, say, sensors))
            except SystemExit as end:
                pool.shutdown(cancel_futures=True)
                print(end, file=sys.stderr)
                return NO_DEVICE
            say(summary(case, rows[-1]))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["microseconds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
