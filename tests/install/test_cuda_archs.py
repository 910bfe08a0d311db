"""The architectures of a build: the requested ones, those of the devices, or all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "cmake" / "cuda_archs.cmake"
ALL = "80-real;90-real;100;120-real"
OLD = "compute_80 compute_90"
NEW = f"{OLD} compute_100 compute_120"

BEGIN = "cmake_minimum_required(VERSION 3.25)\n"

# cmake of the environment, which pip installed for the build, or the system's.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=PATH)

pytestmark = pytest.mark.skipif(CMAKE is None, reason="there is no cmake")


def configured(folder: Path, asked: str, nvcc: str, smi: str | None) -> subprocess.CompletedProcess:
    """A run of cmake with an nvcc for these architectures and an nvidia-smi with this output."""
    programs = {"nvcc": f"echo {nvcc}", "nvidia-smi": "exit 9" if smi is None else f"echo '{smi}'"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    script = folder / "script.cmake"
    script.write_text(
        f'{BEGIN}include("{MODULE}")\nonepass_cuda_archs(archs "{asked}" "{folder / "nvcc"}")\n'
        'message(STATUS "archs=${archs}")\n'
    )
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [CMAKE, "-P", str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("asked", "nvcc", "smi", "archs"),
    [
        ("", NEW, None, ALL),
        ("", OLD, None, "80-real;90"),
        ("all", NEW, "9.0", ALL),
        ("", NEW, "8.0\n9.0\n9.0", "80;90"),
        ("", NEW, "7.5", ALL),
        ("80;90", NEW, "10.0", "80;90"),
        ("90a-real", NEW, None, "90a-real"),
        ("80,90", NEW, None, "80;90"),
        ("", OLD, "12.1", "80-real;90"),  # a device that this nvcc does not know
    ],
)
def test_what_is_built(tmp_path, asked, nvcc, smi, archs):
    run = configured(tmp_path, asked, nvcc, smi)
    assert f"archs={archs}\n" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("asked", "said"), [("sm_90", "got sm_90"), ("8-", "got 8-"), ("75;80", "from 80 on, got 75")]
)
def test_what_is_no_architecture(tmp_path, asked, said):
    run = configured(tmp_path, asked, NEW, None)
    assert run.returncode and said in " ".join(run.stderr.split())


def code(folder: Path, archs: str, borders: str) -> list[str]:
    """The options of a source without their common part: from which PTX, for what."""
    script = folder / "script.cmake"
    script.write_text(
        f'{BEGIN}include("{MODULE}")\nonepass_cuda_code(code "{archs}" "{borders}")\n'
        'message(STATUS "${code}")\n'
    )
    run = subprocess.run([CMAKE, "-P", str(script)], capture_output=True, text=True, check=True)
    return re.findall(r"--generate-code=arch=compute_(\w+,code=\w+)", run.stdout)


@pytest.mark.parametrize(
    ("archs", "borders", "expected"),
    [
        (ALL, "80;100", "80,80 80,90 100,100 100,compute_100 100,120"),
        (ALL, "80;90;100", "80,80 90,90 100,100 100,compute_100 100,120"),
        ("120-real;100-real", "80;90;100", "100,120 100,100"),  # in any order
        ("120-real", "80;90;100", "120,120"),
        ("80;86;90", "80;90;100", "80,80 80,compute_80 86,86 86,compute_86 90,90 90,compute_90"),
        ("86-real;90a-real;89-virtual", "80;90;100", "86,86 90a,90a 89,compute_89"),
    ],
)
def test_architectures_share_ptx(tmp_path, archs, borders, expected):
    """But not those that want PTX of their own, and nobody shares that of 90a or 100f."""
    found = [
        option.replace("code=sm_", "").replace("code=", "")
        for option in code(tmp_path, archs, borders)
    ]
    assert found == expected.split()


def functions_of_newer_devices(text: str) -> set[str]:
    """Those between `#if ... __CUDA_ARCH__ ...` and #endif, or with that inside."""
    names, within, name, is_open = set(), False, "", False
    for line in text.splitlines():
        if found := re.match(r"__device__ .*?(\w+)\(.*\{", line):
            name, is_open = found[1], not line.endswith("}")
        within = not line.startswith("#endif") and (within or "__CUDA_ARCH__ >=" in line)
        if within and (found or is_open):
            names.add(name)
        is_open = is_open and line != "}"
    return names


def test_sources_that_share_ptx_ask_for_no_architecture():
    """What cuda/ptx.cuh makes of instructions of newer devices is used in attention alone."""
    newer = functions_of_newer_devices((ROOT / "csrc/cuda/ptx.cuh").read_text())
    assert newer == {"adds_four", "add_global_4", "wait_for_kernel_before", "start_kernel_after"}
    using = set()
    for file in sorted((ROOT / "csrc").rglob("*.*")):
        text = re.sub(r"//.*", "", file.read_text())
        if re.search(rf"\b({'|'.join(newer)})\(|__CUDA_ARCH__ [<>=]", text):
            using.add(str(file.relative_to(ROOT / "csrc" / "cuda")).partition("/")[0])
    assert using == {"attention", "ptx.cuh"}
