"""The clock and the power of a CUDA device while it is measured, as nvidia-smi reports them.

A figure says little without them: a device that is hot, or limited in power, runs at another speed.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

INTERVAL_MS = 100
QUERY = "clocks.sm,power.draw"


@dataclass(frozen=True)
class Load:
    """Medians of a time; None where nothing is known."""

    sm_mhz: float | None = None
    watts: float | None = None

    def __str__(self) -> str:
        values = ((self.sm_mhz, "MHz"), (self.watts, "W"))
        return ", ".join(f"{value:.0f} {unit}" for value, unit in values if value is not None)


@dataclass
class Sensors:
    """Samples of torch's current device, taken from when this is made until `close`.

    Without nvidia-smi or a device, or for a device that it does not know, there are none.
    """

    device: str = ""  # as nvidia-smi's --id takes it; empty: torch's current one
    _samples: list[tuple[float, float | None, float | None]] = field(default_factory=list)
    _process: subprocess.Popen | None = None

    def __post_init__(self):
        device = self.device or _current()
        if device is None:
            return
        words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        words += [f"--loop-ms={INTERVAL_MS}", f"--id={device}"]
        try:
            self._process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            clock, _, power = line.partition(",")
            self._samples.append((time.perf_counter(), _number(clock), _number(power)))

    def between(self, start: float, end: float) -> Load:
        """Median load between two values of time.perf_counter()."""
        found = [sample[1:] for sample in list(self._samples) if start <= sample[0] <= end]
        return Load(*(_median(of) for of in zip(*found, strict=True)))

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _current() -> str | None:
    """UUID of the current device: torch and nvidia-smi may number devices differently."""
    import torch  # here: gpu_load.py of benchmarks/ has this file without onepass

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    return f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())


def _number(text: str) -> float | None:
    """None for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
