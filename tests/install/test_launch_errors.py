"""A failed launch says whether the error may come from an earlier call, and clears it.

And which kernels may start before the one before them has ended, and what a kernel's first launch
asks for.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.install import nvcc
from tests.support import compiled

SOURCE = Path(__file__).with_name("launch_errors.cu")
INVALID_CONFIGURATION, ILLEGAL_ADDRESS = 9, 700
FAILS = "onepass: starting a kernel: "
EARLIER = "an illegal address; a kernel that was started earlier ran into it"


@pytest.mark.parametrize(
    "pending, failing, message",
    [
        (0, INVALID_CONFIGURATION, FAILS + "another error\n"),
        (0, ILLEGAL_ADDRESS, FAILS + EARLIER + " (CUDA_LAUNCH_BLOCKING=1 shows which)\n"),
        (
            INVALID_CONFIGURATION,
            ILLEGAL_ADDRESS,
            FAILS + "an illegal address; an error was pending before this call: another error\n",
        ),
    ],
)
def test_a_launch_that_fails(pending, failing, message):
    assert _said(pending, failing) == f"{message}pending: 0\n"


def test_an_error_of_somebody_else_stays_theirs():
    assert _said(INVALID_CONFIGURATION, 0) == f"pending: {INVALID_CONFIGURATION}\n"


@pytest.mark.parametrize(
    "driver, code, chosen, expected",
    [
        (12030, 90, "always", "early"),
        (13000, 120, "always", "early"),
        (13000, 120, "", "in turn"),  # by default
        (13000, 120, "never", "in turn"),
        (13000, 80, "always", "in turn"),  # old PTX, compiled for a newer device, does not wait
        (12020, 90, "always", "in turn"),
    ],
)
def test_a_kernel_starts_early_where_it_waits(monkeypatch, driver, code, chosen, expected):
    """Asked once; a kernel that does not follow another starts in turn."""
    monkeypatch.setenv("ONEPASS_CUDA_OVERLAP", chosen)
    said = f"{expected}\n{expected}\nin turn\nasked: 1\n"
    assert _said(driver, code, "following") == said


@pytest.mark.parametrize(
    "shared, asked", [(48 << 10, ""), (48 << 10 | 1, "shared memory 232448\ncarveout 100\n")]
)
def test_a_first_launch_inside_a_capture(shared, asked):
    """Code is loaded, and shared memory asked for, once and where the capture allows it."""
    assert _said(shared) == f"{asked}loaded: 1, mode: as before\n"


def _said(*given: int | str) -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("there is no nvcc")
    words = (compiler, "-std=c++20", f"-I{nvcc.ROOT / 'csrc'}", SOURCE, "-cudart", "none")
    (program,) = compiled.made([compiled.Recipe("launch_errors", words, (SOURCE,))])
    words = [str(program), *map(str, given)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
