"""`make test-cpus`: the tests that another CPU could fail, on each CPU that this one can imitate.

    python -m tests.support.cpus [--only NAME]... [arguments of pytest]

A name of `MACHINES` sets what the machine looks like: to onepass (its kernels' level, the vendor),
to torch's own kernels and to oneDNN. MKL chooses by the real CPU, except for the baseline. Run are
the tests marked `machine`, of the files that name a fact of the machine (`FACTS`), and those marked
`isa`, unless the vendor alone differs, of which no kernel knows.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
# Words of tests whose expectation may depend on what torch, MKL or oneDNN do on this CPU.
FACTS = re.compile(
    r"\b(facts|as_fast|allocations|peaks|peak_bytes|saved_bytes|page_faults|mkldnn|doctor|explain|"
    r"estimate|verify)\b"
)
OTHER_CPU = Path(__file__).parent / "other_cpu"  # holds the sitecustomize.py that fakes the vendor


class Machine(NamedTuple):
    """A CPU to imitate."""

    level: str  # of onepass's kernels; empty: this CPU's
    variables: dict[str, str] = {}
    vendor: str = ""

    @property
    def marks(self) -> str:
        vendor_alone = self.vendor and not self.variables
        return f"{'machine' if vendor_alone else '(isa or machine)'} and not slow"


MACHINES = {
    "this": Machine(""),
    "3-threads": Machine("", {"ONEPASS_TEST_THREADS": "3"}),
    "no-bfloat16-dots": Machine("avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
    "avx2": Machine("avx2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "baseline": Machine(
        "baseline",
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    ),
    "amd": Machine("", vendor="AuthenticAMD"),
    "intel": Machine("", vendor="GenuineIntel"),
    "intel-no-bfloat16-dots": Machine(
        "avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "GenuineIntel"
    ),
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the tests of files that name a fact of the machine."""
    found: dict[Path, bool] = {}
    for item in items:
        if item.path not in found:
            found[item.path] = bool(FACTS.search(item.path.read_text(encoding="utf-8")))
        if found[item.path]:
            item.add_marker("machine")


def environment(name: str) -> dict[str, str]:
    """Of the tests' process; torch's cache does not tell an imitated machine from the real one."""
    from onepass import _C

    machine = MACHINES[name]
    variables = {"ONEPASS_CPU_ISA": machine.level or _C.cpu_level(), **machine.variables}
    cache = Path(tempfile.gettempdir()) / f"onepass-cpus-{os.getuid()}" / name
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    if machine.vendor:
        paths = [str(OTHER_CPU), os.environ.get("PYTHONPATH", "")]
        variables["ONEPASS_TEST_VENDOR"] = machine.vendor
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**os.environ, **variables}


def main() -> int:
    from onepass import _C
    from onepass._policy import products

    parser = argparse.ArgumentParser(prog="make test-cpus", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=MACHINES)
    options, rest = parser.parse_known_args()
    print(f"this CPU: level {_C.cpu_level()}, {products.facts()}")
    results: dict[str, str] = {}
    failed = False
    for name in options.only or MACHINES:
        machine = MACHINES[name]
        if machine.level and machine.level not in _C.cpu_levels():
            results[name] = f"not run: this CPU has no level {machine.level}"
            continue
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-m", machine.marks]
        run = subprocess.run([*command, *(rest or ["tests"])], cwd=ROOT, env=environment(name))
        failed |= run.returncode != 0
        verdict = "passed" if run.returncode == 0 else f"FAILED (exit code {run.returncode})"
        results[name] = f"{verdict}, {time.perf_counter() - start:.0f} s"
    print()
    for name, result in results.items():
        print(f"{name:24}{result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
