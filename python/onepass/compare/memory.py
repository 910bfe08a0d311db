"""Peak memory of one training step, in a process of its own.

Runs as ``python -m onepass.compare.memory JSON`` and prints {"peak_bytes": N}: the high-water mark
during the step minus the level before it, on CUDA that of torch's allocator. A process of its own,
because freed memory stays with the process that freed it and would hide the next variant's need.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

import onepass
from onepass.compare.data import load_text
from onepass.compare.settings import Settings, make_current
from onepass.compare.train import Trainer
from onepass.compare.workload import GptWorkload, UserWorkload

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def peak_of_step(variant: str, dropout: float | None, settings: Settings) -> int:
    """Bytes that one step of a variant ("stock", "swapped", "compiled ...") needs at most."""
    task = {"variant": variant, "dropout": dropout, "settings": settings.to_dict()}
    command = [sys.executable, "-m", "onepass.compare.memory", json.dumps(task)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"compare: measuring peak memory of {variant} failed\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])["peak_bytes"]


def main(task_text: str) -> None:
    task = json.loads(task_text)
    settings = Settings.from_dict(task["settings"], command="")
    torch.set_num_threads(settings.threads)
    make_current(settings.device)
    if settings.model:
        workload = UserWorkload(settings)
    else:
        text = load_text(settings.text)
        workload = GptWorkload(settings, text, settings.speed, task["dropout"])
    model = workload.build()
    if task["variant"].endswith("swapped"):
        onepass.swap(model)
    compiled = task["variant"].startswith("compiled")
    trainer = Trainer(model, settings, compiled)
    # Optimizer state, caches, compiled code: there before the level is taken. A small batch leaves
    # little freed memory behind for the measured step to reuse.
    trainer.step(workload.batch(0) if compiled else workload.small_batch())
    batch = workload.batch(0)
    gc.collect()
    measure = _cuda_peak if settings.device.type == "cuda" else _cpu_peak
    print(json.dumps({"peak_bytes": measure(lambda: trainer.step(batch))}))


def _cuda_peak(step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(step) -> int:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc's: give freed pages back, so that they count again
    except AttributeError:
        pass
    try:
        _CLEAR_REFS.write_text("5")  # the high-water mark starts anew from the present level
    except OSError:
        pass  # not allowed everywhere; then the mark may be older than the step, if that is higher
    before = _status_bytes("VmRSS")
    step()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    # Kernels that leave the field out still count the mark here, in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(sys.argv[1])
