"""What the compiled CUDA kernels need of a device: registers without spills."""

from __future__ import annotations

import re

import nvcc
import pytest

from onepass import _C, _library

CUDA = nvcc.ROOT / "csrc" / "cuda"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTERS = 65536  # of a multiprocessor, on all of them
KERNELS = ("norm_forward_kernel", "norm_backward_kernel", "dropout_forward_kernel")
KERNELS += ("optimizer_step_kernel", "gradient_norm_kernel", "scale_gradients_kernel")
SOURCES = ("norm/forward.cu", "norm/backward.cu", "dropout.cu")
SOURCES += ("optimizer/step.cu", "optimizer/gradients.cu")
MAX_THREADS = 512  # of a block; those below name kernels with another launch bound
THREADS = {
    r"columns_kernelINS0_4SameIdEE": 256,
    r"norm_(forward|backward)_kernelI.*Lb0E": 384,  # single elements
    r"facts": 1024,
}


def check(kernels: dict[str, dict[str, int]]) -> None:
    for name, used in kernels.items():
        assert used["STACK"] == used["LOCAL"] == 0, f"{name} spills: {used}"
        threads = next((n for part, n in THREADS.items() if re.search(part, name)), MAX_THREADS)
        assert used["REG"] * threads <= REGISTERS, f"{name} cannot start: {used}"


def test_built_kernels_do_not_spill():
    if not _C.build_info()["cuda_archs"]:
        pytest.skip("built without CUDA")
    kernels = nvcc.resources(_library.library_directory() / "libonepass_cuda.so")
    for kernel in KERNELS:
        assert any(kernel in name for name in kernels)
    check(kernels)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_of_a_release_do_not_spill(tmp_path, arch, source):
    """Also for the architectures that this build leaves out."""
    kernels = nvcc.resources(nvcc.compile_cubin(CUDA / source, tmp_path / "kernels.cubin", arch))
    assert kernels
    check(kernels)
