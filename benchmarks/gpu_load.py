"""The clock and the power beside every figure of the report's own programs, as `bench` has them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu_machine import ROOT

# Seconds of the same work before a figure is known: kBusySeconds of gpu_fastest.cuh.
BUSY = 0.5


def sensors(device: str = "") -> Any:
    """Sensors of onepass.tools, a file that needs no build."""
    name = "onepass_bench_sensors"
    if name not in sys.modules:
        path = ROOT / "python" / "onepass" / "tools" / "sensors.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].Sensors(device)


def load_now(of: Any) -> Any:
    """The Load of the last BUSY seconds."""
    now = time.perf_counter()
    return of.between(now - BUSY, now)


def with_load(line: str, load: Any) -> str:
    return ", ".join(filter(None, [line, str(load)]))


def run(
    words: Sequence, of: Any, say: Callable[[str, Any], object], seconds: float = 60.0
) -> tuple[int | None, str]:
    """Runs a program that measures for BUSY seconds before it prints a figure.

    `say` gets each figure as it is printed, and the Load of these seconds. Returns the exit code,
    None if the program did not end in time, and what it wrote to stderr.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        ending = threading.Timer(seconds, process.kill)
        ending.daemon = True
        ending.start()
        for line in process.stdout:
            if line.startswith("figure "):
                say(line.rstrip(), load_now(of))
        code = process.wait()
        in_time = ending.is_alive()
        ending.cancel()
        errors.seek(0)
        return code if in_time else None, errors.read()
