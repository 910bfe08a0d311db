"""The CPUs that `make test-cpus` imitates look to onepass and torch as they should."""

import subprocess
import sys

import pytest

from onepass import _C
from tests.support import cpus

ASK = (
    "import torch, onepass; from onepass import _C; from onepass._policy import products; "
    "f = products.facts(); "
    "print(_C.cpu_level(), f.vendor, f.bfloat16, torch.backends.cpu.get_cpu_capability())"
)


def asked(name: str) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", ASK],
        env=cpus.environment(name), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.split()


# Each takes two seconds, to import torch; the others have no variable that these lack.
QUICK = ("avx2", "baseline", "intel-no-bfloat16-dots")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in cpus.MACHINES]
)
def test_a_machine_looks_as_it_should(name):
    machine = cpus.MACHINES[name]
    if machine.level and machine.level not in _C.cpu_levels():
        pytest.skip(f"this CPU has no level {machine.level}")
    level, vendor, bfloat16, capability = asked(name)
    assert level == (machine.level or _C.cpu_level())
    assert not machine.vendor or vendor == machine.vendor
    if machine.level:
        assert bfloat16 == "False"
    if "ATEN_CPU_CAPABILITY" in machine.variables:
        assert capability == machine.variables["ATEN_CPU_CAPABILITY"].upper()
