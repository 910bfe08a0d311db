"""The device tests with the CPU in the place of the device: `make test-device` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_of_each_file():
    """A wrong line in what device tests share is found where there is no device."""
    files = [f"tests/{family}/test_values.py" for family in ("norm", "loss", "attention")]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {"ONEPASS_TEST_DEVICE": "cpu", "ONEPASS_TEST_FIRST": "device"}
    run = subprocess.run(
        [*words, *files, "tests/device"],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(run.stdout.rpartition(" passed")[0].split()[-1]) >= len(files) + 6, run.stdout
