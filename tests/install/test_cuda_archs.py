"""The architectures of a build: the requested ones, those of the devices, or all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "cmake" / "cuda_archs.cmake"
ALL = "80-real;90-real;100;120-real"
OLD = "compute_80 compute_90"
NEW = f"{OLD} compute_100 compute_120"

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
        f'include("{MODULE}")\nonepass_cuda_archs(archs "{asked}" "{folder / "nvcc"}")\n'
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
        ("", NEW, "9.0", "90"),
        ("", NEW, "8.0\n9.0\n9.0", "80;90"),
        ("", NEW, "7.5", ALL),
        ("80;90", NEW, "10.0", "80;90"),
        ("90a-real", NEW, None, "90a-real"),
        ("8.0 9.0", NEW, None, "80;90"),
        ("80,90", NEW, None, "80;90"),
        ("", OLD, "12.1", "80-real;90"),  # a device that this nvcc does not know
    ],
)
def test_what_is_built(tmp_path, asked, nvcc, smi, archs):
    run = configured(tmp_path, asked, nvcc, smi)
    assert f"archs={archs}\n" in run.stdout, run.stderr


@pytest.mark.parametrize("asked", ["sm_90", "hopper", "8-"])
def test_what_is_no_architecture(tmp_path, asked):
    run = configured(tmp_path, asked, NEW, None)
    assert run.returncode and f"got {asked}" in " ".join(run.stderr.split())


def test_older_devices_are_refused_by_name(tmp_path):
    run = configured(tmp_path, "75;80", NEW, None)
    assert run.returncode and "from 80 on, got 75" in " ".join(run.stderr.split())
