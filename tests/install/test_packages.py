"""Installations: the source archive and the wheel, and broken ones: one clear sentence each, and a
doctor that still runs.

Each broken case imports a copy of the installed package with a part taken away, in a process of its
own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from subprocess import PIPE

import pytest

import onepass
from onepass import _C, _library
from tests.support import fresh


@pytest.fixture
def copy(tmp_path) -> Path:
    """A directory that holds a whole copy of the package, extension and libraries included."""
    package = tmp_path / "site" / "onepass"
    shutil.copytree(
        Path(onepass.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    shutil.copy(_C.__file__, package)
    shutil.copytree(_library.library_directory(), package / "_lib", dirs_exist_ok=True)
    return package.parent


def environment(site: Path) -> dict[str, str]:
    """For -S: an editable installation's import hook would find the real package."""
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.fspath(site), *packages])}


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(site), cwd=site, timeout=120
    )


# Each in a child of a process that has imported torch, if possible: the import takes a second.
USES = """
import contextlib, os, signal, sys, traceback
with contextlib.suppress(Exception):
    import torch
for line in sys.stdin:
    site, file = line.rstrip().split(os.pathsep)
    said = os.open(file, os.O_CREAT | os.O_WRONLY)
    for use in (
        "import onepass",
        "import onepass.nn",
        "from onepass import swap",
        "import onepass; onepass.functional.dropout",
    ):
        if os.fork() == 0:
            signal.alarm(60)
            os.dup2(said, 2)
            os.chdir(site)
            sys.path.insert(0, site)
            try:
                exec(use)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # to take torch down takes half a second
        code = os.waitstatus_to_exitcode(os.wait()[1])
        os.write(said, f"exit code {code}\\n".encode())
    print(flush=True)
"""


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """A process that has imported torch, for all installations that have one."""
    with process(tmp_path_factory.mktemp("nowhere"), stdin=PIPE, stdout=PIPE) as users:
        yield users
        users.stdin.close()


def process(site: Path, **pipes) -> subprocess.Popen:
    command = [sys.executable, "-S", "-c", USES]
    return subprocess.Popen(command, env=environment(site), cwd=site, text=True, **pipes)


def import_error(site: Path, users: subprocess.Popen | None = None) -> str:
    """The error of every use of a broken installation; a bare import of the package succeeds."""
    if users is None:  # torch is broken
        with process(site, stdin=PIPE, stdout=PIPE) as users:
            return import_error(site, users)
    said = site / "said"
    print(site, said, sep=os.pathsep, file=users.stdin, flush=True)
    assert users.stdout.readline() == "\n"
    text = said.read_text()
    ends = re.findall(r"(?:(.*)\n)?exit code (.*)", text)
    assert [int(code) for _, code in ends] == [0, 1, 1, 1], text
    (message,) = {message for message, code in ends if code == "1"}
    return message


def test_the_copy_works(copy):
    result = run(copy, "-c", "import onepass; print(onepass.__file__)")
    assert result.stdout.startswith(os.fspath(copy)), result.stderr


def test_missing_library(copy, with_torch):
    (copy / "onepass/_lib/libonepass_cpu.so").unlink()
    message = import_error(copy, with_torch)
    assert "libonepass_cpu.so is missing from the installation" in message
    assert "pip install --force-reinstall --no-deps onepass" in message


def test_library_that_does_not_load(copy, with_torch):
    (copy / "onepass/_lib/libonepass_cpu.so").write_bytes(b"not a library")
    message = import_error(copy, with_torch)
    assert "libonepass_cpu.so cannot be loaded under torch" in message
    assert "pip install --force-reinstall --no-deps onepass" in message
    assert os.fspath(copy) not in message


def test_missing_extension_module(copy, with_torch):
    for path in (copy / "onepass").glob("_C*"):
        path.unlink()
    assert "extension module for Python" in import_error(copy, with_torch)


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0+cu117"])
def test_torch_too_old(copy, version):
    (copy / "torch.py").write_text(f"__version__ = {version!r}\n")
    message = import_error(copy)
    assert f"needs torch 2.10 or newer, and this is torch {version}" in message
    assert "pip install 'torch>=2.10'" in message


def test_torch_missing(copy):
    (copy / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    assert "torch is not installed" in import_error(copy)


def test_torch_that_does_not_import(copy):
    (copy / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object')\n")
    message = import_error(copy)
    assert "torch is installed but cannot be imported (libcudart.so.12: cannot open" in message


def test_extension_module_of_something_else(copy, with_torch):
    (extension,) = (copy / "onepass").glob("_C*")
    extension.write_bytes(b"not an extension module")
    message = import_error(copy, with_torch)
    assert "its extension module does not work with its libraries" in message
    assert "pip install --force-reinstall --no-deps onepass" in message


def test_unknown_level_says_which_there_are():
    code = "import torch, onepass; onepass.functional.layer_norm(torch.ones(2, 2), 2)"
    environment = {**os.environ, "ONEPASS_CPU_ISA": "avx1024"}
    result = fresh.run(code, env=environment)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "ONEPASS_CPU_ISA must be one of baseline" in message and "got avx1024" in message


def test_doctor_on_a_broken_installation(copy):
    (copy / "onepass/_lib/libonepass_cpu.so").unlink()
    result = run(copy, "-m", "onepass", "doctor")
    assert result.returncode == 1
    assert "FAIL op libraries" in result.stdout
    assert "fix: reinstall it: pip install" in result.stdout
    assert "Traceback" not in result.stderr


def test_an_import_does_not_look_at_the_command_line(copy):
    (copy / "onepass/_lib/libonepass_cpu.so").unlink()
    (copy / "user.py").write_text("import onepass\nonepass.swap\n")
    for arguments in (["user.py", "-m", "onepass"], ["-m", "user", "-m", "onepass"]):
        result = run(copy, *arguments)
        assert result.returncode == 1 and "is missing from" in result.stderr.splitlines()[-1]


def test_other_commands_on_a_broken_installation(copy):
    (copy / "onepass/_lib/libonepass_cpu.so").unlink()
    result = run(copy, "-m", "onepass", "bench")
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0 and "is missing" in result.stderr


ROOT = Path(__file__).parents[2]
BUILDS = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None
    or not list(ROOT.glob("build/cp*/cpu_baseline.o")),
    reason="this onepass was not built in this source tree",
)


@BUILDS
def test_the_source_archive_holds_what_a_build_needs(tmp_path):
    tree = tmp_path / "tree"  # of a tree with an environment, all files of which are looked at
    left_out = (".git", ".venv", "build", "__pycache__", "_lib", "*.so")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
    for made in (".venv/lib/other.so", "build/cp311/cpu.o", "python/onepass/_C.so"):
        (tree / made).parent.mkdir(parents=True, exist_ok=True)
        (tree / made).touch()
    code = f"import onepass_build; print(onepass_build.build_sdist({os.fspath(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.fspath(tree / "build_backend")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tree, env=environment)
    (archive,) = tmp_path.glob("onepass-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = [
        path for folder in ("csrc", "cmake", "python") for path in (ROOT / folder).rglob("*")
    ]
    wanted = {
        os.fspath(path.relative_to(ROOT))
        for path in sources
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert wanted <= names
    assert {"build_backend/onepass_build.py", "CMakeLists.txt", "LICENSE", "README.md"} <= names
    assert not [name for name in names if re.search(r"\.so$|\.o$|^build/|\.venv", name)]


@BUILDS
@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path):
    """Uses the build folder of this source tree, so that little is compiled again."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "-w", os.fspath(tmp_path)], check=True, cwd=ROOT, capture_output=True)
    (wheel,) = tmp_path.glob("onepass-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    libraries = {f"onepass/_lib/{path.name}" for path in _library.library_directory().glob("*.so")}
    assert libraries <= set(names)
    assert "onepass/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name for name in names if not re.match(r"onepass/|onepass-[\d.]+\.dist-info/", name)
    ]
    result = run(site, "-m", "onepass", "doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "everything is in order" in result.stdout
