"""Audit of the built libraries: their dependencies, symbols and instructions.

Reads the installed binaries, and the merged object of each CPU level in the build folder, with
binutils, as a packager would.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onepass import _C, _library
from tests.support import fresh

LIBRARIES = sorted(_library.library_directory().glob("*.so"))
CPU_LIBRARY = _library.library_directory() / "libonepass_cpu.so"
LEVELS = _C.build_info()["cpu_levels"].split(", ")

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="binutils (nm, objdump, readelf) are not installed"
)

# Symbols that may be undefined: torch's stable ABI, and versioned symbols of libc, libm, libstdc++
# and libgcc.
STABLE_ABI = re.compile(r"^(aoti_torch_|torch_)\w+$")
RUNTIME = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+$")
WEAK_BY_CONVENTION = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
NEEDED = {
    "libtorch_cpu.so", "libtorch_cuda.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1",
    "libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}  # fmt: skip


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


def foreign(symbols: list[str]) -> list[str]:
    ours = WEAK_BY_CONVENTION
    return [s for s in symbols if not (STABLE_ABI.match(s) or RUNTIME.search(s) or s in ours)]


def test_libraries_are_there():
    names = {library.name for library in LIBRARIES}
    has_cuda = bool(_C.build_info()["cuda_archs"])
    assert names == {"libonepass_cpu.so"} | ({"libonepass_cuda.so"} if has_cuda else set())


@pytest.mark.parametrize("library", LIBRARIES, ids=named)
def test_undefined_symbols_are_of_the_stable_abi_or_the_runtime(library):
    symbols = undefined_symbols(library)
    assert symbols
    assert foreign(symbols) == []


def test_foreign_symbols_would_be_found():
    """The extension module uses Python, and torch's own libraries use its C++ ABI."""
    assert any(re.match(r"Py[A-Z_]", symbol) for symbol in foreign(undefined_symbols(_C.__file__)))
    assert foreign(["_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE", "GOMP_parallel"])
    assert foreign(["GOMP_parallel@GOMP_4.0", "omp_get_num_threads@OMP_1.0"])


@pytest.mark.parametrize("library", LIBRARIES, ids=named)
def test_no_python_no_openmp_no_rpath(library):
    assert [s for s in undefined_symbols(library) if re.match(r"_?Py[A-Z_]", s)] == []
    assert set(dynamic_entries(library, "NEEDED")) <= NEEDED  # no OpenMP run-time among them
    assert dynamic_entries(library, "RPATH") + dynamic_entries(library, "RUNPATH") == []


def test_the_cpu_library_binds_to_torch_and_exports_one_symbol():
    assert "libtorch_cpu.so" in dynamic_entries(CPU_LIBRARY, "NEEDED")
    assert any(STABLE_ABI.match(symbol) for symbol in undefined_symbols(CPU_LIBRARY))
    lines = run("nm", "-D", "--defined-only", CPU_LIBRARY).splitlines()
    # Weak and unique ones are instances of the C++ library's own templates.
    strong = [line.split()[-1] for line in lines if line.split()[-2] in "TDBR"]
    assert strong == ["onepass_cpu_backend"]


# Marks of an instruction set in the disassembly: those that a level must not contain, and, so that
# this test can fail, those that it must contain.
YMM, ZMM, MASK = r"%ymm", r"%zmm", r"%k[1-7]"
VEX = r"\tv[a-z0-9]+ .*%xmm"
FMA = r"vfmadd\d+ps"
BF16 = r"vcvtneps2bf16|vcvtne2ps2bf16|vdpbf16ps"
INSTRUCTIONS = {
    "baseline": ([YMM, ZMM, MASK, VEX], [r"\tmulps "]),
    "avx2": ([ZMM, MASK, BF16], [YMM, FMA, r"vcvtph2ps"]),
    "avx512": ([BF16], [ZMM, MASK, FMA]),
    "avx512_bf16": ([r"tdpbf16ps|vaddph"], [ZMM, r"vcvtneps2bf16"]),
}


def line_with(pattern: str, text: str) -> str | None:
    """The first one. (To search for whole lines takes a second per megabyte.)"""
    found = re.search(pattern, text)
    return found and text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()


X86 = pytest.mark.skipif("avx2" not in LEVELS, reason="the x86-64 levels are not built here")


def level_object(level: str) -> Path:
    """All code of a level, inline functions of headers and of the C++ library included."""
    build = Path(__file__).parents[2] / "build"
    objects = sorted(build.glob(f"cp*/cpu_{level}.o"), key=lambda path: path.stat().st_mtime)
    if not objects:
        pytest.skip("this onepass was not built in this source tree")
    return objects[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_shows_its_table_only(level):
    lines = run("nm", "--defined-only", "--extern-only", level_object(level)).splitlines()
    assert [line.split()[-1] for line in lines] == [f"onepass_cpu_kernels_{level}"]


@X86
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_keeps_to_its_instructions(level):
    forbidden, present = INSTRUCTIONS[level]
    text = run("objdump", "--disassemble", "--no-show-raw-insn", level_object(level))
    for pattern in present:
        assert re.search(pattern, text), f"{level} does not use {pattern}"
    for pattern in forbidden:
        assert not (found := line_with(pattern, text)), f"{level} holds {found}"


@X86
def test_outside_the_levels_there_is_baseline_code_only():
    folder = level_object("baseline").parent / "CMakeFiles/onepass_cpu.dir"
    objects = sorted(folder.rglob("*.o"))
    assert objects
    forbidden, _ = INSTRUCTIONS["baseline"]
    for path in objects:
        text = run("objdump", "--disassemble", "--no-show-raw-insn", path)
        found = line_with("|".join(forbidden), text)
        assert not found, f"{path.name} holds {found}"


def test_a_forbidden_instruction_is_found_in_its_line():
    text = "  1:\tmulps %xmm1\n  2:\tvaddps %ymm1\n  3:\tret\n"
    assert line_with(YMM, text) == "2:\tvaddps %ymm1" and line_with(ZMM, text) is None


def test_one_openmp_runtime_in_the_process():
    code = (
        "import onepass, torch, re\n"
        "torch.softmax(onepass.functional.layer_norm(torch.randn(99, 999), 999), 1)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(set(re.findall(r'\\S*(?:gomp|iomp|libomp)\\S*', maps))))"
    )
    assert int(fresh.run(code, check=True).stdout) <= 1
