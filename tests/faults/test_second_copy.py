"""A package imported twice in one process: from one place it works, from two it raises."""

import json
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
TRY = "try: import onepass; onepass.swap\nexcept ImportError as error: print(error)"
AGAIN = {
    "forgotten": FORGET,
    "reloaded": "importlib.reload(onepass)",
    "popped": "sys.modules.pop('onepass')",
}
# Runs programs in children of a process that has imported torch; each writes its output to a file.
PROGRAMS = f"""{FIND_BY_PATH}
import importlib, json, os, torch, traceback
for name, program in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        file = os.open(name, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        try:
            exec(program)
            print("done", flush=True)
        except BaseException:
            sys.stdout.flush()
            traceback.print_exc()
        finally:
            os._exit(0)
    os.wait()
"""


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


@pytest.fixture(scope="module")
def said(copies, tmp_path_factory) -> dict[str, str]:
    """The output of each program."""
    one, other = map(str, copies)
    first, second = f"sys.path.insert(0, {one!r})", f"sys.path.insert(0, {other!r})"
    by_hand = f"torch.ops.load_library({one + '/onepass/_lib/libonepass_cpu.so'!r})"
    programs = {
        name: (first, "import onepass", again, "import onepass", USE)
        for name, again in AGAIN.items()
    }
    programs["two places"] = first, "import onepass", FORGET, f"sys.path[0] = {other!r}", TRY
    programs["another name"] = by_hand, second, TRY
    folder = tmp_path_factory.mktemp("said")
    texts = json.dumps({name: "\n".join(lines) for name, lines in programs.items()})
    command = [sys.executable, "-W", "error", "-c", PROGRAMS, texts]
    subprocess.run(command, cwd=folder, check=True)
    return {name: (folder / name).read_text() for name in programs}


@pytest.mark.parametrize("again", AGAIN)
def test_from_one_place(said, again):
    assert said[again] == "torch.Size([2, 8])\ndone\n"


def test_from_two_places(said, copies):
    text = said["two places"]
    assert text.endswith("\ndone\n"), text
    assert "onepass: this process has the operators of another copy, " in text
    for folder in copies:
        assert f"{folder}/onepass/_lib/libonepass_cpu.so" in text


def test_under_another_name(said):
    """The library of one copy was loaded by hand, say by a program that embeds it."""
    text = said["another name"]
    assert text.endswith("\ndone\n") and "of another copy" in text, text
