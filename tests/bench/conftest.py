"""Stand-ins for programs of NVIDIA's that a machine without a device lacks."""

import os

import pytest

from tests.bench.machines import program


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Installs an nvidia-smi that writes its arguments to a file, then prints these lines.

    `again`: the seconds after which it prints them again.
    """

    def install(*lines: str, again: float | None = None):
        said = "\n".join(f"echo '{line}'" for line in lines)
        loop = f"while :; do\n{said}\nsleep {again}\ndone"
        then = loop if again else f"{said}\nexec sleep 60"
        program(tmp_path / "nvidia-smi", f'echo "$@" > {tmp_path}/asked\n{then}')
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "asked"

    return install
