"""Shared by all tests: threads, seeds, and the runs at lower CPU levels."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start():
    """Every test begins with the same seed and one thread, whatever ran before it.

    One, because the spinning threads of two pytest workers slow each other down tenfold; results do
    not depend on the number, which has tests of its own.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_report_header() -> str:
    from onepass import _C

    wanted = os.environ.get("ONEPASS_CPU_ISA", "not set")
    return f"onepass: CPU level {_C.cpu_level()} (ONEPASS_CPU_ISA {wanted})"
