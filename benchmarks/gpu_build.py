"""The build of `make gpu-report`, and what is built beforehand and carried to a device.

A device that is lent for minutes compiles `onepass._C` alone, in seconds: `gpu_report.py prepare`
builds the two libraries, which need neither that machine's Python nor its torch, and the program of
the ceilings into CARRIED.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpu_machine import ROOT, slug
from gpu_step import Outcome, by_exit_code

WORK = ROOT / "build" / "gpu-report"
SITE = WORK / "site"  # where onepass is installed, for the steps alone
CARRIED = ROOT / "build" / "gpu-carried"
LIBRARIES = ("libonepass_cpu.so", "libonepass_cuda.so")
CEILINGS = "gpu_ceilings"  # the program
FACTS, SOURCES = "prebuilt.cmake", "sources.txt"


def digest() -> str:
    """Of the sources that the libraries are built from."""
    found = hashlib.sha256()
    files = [*(ROOT / "csrc").rglob("*"), *(ROOT / "cmake").rglob("*")]
    for file in sorted([*files, ROOT / "CMakeLists.txt", ROOT / "benchmarks" / f"{CEILINGS}.cu"]):
        if file.is_file():
            found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def carried(capability: int, folder: Path | None = None) -> str:
    """Why the carried libraries are of no use for a device; empty if they are."""
    folder = folder or CARRIED
    if not (folder / SOURCES).is_file():  # written last
        return "nothing was carried"
    arch, _, of = (folder / SOURCES).read_text().partition(" ")
    if arch != str(capability):
        return f"what was carried is for sm_{arch}"
    return "" if of.strip() == digest() else "what was carried is of other sources"


def build_command(facts: Mapping, python: str) -> list[str]:
    """Installs into SITE; the build folder is one per Python, torch and architecture.

    Without carried libraries they are compiled, of the CPU's levels only the least: the others
    would take about half of the time.
    """
    tag = f"py{sys.version_info.major}{sys.version_info.minor}-torch-{slug(facts['torch'])}"
    capability = facts["capability"]
    if carried(capability):
        settings = _compiled(capability, levels="baseline")
        return _install(python, SITE, WORK / f"{tag}-sm{capability}", settings)
    return _install(python, SITE, WORK / f"{tag}-carried", {"ONEPASS_PREBUILT": CARRIED})


def _compiled(capability: int, levels: str) -> dict[str, str]:
    """CMake's variables of libraries for one architecture; `levels`: empty for all of the CPU."""
    return {
        "ONEPASS_CPU_LEVELS": levels,
        "ONEPASS_CUDA": "ON",
        "ONEPASS_CUDA_ARCHS": f"{capability}-real",
    }


def _install(python: str, site: Path, build: Path, variables: Mapping[str, object]) -> list[str]:
    words = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    words += ["--disable-pip-version-check", "--target", str(site), "--upgrade"]
    words.append(f"--config-settings=build-dir={build}")
    words += [f"--config-settings=cmake.define.{name}={of}" for name, of in variables.items()]
    return [*words, str(ROOT)]


def judge_build(code: int | None, python: str, environment: Mapping[str, str]) -> Outcome:
    """Fails if another onepass in this Python, an editable one, comes before the one just built."""
    if code != 0:
        return by_exit_code(code)
    find = "import importlib.util as u; print(u.find_spec('onepass').origin)"
    result = subprocess.run([python, "-c", find], capture_output=True, text=True, env=environment)
    found = Path(result.stdout.strip() or ".")
    if found.is_relative_to(SITE):
        return Outcome("ok")
    return Outcome("failed", f"another onepass comes first in this Python: {found.parent}")


def ceilings_command(nvcc: str, arch: int | str, program: Path) -> list[str]:
    words = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-arch=sm_{arch}"]
    words += [f"-I{ROOT / 'csrc'}", str(ROOT / "benchmarks" / f"{CEILINGS}.cu")]
    return [*words, "-o", str(program)]


def prepare(capability: int, nvcc: str, python: str = sys.executable) -> int:
    """Builds what is carried, on a machine without a device; returns an exit code."""
    site, build = WORK / "prepared", WORK / f"prepare-sm{capability}"
    words = _install(python, site, build, _compiled(capability, levels=""))
    environment = os.environ | {"CUDACXX": nvcc}
    CARRIED.mkdir(parents=True, exist_ok=True)
    (CARRIED / SOURCES).unlink(missing_ok=True)
    program = ceilings_command(nvcc, capability, CARRIED / CEILINGS)
    for command in (words, program):
        if code := subprocess.run(command, env=environment).returncode:
            return code
    shutil.copy(build / FACTS, CARRIED)
    for name in LIBRARIES:
        shutil.copy(site / "onepass" / "_lib" / name, CARRIED)
    (CARRIED / SOURCES).write_text(f"{capability} {digest()}\n")
    size = sum(file.stat().st_size for file in CARRIED.iterdir())
    print(f"{CARRIED.relative_to(ROOT)}: {size / 2**20:.0f} MiB for sm_{capability}")
    return 0
