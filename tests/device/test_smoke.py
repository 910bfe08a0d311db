"""Every instance of a kernel once, on the device, in less than a minute.

The calls are those of test_each_instance of each family, which knows under the emulator that no
instance is left out (but one that only a device with less shared memory takes). Each family has a
process of its own: after an illegal access no other kernel runs in a process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib

import pytest

from tests.device.common import needs_device
from tests.emulator.executors import DEVICE, OnDevice, replaced_operators
from tests.support import fresh

pytestmark = needs_device

FAMILIES = ("norm", "modulated_norm", "dropout", "gate", "group_norm", "loss", "rotary")
FAMILIES += ("attention_decode", "attention", "optimizer")


class Smoke(OnDevice):
    """In the place of the emulator. Of its settings a device takes the bytes by which tensors are
    not aligned."""

    def set(self, shift: int | None = None, **settings: int) -> None:
        if shift is not None:
            self.shift = shift

    done = (None,)  # no counts

    @contextlib.contextmanager
    def under_the_package(self):
        with replaced_operators(lambda op: functools.partial(self.run, op)):
            yield

    @contextlib.contextmanager
    def sanitized(self, build: str, *kernels: str, **settings: int):
        yield


def run(family: str) -> None:
    """The calls of a family; raises at the first that fails."""
    smoke = Smoke()
    each_instance = importlib.import_module(f"tests.{family}.test_cuda").each_instance
    if family == "optimizer":  # whose steps have tensors on the device: its state stays there
        each_instance(smoke, None)
    else:
        with smoke.under_the_package():
            each_instance(smoke)
    assert smoke.calls
    print(f"{smoke.calls} calls on {DEVICE}")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_instance_runs(family):
    result = fresh.run(f"from tests.device.test_smoke import run; run({family!r})")
    assert result.returncode == 0, result.stderr[-3000:]
    assert f" calls on {DEVICE}" in result.stdout
