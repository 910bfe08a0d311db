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

    Each source is compiled once for as long as neither it nor a header that it includes changes,
    also across processes of a parallel test run.
    """
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    for_kernels, for_scheduler = SANITIZED[build]
    sources = [(FOLDER / "emulator.cpp", for_scheduler), (FOLDER / f"{name}.cpp", for_kernels)]
    sources += [(ROOT / "csrc" / "cuda" / kernel, for_kernels) for kernel in kernels]
    objects = [_compiled(source, build, flags) for source, flags in sources]
    digest = hashlib.sha256(repr([file.name for file in objects]).encode())
    linked = BUILD / f"{name}{len(kernels)}-{build}-{digest.hexdigest()[:16]}"
    return _made(linked, [COMPILER, *for_kernels, *objects])


def _compiled(source: Path, build: str, flags: list[str]) -> Path:
    digest = hashlib.sha256(repr((COMPILER, FLAGS, flags)).encode())
    for file in sorted(_included(source)):
        digest.update(file.read_bytes())
    name = "_".join(source.relative_to(ROOT).with_suffix("").parts)
    target = BUILD / f"{name}-{build}-{digest.hexdigest()[:16]}.o"
    return _made(target, [COMPILER, *FLAGS, *flags, "-x", "c++", "-c", source])


def _included(source: Path) -> set[Path]:
    """The source and the headers of this project that it includes, and those that they do."""
    found, left = set(), [source]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            for name in re.findall(r'^ *# *include ["<]([^">]+)', file.read_text(), re.MULTILINE):
                paths = (folder / name for folder in (file.parent, ROOT / "csrc", ROOT / "tests"))
                left += [path for path in paths if path.exists()][:1]
    return found


def _made(target: Path, command: list) -> Path:
    """What the command writes to `target`, in place of what it wrote from other sources."""
    BUILD.mkdir(parents=True, exist_ok=True)
    family = target.name.rpartition("-")[0]
    with open(BUILD / f"{family}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for stale in BUILD.glob(f"{family}-*"):
                stale.unlink()
            with tempfile.TemporaryDirectory(dir=BUILD) as folder:
                made = Path(folder) / "made"
                _run([*command, "-o", made])
                made.replace(target)
    return target


def run(
    executable: Path, *arguments, seed: int = 0, resident: int = 1, shared: int = 227 * 1024
) -> subprocess.CompletedProcess[str]:
    """Runs a program with a seed for the order of blocks and threads.

    At least `resident` blocks run at the same time, with at most `shared` bytes of memory each.
    """
    environment = os.environ | {
        "EMULATOR_SEED": str(seed),
        "EMULATOR_RESIDENT": str(resident),
        "EMULATOR_SHARED": str(shared),
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
