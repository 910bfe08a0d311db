"""Stand-ins for programs of NVIDIA's that a machine without a device lacks."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Installs an nvidia-smi that writes its arguments to a file, then prints these lines.

    `again`: the seconds after which it prints them again.
    """

    def install(*lines: str, again: float | None = None):
        said = "".join(f"echo '{line}'\n" for line in lines)
        loop = f"while :; do\n{said}sleep {again}\ndone\n"
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
            + (loop if again else f"{said}exec sleep 60\n")
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "asked"

    return install
