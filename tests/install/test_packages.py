"""Installations: the source archive and the wheel, and broken ones: one clear sentence each, and a
doctor that still runs.

Each broken case imports a copy of the installed package with a part taken away, in a process of its
own.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import onepass
from onepass import _C, _library
from tests.support import fresh


@pytest.fixture
def copy(tmp_path) -> Path:
    """A directory that holds a whole copy of the package, extension and libraries included."""
    package = tmp_path / "site" / "onepass"
    shutil.copytree(
        Path(onepass.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    shutil.copy(_C.__file__, package)
    shutil.copytree(_library.library_directory(), package / "_lib", dirs_exist_ok=True)
    return package.parent


def environment(site: Path) -> dict[str, str]:
    """For -S: an editable installation's import hook would find the real package."""
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.fspath(site), *packages])}


# Uses in children of a process that has imported torch, if possible: the import takes a second.
SERVER = """
import contextlib, json, os, signal, sys, traceback
with contextlib.suppress(Exception):
    import torch
for line in sys.stdin:
    site, uses = json.loads(line)
    ends = []
    for number, use in enumerate(uses):
        file = os.path.join(site, f"said {number}")
        if os.fork() == 0:
            signal.alarm(60)
            said = os.open(file, os.O_CREAT | os.O_WRONLY)
            os.dup2(said, 1), os.dup2(said, 2)
            os.chdir(site)
            sys.path.insert(0, site)
            code = 0
            try:
                exec(use)
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)  # to take torch down takes half a second
        code = os.waitstatus_to_exitcode(os.wait()[1])
        with open(file) as text:
            ends.append((code, text.read()))
    print(json.dumps(ends), flush=True)
"""


def process(site: Path) -> subprocess.Popen:
    command = [sys.executable, "-S", "-c", SERVER]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return subprocess.Popen(command, env=environment(site), cwd=site, text=True, **pipes)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """A process that has imported torch, for all installations that have one."""
    with process(tmp_path_factory.mktemp("nowhere")) as users:
        yield users
        users.stdin.close()


def used(site: Path, users: subprocess.Popen, *uses: str) -> list[tuple[int, str]]:
    """(exit code, what is said) of each use of an installation."""
    print(json.dumps([os.fspath(site), uses]), file=users.stdin, flush=True)
    return json.loads(users.stdout.readline())


def command(*words: str) -> str:
    """The use that `python -m onepass WORDS` is."""
    run = "runpy.run_module('onepass', run_name='__main__', alter_sys=True)"
    return f"import runpy, sys; sys.argv = {['onepass', *words]}; {run}"


USES = ("import onepass", "import onepass.nn", "from onepass import swap")
USES += ("import onepass; onepass.functional.dropout",)
REINSTALL = "pip install --force-reinstall --no-deps onepass"
LIBRARY, EXTENSION, TORCH = "onepass/_lib/libonepass_cpu.so", "onepass/_C*", "torch.py"
BROKEN = {  # a file, the text that takes its place, what the error says
    "library missing": (LIBRARY, None, "libonepass_cpu.so is missing from the installation"),
    "library torn": (LIBRARY, "torn", "libonepass_cpu.so cannot be loaded under torch"),
    "extension missing": (EXTENSION, None, "extension module for Python"),
    "extension torn": (EXTENSION, "torn", "extension module does not work with its libraries"),
    "torch old": (TORCH, "__version__ = '2.9.1'", "2.10 or newer, and this is torch 2.9.1"),
    "torch older": (TORCH, "__version__ = '1.13.0+cu117'", "and this is torch 1.13.0+cu117"),
    "torch missing": (TORCH, "raise ModuleNotFoundError(\"No module named 'torch'\")",
                      "torch is not installed"),
    "torch torn": (TORCH, "raise OSError('libcudart.so.12: cannot open shared object')",
                   "torch is installed but cannot be imported (libcudart.so.12: cannot open"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_use_but_the_import_says_what_is_broken(copy, with_torch, name):
    part, text, message = BROKEN[name]
    for file in list(copy.glob(part)) or [copy / part]:
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
    if part == TORCH:
        with process(copy) as users:
            ends = used(copy, users, *USES)
            users.stdin.close()
    else:
        ends = used(copy, with_torch, *USES)
    assert [code for code, _ in ends] == [0, 1, 1, 1], ends
    (said,) = {text.splitlines()[-1] for code, text in ends if code}
    assert message in said and (part == EXTENSION or os.fspath(copy) not in said)
    if part == LIBRARY or name == "extension torn":
        assert REINSTALL in said
    assert ("pip install 'torch>=2.10'" in said) == (" old" in name)


def test_commands_of_a_whole_and_of_a_broken_installation(copy, with_torch):
    """An import does not look at the command line."""
    ((_, said),) = used(copy, with_torch, "import onepass; print(onepass.__file__)")
    assert said.startswith(os.fspath(copy))
    (copy / LIBRARY).unlink()
    doctor, bench, imported = used(
        copy, with_torch, command("doctor"), command("bench"),
        "import sys; sys.argv = sys.orig_argv = ['user.py', '-m', 'onepass']\n"
        "import onepass; onepass.swap",
    )  # fmt: skip
    assert [code for code, _ in (doctor, bench, imported)] == [1, 1, 1]
    assert "FAIL op libraries" in doctor[1] and "fix: reinstall it: pip install" in doctor[1]
    assert "Traceback" not in doctor[1]
    assert bench[1].strip().count("\n") == 0 and "is missing" in bench[1]
    assert "is missing from" in imported[1].splitlines()[-1]


def test_unknown_level_says_which_there_are():
    code = "import torch, onepass; onepass.functional.layer_norm(torch.ones(2, 2), 2)"
    environment = {**os.environ, "ONEPASS_CPU_ISA": "avx1024"}
    result = fresh.run(code, env=environment)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "ONEPASS_CPU_ISA must be one of baseline" in message and "got avx1024" in message


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
    command = [sys.executable, "-S", "-m", "onepass", "doctor"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment(site), cwd=site
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "everything is in order" in result.stdout
