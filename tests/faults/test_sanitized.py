"""The fuzzer under the address and undefined sanitizers, at each CPU level of this machine.

The CPU library is built once more, with ONEPASS_SANITIZE, into build/sanitized. The processes that
load it take the package from a folder of links.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onepass import _C
from tests.support.packages import FIND_BY_PATH

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitized"
CASES = 400  # of each level
# Not at avx512 where the machine has avx512_bf16, which differs in products of bfloat16 alone.
LEVELS = [name for name in _C.cpu_levels() if name != "avx512" or name == _C.cpu_levels()[-1]]
START = """
import onepass
assert onepass.__file__.startswith({package!r}), onepass.__file__
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sanitized")]


def build_tools() -> tuple[str, str]:
    cmake = pytest.importorskip("cmake", reason="cmake of PyPI is not installed")
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    return os.path.join(cmake.CMAKE_BIN_DIR, "cmake"), pybind11.get_cmake_dir()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH: the package's sources, with the sanitized libraries."""
    cmake, pybind11 = build_tools()
    levels = ";".join(LEVELS)
    configure = [
        cmake, "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DONEPASS_SANITIZE=ON",
        "-DONEPASS_CUDA=OFF", f"-DONEPASS_CPU_LEVELS={levels}", f"-Dpybind11_DIR={pybind11}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (configure, [cmake, "--build", BUILD]):
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    folder = tmp_path_factory.mktemp("sanitized")
    inside = folder / "onepass"
    (inside / "_lib").mkdir(parents=True)
    for source in (ROOT / "python" / "onepass").iterdir():
        if source.name not in ("_lib", "__pycache__") and source.suffix != ".so":
            (inside / source.name).symlink_to(source)
    (extension,) = BUILD.glob("_C*.so")
    (inside / extension.name).symlink_to(extension)
    (inside / "_lib" / "libonepass_cpu.so").symlink_to(BUILD / "libonepass_cpu.so")
    return folder


def run(package: Path, level: str, code: str, *arguments: str) -> subprocess.CompletedProcess:
    preloaded = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at exit
        "LD_PRELOAD": " ".join(preloaded),
        "ONEPASS_CPU_ISA": level,
        "PYTHONPATH": str(package),
    }
    code = FIND_BY_PATH + START.format(package=str(package)) + code
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500
    )


def test_a_read_beyond_memory_ends_the_process(package):
    """A tensor that claims twice the bytes that it has: torch sees nothing, the sanitizer does."""
    code = """
import ctypes, torch
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = (ctypes.c_float * 32).from_address(libc.malloc(64))
claimed = torch.frombuffer(memory, dtype=torch.float32)
print(onepass._C.cpu_level(), flush=True)
onepass.functional.layer_norm(claimed[{count}], ({length},))
print("read")
"""
    level = LEVELS[0]
    right = run(package, level, code.format(count=":16", length=16))
    assert right.returncode == 0 and right.stdout == f"{level}\nread\n", right.stderr[-2000:]
    wrong = run(package, level, code.format(count=":", length=32))
    assert wrong.stdout == f"{level}\n" and wrong.returncode != 0
    assert "heap-buffer-overflow" in wrong.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_random_calls(package, level):
    seed = _C.cpu_levels().index(level) + 1
    code = f"""
import runpy
sys.argv = ["fuzz.py", "--seed", "{seed}", "--cases", "{CASES}"]
runpy.run_module("tests.faults.fuzz", run_name="__main__")
"""
    done = run(package, level, code)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"0 of {CASES} are wrong" in done.stdout
