"""A package that is imported twice in one process: from one place it works, from two it says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onepass
from onepass import _library
from tests.support.packages import FIND_BY_PATH

FORGET = "for n in [n for n in sys.modules if n.split(chr(46))[0] == 'onepass']: del sys.modules[n]"
USE = "print(onepass.functional.layer_norm(torch.randn(2, 8), (8,)).shape)"


def run(*lines: str, where: Path) -> subprocess.CompletedProcess:
    code = "\n".join([FIND_BY_PATH, "import importlib, torch", *lines])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=where, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> list[Path]:
    """Folders with a package each."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    for folder in folders:
        package = folder / "onepass"
        shutil.copytree(
            Path(onepass.__file__).parent, package,
            ignore=shutil.ignore_patterns("_lib", "_C*", "__pycache__"),
        )  # fmt: skip
        libraries = _library.library_directory()
        shutil.copytree(libraries, package / "_lib")
        for module in libraries.parent.glob("_C*.so"):
            shutil.copy(module, package)
    return folders


@pytest.mark.parametrize(
    "again", [FORGET, "importlib.reload(onepass)", "sys.modules.pop('onepass')"]
)
def test_from_one_place(copies, again):
    done = run(f"sys.path.insert(0, {str(copies[0])!r})", "import onepass", again,
               "import onepass", USE, where=copies[0])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 8])" in done.stdout


def test_from_two_places(copies):
    one, other = map(str, copies)
    done = run(f"sys.path.insert(0, {one!r})", "import onepass", FORGET,
               f"sys.path[0] = {other!r}", "try: import onepass; onepass.swap",
               "except ImportError as error: print(error)", where=copies[0])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "onepass: this process has the operators of another copy, " in done.stdout
    assert f"{one}/onepass/_lib/libonepass_cpu.so" in done.stdout
    assert f"{other}/onepass/_lib/libonepass_cpu.so" in done.stdout


def test_under_another_name(copies):
    """The library of one copy was loaded by hand, say by a program that embeds it."""
    one, other = map(str, copies)
    done = run(f"torch.ops.load_library({one + '/onepass/_lib/libonepass_cpu.so'!r})",
               f"sys.path.insert(0, {other!r})", "try: import onepass; onepass.swap",
               "except ImportError as error: print(error)", where=copies[0])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of another copy" in done.stdout
