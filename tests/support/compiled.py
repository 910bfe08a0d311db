"""Compiles programs of tests, and keeps them as long as their sources are the same; also keeps
facts about a file as long as the file is the same.

A file made here lies in build/tests under a digest of the command, the compiler's version, the
sources and the headers of this project that they include. Processes of a parallel test run share
the work: while one compiles a file, the others compile other files.
"""

import fcntl
import functools
import hashlib
import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests"
DIGITS = 16  # of a digest
seconds = 0.0  # of CPU time that this process has spent on compiling, for costs.py


@dataclass(frozen=True)
class Recipe:
    """How a file is made: by `command`, whose first word is the compiler, and `-o FILE`.

    `name` tells the file from those of other recipes; it may not contain anything that a change of
    the sources changes.
    """

    name: str
    command: tuple
    sources: tuple[Path, ...] = ()  # hashed with their includes; other words are hashed as text
    suffix: str = ""

    def file(self) -> Path:
        compiler = str(self.command[0])
        words = [str(word).replace(f"{ROOT}/", "") for word in self.command]  # in any checkout
        digest = hashlib.sha256(repr((words, _version(compiler))).encode())
        # Where the compiler looks for a header, after the folder of the file that includes it.
        folders = tuple(Path(word[2:]) for word in map(str, self.command) if word[:2] == "-I")
        for file in sorted(set().union(*(_included(source, folders) for source in self.sources))):
            digest.update(file.read_bytes())
        return BUILD / f"{self.name}-{digest.hexdigest()[:DIGITS]}{self.suffix}"


def made(recipes: Sequence[Recipe]) -> list[Path]:
    """The files of the recipes; those that do not exist yet are made now."""
    global seconds
    BUILD.mkdir(parents=True, exist_ok=True)
    work = [(recipe, recipe.file()) for recipe in recipes]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // processes)) as pool:
        before, left = children(), [pair for pair in work if not pair[1].exists()]
        done = list(pool.map(lambda pair: _make(*pair, wait=False), left))
        left = [pair for pair, is_made in zip(left, done, strict=True) if not is_made]
        list(pool.map(lambda pair: _make(*pair, wait=True), left))
        seconds += children() - before
    return [file for _, file in work]


def _make(recipe: Recipe, file: Path, wait: bool) -> bool:
    """Makes the file, and removes those of older sources; False if another process makes it."""
    with open(BUILD / f"{recipe.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        if not file.exists():
            _remove_stale(recipe.name, recipe.suffix)
            with tempfile.TemporaryDirectory(dir=BUILD) as folder:
                made = Path(folder) / "made"
                command = [*map(str, recipe.command), "-o", str(made)]
                result = subprocess.run(command, capture_output=True, text=True)
                if result.returncode != 0:
                    pytest.fail(f"{' '.join(command)}\n{result.stderr[-4000:]}")
                made.replace(file)
    return True


def found(name: str, files: Sequence[Path], find: Callable[[], str]) -> str:
    """The result of find(), which depends on the contents of these files alone.

    The result of a find() that fails is not kept. `name` is as in a Recipe.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    kept = BUILD / f"{name}-{digest.hexdigest()[:DIGITS]}.found"
    if not kept.exists():
        text = find()
        BUILD.mkdir(parents=True, exist_ok=True)
        _remove_stale(name, ".found")
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            written = Path(folder) / "found"
            written.write_text(text)
            written.replace(kept)
    return kept.read_text()


def _remove_stale(name: str, suffix: str) -> None:
    for stale in BUILD.glob(f"{name}-{'[0-9a-f]' * DIGITS}{suffix}"):
        stale.unlink(missing_ok=True)


def children() -> float:
    """CPU seconds of the processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


@functools.cache
def _included(source: Path, folders: tuple[Path, ...]) -> frozenset[Path]:
    """The source and all headers of this project that it includes, directly or not."""
    found, left = set(), [source]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            for name in re.findall(r'^ *# *include ["<]([^">]+)', file.read_text(), re.MULTILINE):
                paths = (folder / name for folder in (file.parent, *folders))
                left += [path for path in paths if path.is_file()][:1]
    return frozenset(found)
