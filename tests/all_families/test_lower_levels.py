"""The tests marked isa, run again in processes at a lower CPU level."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onepass import _C

FOLDER = Path(__file__).parents[1]
FILES = sorted(
    str(file.relative_to(FOLDER))
    for file in FOLDER.rglob("test_*.py")
    if "mark.isa" in file.read_text() and file.name != Path(__file__).name
)
EVERY = 25  # of the tests, among the quick ones
# Of all tests. Below avx512_bf16 only products of bfloat16 differ at avx512.
EVERY_OF_LEVEL = {"baseline": 1, "avx2": 1, "avx512": 4}
PARTS = 2  # of the files


def run(level: str, files: list[str], markers: str, every: int = 1) -> None:
    if level not in _C.cpu_levels() or level == _C.cpu_level():
        pytest.skip(f"{level} is not a lower level of this machine")
    if "ONEPASS_CPU_ISA" in os.environ:
        pytest.skip("already at a chosen level")
    command = [sys.executable, "-m", "pytest", "-x", "-m", markers, "-p", "no:cacheprovider"]
    environment = {**os.environ, "ONEPASS_CPU_ISA": level, "ONEPASS_TEST_EVERY": str(every)}
    result = subprocess.run(
        [*command, *(str(FOLDER / file) for file in files)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert f"CPU level {level}" in result.stdout


def test_some_at_a_lower_level():
    """Values of each family: to collect all files takes longer than to run these tests."""
    files = [file for file in FILES if file.endswith("test_values.py")]
    run("avx2" if _C.cpu_level() != "avx2" else "baseline", files, "isa and not slow", EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("level", EVERY_OF_LEVEL)
def test_all_at_lower_levels(level, part):
    """In parts, so that workers share them; to start a process takes three seconds."""
    run(level, FILES[part::PARTS], "isa", EVERY_OF_LEVEL[level])
