"""The smoke program: every instance on a device, and what it says of one that is wrong."""

import os
import subprocess
import sys

import pytest

from tests.device.common import needs_device
from tests.device.families import FAMILIES
from tests.support import resumed

# In the place of the device's calls: some raise, give other values, or end the process.
FAULTS = """
import os, sys
from tests.device import smoke
from tests.emulator.executors import OnDevice
from tests.support import resumed

before = OnDevice.run

def run(self, op, *arguments, **keywords):
    if self.count == 3:
        raise RuntimeError("an illegal access")
    if self.count == 7:
        os.abort()
    found = before(self, op, *arguments, **keywords)
    return found * 1.5 if self.count == 5 else found

OnDevice.run = run
raise SystemExit(smoke.main(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=needs_device) for family in FAMILIES]
)
def test_each_instance_runs(tmp_path, family):
    code = resumed.run(tmp_path / "cases", 60.0, "tests.device.smoke", [family])
    found, _ = resumed.results(tmp_path / "cases")
    assert code == 0 and found, [case for case in found.values() if case.outcome == "failed"]


def test_a_fault_is_one_line_and_the_next_calls_run(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "tests.support.resumed", "--results", tmp_path / "cases"]
    done = subprocess.run(
        [*words, "faulty", "dropout"],
        env=os.environ | {"ONEPASS_TEST_DEVICE": "cpu", "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    found = list(resumed.results(tmp_path / "cases")[0].values())
    assert done.returncode == 1 and len(found) == 100, done.stderr
    bad = {case.case.split(":")[0]: case.why for case in found if case.outcome == "failed"}
    assert list(bad) == ["dropout 3", "dropout 5", "dropout 7"]
    assert bad["dropout 3"] == "RuntimeError: an illegal access"
    assert bad["dropout 5"] == "AssertionError: result 0 is off by 5.0e-01"
    assert bad["dropout 7"] == "ended its process: SIGABRT"
    assert "float32 1000" in found[0].case
