"""Audit of the built libraries: what they need, what they show, which instructions they hold.

Reads the installed binaries with binutils, as a packager would.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onepass import _C, _library

LIBRARIES = sorted(_library.library_directory().glob("*.so"))
CPU_LIBRARY = _library.library_directory() / "libonepass_cpu.so"

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="binutils (nm, objdump, readelf) are not installed"
)

# Versioned symbols of the C and C++ run-time libraries, and of the dynamic loader.
RUNTIME_VERSIONS = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC|GOMP_never)_")
STABLE_ABI = re.compile(r"^(aoti_torch_|torch_)\w+$")
WEAK_BY_CONVENTION = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}


def run(*command: str | Path) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def undefined_symbols(library: Path) -> list[str]:
    return [line.split()[-1] for line in run("nm", "-D", "--undefined-only", library).splitlines()]


def dynamic_entries(library: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.+)\]", run("readelf", "-d", library))


def named(library: Path) -> str:
    return library.name


def test_libraries_are_there():
    assert CPU_LIBRARY in LIBRARIES
    has_cuda = any(library.name == "libonepass_cuda.so" for library in LIBRARIES)
    assert has_cuda == bool(_C.build_info()["cuda_archs"])


@pytest.mark.parametrize("library", LIBRARIES, ids=named)
def test_undefined_symbols_are_of_the_stable_abi_or_the_runtime(library):
    symbols = undefined_symbols(library)
    assert symbols
    foreign = [
        symbol
        for symbol in symbols
        if not STABLE_ABI.match(symbol)
        and not RUNTIME_VERSIONS.search(symbol)
        and symbol not in WEAK_BY_CONVENTION
    ]
    assert foreign == []


@pytest.mark.parametrize("library", LIBRARIES, ids=named)
def test_no_python_no_openmp_no_rpath(library):
    assert [s for s in undefined_symbols(library) if re.match(r"_?Py[A-Z_]", s)] == []
    needed = dynamic_entries(library, "NEEDED")
    assert [name for name in needed if re.search(r"gomp|iomp|libomp|python", name)] == []
    allowed = {"libtorch_cpu.so", "libtorch_cuda.so", "libstdc++.so.6", "libm.so.6"}
    allowed |= {"libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
    allowed |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert set(needed) <= allowed
    assert dynamic_entries(library, "RPATH") + dynamic_entries(library, "RUNPATH") == []


def test_the_cpu_library_binds_to_torch_and_exports_one_symbol():
    assert "libtorch_cpu.so" in dynamic_entries(CPU_LIBRARY, "NEEDED")
    assert any(STABLE_ABI.match(symbol) for symbol in undefined_symbols(CPU_LIBRARY))
    lines = run("nm", "-D", "--defined-only", CPU_LIBRARY).splitlines()
    # Weak and unique ones are instances of the C++ library's own templates.
    strong = [line.split()[-1] for line in lines if line.split()[-2] in "TDBR"]
    assert strong == ["onepass_cpu_backend"]


# Marks of an instruction set in the disassembly: what a level must not hold, and, so that this test
# can fail, what it must.
YMM, ZMM, MASK = r"%ymm", r"%zmm", r"%k[1-7]"
VEX = r"\tv[a-z0-9]+ .*%xmm"
FMA = r"vfmadd\d+ps"
BF16 = r"vcvtneps2bf16|vdpbf16ps"
LEVELS = {
    "baseline": ([YMM, ZMM, MASK, VEX], [r"\tmulps "]),
    "avx2": ([ZMM, MASK, BF16], [YMM, FMA, r"vcvtph2ps"]),
    "avx512": ([BF16], [ZMM, MASK, FMA]),
    "avx512_bf16": ([r"tdpbf16ps|vpdpbusd"], [ZMM, r"vcvtneps2bf16"]),
}


@pytest.fixture(scope="module")
def disassembly() -> dict[str, str]:
    """Level -> the instructions of its functions, found by the namespace in their symbols."""
    text = run("objdump", "--disassemble", "--no-show-raw-insn", CPU_LIBRARY)
    parts: dict[str, list[str]] = {level: [] for level in LEVELS}
    for function in text.split("\n\n"):
        match = re.search(r"<_ZN?K?.*?onepass3cpu\d+(baseline|avx512_bf16|avx512|avx2)", function)
        if match:
            parts[match[1]].append(function)
    return {level: "\n".join(functions) for level, functions in parts.items()}


@pytest.mark.skipif(
    not _C.build_info()["cpu_levels"].endswith("avx512_bf16"), reason="x86-64 levels are not built"
)
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_keeps_to_its_instructions(disassembly, level):
    forbidden, present = LEVELS[level]
    text = disassembly[level]
    assert text.count("\n") > 1000
    for pattern in present:
        assert re.search(pattern, text), f"{level} does not use {pattern}"
    for pattern in forbidden:
        found = re.search(f".*({pattern}).*", text)
        assert found is None, f"{level} holds {found[0].strip()}"


def test_one_openmp_runtime_in_the_process():
    code = (
        "import onepass, torch, re;"
        "torch.nn.functional.softmax(onepass.functional.layer_norm(torch.randn(99, 999), 999), 1);"
        "print(len(set(re.findall(r'\\S*(?:gomp|iomp|libomp)\\S*', open('/proc/self/maps').read()))))"
    )
    assert int(run(sys.executable, "-c", code)) <= 1
