"""What the compiled CUDA kernels need of a device: registers without spills, shared memory.

cuobjdump comes with the tests (nvidia-cuda-cuobjdump), since nvcc alone does not bring it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from onepass import _C, _library

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "csrc" / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS = 65536  # of a multiprocessor, on all of them
MAX_THREADS = 512  # of a block; those below name kernels with another launch bound
THREADS = {"columns_kernelINS0_4SameIdEE": 256, "facts": 1024}


def cuobjdump() -> str:
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if file.name == "cuobjdump"]
    program = shutil.which("cuobjdump") or next(iter(found), None)
    if program is None:
        pytest.skip("there is no cuobjdump")
    return program


def resources(binary: Path) -> dict[str, dict[str, int]]:
    """By kernel: REG, STACK, SHARED, LOCAL and so on."""
    command = [cuobjdump(), "--dump-resource-usage", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
        for name, line in re.findall(r"Function (\S+):\n(.*)", text)
    }


def check(kernels: dict[str, dict[str, int]]) -> None:
    for name, used in kernels.items():
        assert used["STACK"] == used["LOCAL"] == 0, f"{name} spills: {used}"
        threads = next((n for part, n in THREADS.items() if part in name), MAX_THREADS)
        assert used["REG"] * threads <= REGISTERS, f"{name} cannot start: {used}"


def test_built_kernels_do_not_spill():
    if not _C.build_info()["cuda_archs"]:
        pytest.skip("built without CUDA")
    kernels = resources(_library.library_directory() / "libonepass_cuda.so")
    for kernel in ("norm_forward_kernel", "norm_backward_kernel", "dropout_forward_kernel"):
        assert any(kernel in name for name in kernels)
    check(kernels)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", ["norm/forward.cu", "norm/backward.cu", "dropout.cu"])
def test_kernels_of_a_release_do_not_spill(tmp_path, arch, source):
    """Also for the architectures that this build leaves out."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    options = (ROOT / "cmake" / "cuda.cmake").read_text()
    (flags,) = re.findall(r"COMPILE_LANGUAGE:CUDA>:(--[^>]*)>", options)
    binary = tmp_path / "kernels.cubin"
    command = [nvcc, "-std=c++20", f"-arch={arch}", *flags.split(), f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, "-cubin", "-o", binary, CUDA / source], check=True)
    kernels = resources(binary)
    assert kernels
    check(kernels)
