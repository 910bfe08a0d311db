"""Builds and runs the programs of tests/cuda_emulator: the shipping .cu files without a GPU."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support import compiled

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "cuda_emulator"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-g1", "-O1", "-fno-omit-frame-pointer"]
FLAGS += ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
FLAGS += ["-DONEPASS_EMULATE", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]

# Checks for undefined behaviour in the address build: all of them would double the compile time.
# -O1 would double or quadruple it, which is more than the kernels of tests run.
UNDEFINED = "alignment,signed-integer-overflow,shift,integer-divide-by-zero"
BAD_ADDRESSES = ["-O0", f"-fsanitize=address,{UNDEFINED}", "-fno-sanitize-recover=all"]
# Kernels without a sanitizer run for minutes; this saves a fifth.
FAST = ["-O2"]
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    FAST.append("-march=x86-64-v3")  # std::fma is an instruction
# The flags of each build, for the kernels and for the scheduler. The thread sanitizer must not see
# the scheduler.
SANITIZED = {
    "plain": (FAST, FAST),
    "address": (
        [*BAD_ADDRESSES, "-DEMULATOR_ADDRESS"],
        ["-fsanitize=address", "-DEMULATOR_ADDRESS"],
    ),
    "thread": (["-fsanitize=thread", "-fno-tree-sra", "-DEMULATOR_THREAD"], ["-DEMULATOR_THREAD"]),
}
BUILDS = tuple(SANITIZED)
SANITIZERS = BUILDS[1:]  # calls that run once more under one run in the plain build too
# Compiled for the sanitizer, but linked without its library: the emulator defines the functions
# itself, and they count (accesses.h). A struct that is loaded at once must stay one load.
SANITIZED["accesses"] = (SANITIZED["thread"][0], ["-DEMULATOR_ACCESSES"])
# For the instances of attention, which take minutes under a sanitizer.
SLOW_UNDER_SANITIZERS = [
    build if build == "plain" else pytest.param(build, marks=pytest.mark.slow) for build in BUILDS
]


@functools.cache
def library() -> Path:
    """csrc/ops on the emulated CUDA back end: the operators `onepass_emulated::*`, on the CPU."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    for_torch = ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-DTORCH={torch.__version__}"]
    for_torch += ["-isystem", str(torch_folder / "include"), "-DONEPASS_NAMESPACE=onepass_emulated"]
    for_torch += ["-DONEPASS_DEFINES_SCHEMAS", "-DONEPASS_CUDA"]
    kernels = [file for file in (ROOT / "csrc" / "cuda").rglob("*.cu") if file.name != "facts.cu"]
    of_emulator = [FOLDER / f"{name}.cpp" for name in ("accesses", "emulator", "image", "settings")]
    sources = [(file, FAST) for file in (*of_emulator, *kernels)]
    operators = [*(ROOT / "csrc" / "ops").glob("*.cpp"), FOLDER / "runtime_emulated.cpp"]
    sources += [(file, for_torch) for file in operators]
    linking = ["-shared", f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    return _linked("library-plain", "plain", sources, linking)


@functools.cache
def program(name: str, build: str, *kernels: str) -> Path:
    """The executable of tests/cuda_emulator/<name>.cpp with csrc/cuda/<kernels>."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    for_kernels, for_scheduler = SANITIZED[build]
    sources = [(FOLDER / "emulator.cpp", for_scheduler), (FOLDER / f"{name}.cpp", for_kernels)]
    sources.append((FOLDER / "image.cpp", for_kernels))
    sources += [(FOLDER / f"{name}.cpp", for_scheduler) for name in ("accesses", "settings")]
    if name == "replay":
        kernels += ("kernels.cu",)
    sources += [(ROOT / "csrc" / "cuda" / kernel, for_kernels) for kernel in kernels]
    stems = [name, *("_".join(Path(kernel).with_suffix("").parts) for kernel in kernels)]
    linking = ["-no-pie"] if build == "accesses" else for_kernels
    return _linked(f"{'+'.join(stems)}-{build}", build, sources, linking)


def _linked(name: str, build: str, sources: list[tuple[Path, list[str]]], flags: list[str]) -> Path:
    objects = compiled.made([_object(source, build, flags) for source, flags in sources])
    (linked,) = compiled.made([compiled.Recipe(name, (COMPILER, *objects, *flags))])
    return linked


def _object(source: Path, build: str, flags: list[str]) -> compiled.Recipe:
    if build == "accesses" and flags == SANITIZED["thread"][0]:
        build = "thread"  # the same object
    name = "_".join(source.relative_to(ROOT).with_suffix("").parts)
    command = (COMPILER, *FLAGS, *flags, "-x", "c++", "-c", source)
    return compiled.Recipe(f"{name}-{build}", command, (source,), ".o")


def lines_of(executable: Path, addresses: Sequence[str]) -> str:
    """The lines of kernels before these addresses, innermost first."""
    before = [hex(max(int(address, 16) - 1, 0)) for address in addresses]
    command = ["addr2line", "-i", "-e", str(executable), *before]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    lines = [line.partition(" (")[0].partition(f"{ROOT}/csrc/cuda/")[2] for line in lines]
    return " < ".join([line for line in lines if line][:4])


def run(
    executable: Path,
    *arguments,
    seed: int = 0,
    resident: int = 1,
    shared: int = 227 * 1024,
    **settings: int,
) -> subprocess.CompletedProcess[str]:
    """Runs a program with a seed for the order of blocks and threads.

    At least `resident` blocks run at the same time, with at most `shared` bytes of memory each.
    `settings`: others of tests/cuda_emulator/settings.cpp.
    """
    settings |= {"seed": seed, "resident": resident, "shared": shared}
    environment = os.environ | {
        **{f"EMULATOR_{name.upper()}": str(value) for name, value in settings.items()},
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:atexit_sleep_ms=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    command = [str(executable), *map(str, arguments)]
    if executable.name.split("-")[1] == "thread" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # its shadow memory has a fixed address
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    # A warning at the first switch between fibers, although the emulator announces it.
    hint = r"==\d+==WARNING: ASan doesn't fully support makecontext.*\n"
    result.stderr = re.sub(hint, "", result.stderr)
    return result
