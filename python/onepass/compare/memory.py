"""Peak memory of one training step, in a process of its own.

Runs as ``python -m onepass.compare.memory JSON``. A peak is the high-water mark during the step
minus the level before it, on CUDA that of torch's allocator. A process of its own, because freed
memory stays with the process that freed it and would hide the next variant's need.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import resource
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from onepass.compare.data import Text, load_text
from onepass.compare.settings import Settings, make_current
from onepass.compare.train import Trainer
from onepass.compare.workload import GptWorkload, UserWorkload

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def peaks_of_steps(
    variants: Sequence[str], dropout: float | None, settings: Settings
) -> dict[str, int]:
    """Bytes that one step of each variant ("stock", "swapped", "compiled ...") needs at most."""
    task = {"variants": variants, "dropout": dropout, "settings": settings.to_dict()}
    command = [sys.executable, "-m", "onepass.compare.memory", json.dumps(task)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"compare: measuring peak memory failed\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main(task_text: str) -> None:
    """Prints the bytes by variant; this process imports, and one forked from it measures each."""
    import torch._dynamo  # noqa: F401  (which torch's optimizers import, for seconds)

    task = json.loads(task_text)
    settings = Settings.from_dict(task["settings"], command="")
    text = None if settings.model else load_text(settings.text)
    # What has looked at CUDA cannot go on there in a fork.
    context = multiprocessing.get_context("spawn" if settings.device.type == "cuda" else "fork")
    peaks = {}
    for variant in task["variants"]:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, variant, task["dropout"], settings, text)
        process = context.Process(target=_measure, args=arguments)
        process.start()
        sender.close()
        try:
            peaks[variant] = receiver.recv()
        except EOFError:
            sys.exit(f"{variant}: no figure")
        process.join()
    print(json.dumps(peaks))


def _measure(
    sender: Connection, variant: str, dropout: float | None, settings: Settings, text: Text | None
) -> None:
    torch.set_num_threads(settings.threads)
    make_current(settings.device)
    if text is None:
        workload = UserWorkload(settings)
    else:
        workload = GptWorkload(settings, text, settings.speed, dropout)
    model = workload.build()
    if variant.endswith("swapped"):
        settings.swap(model)
    compiled = variant.startswith("compiled")
    trainer = Trainer(model, settings, compiled)
    # Optimizer state, caches, compiled code: there before the level is taken. A small batch leaves
    # little freed memory behind for the measured step to reuse.
    trainer.step(workload.batch(0) if compiled else workload.small_batch())
    batch = workload.batch(0)
    gc.collect()
    measure = _cuda_peak if settings.device.type == "cuda" else _cpu_peak
    sender.send(measure(lambda: trainer.step(batch)))


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
