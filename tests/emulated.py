"""Builds and runs the programs of tests/cuda_emulator: the shipping .cu files without a GPU."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "cuda_emulator"
BUILD = ROOT / "build" / "cuda_emulator"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fno-omit-frame-pointer"]
FLAGS += ["-ffp-contract=off", "-DONEPASS_EMULATE", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]

# What each build adds, for the kernels and for the scheduler. The address sanitizer goes with the
# undefined-behaviour one; the thread sanitizer must not see the scheduler.
SANITIZED = {
    "plain": ([], []),
    "address": (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DEMULATOR_ADDRESS"],
        ["-fsanitize=address", "-DEMULATOR_ADDRESS"],
    ),
    "thread": (["-fsanitize=thread", "-DEMULATOR_THREAD"], ["-DEMULATOR_THREAD"]),
}
BUILDS = tuple(SANITIZED)


@functools.cache
def program(name: str, build: str, *kernels: str) -> Path:
    """The executable of tests/cuda_emulator/<name>.cpp with csrc/cuda/<kernels>.

    Compiled once for as long as no source changes, also across processes of a parallel test run.
    """
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    for_kernels, for_scheduler = SANITIZED[build]
    sources = [(FOLDER / "emulator.cpp", for_scheduler), (FOLDER / f"{name}.cpp", for_kernels)]
    sources += [(ROOT / "csrc" / "cuda" / kernel, for_kernels) for kernel in kernels]
    digest = hashlib.sha256(repr((COMPILER, FLAGS, SANITIZED[build])).encode())
    for pattern in ("csrc/*/*.h", "csrc/cuda/**/*.cu*", "tests/cuda_emulator/*"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    target = BUILD / f"{name}-{build}-{digest.hexdigest()[:16]}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"{name}-{build}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target, sources, for_kernels)
    return target


def _compile(target: Path, sources: list[tuple[Path, list[str]]], flags: list[str]) -> None:
    for stale in BUILD.glob(target.name.rpartition("-")[0] + "-*"):
        stale.unlink()
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source, _ in sources]
        for (source, source_flags), compiled in zip(sources, objects, strict=True):
            _run([COMPILER, *FLAGS, *source_flags, "-x", "c++", "-c", source, "-o", compiled])
        linked = Path(folder) / "program"
        _run([COMPILER, *flags, *objects, "-o", linked])
        linked.replace(target)


def run(executable: Path, *arguments, seed: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program with a seed for the order of blocks and threads."""
    environment = os.environ | {
        "EMULATOR_SEED": str(seed),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:atexit_sleep_ms=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    command = [str(executable), *map(str, arguments)]
    if executable.name.split("-")[1] == "thread" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # its shadow memory has a fixed place
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    # Said at the first switch between fibers, of which the emulator does tell it.
    hint = r"==\d+==WARNING: ASan doesn't fully support makecontext.*\n"
    result.stderr = re.sub(hint, "", result.stderr)
    return result


def _run(command: list) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{result.stderr[-4000:]}")
