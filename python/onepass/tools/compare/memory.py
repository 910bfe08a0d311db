"""Peak memory of one training step, or with --generate of one call, in a separate process.

Runs as ``python -m onepass.tools.compare.memory JSON``. A peak is the high-water mark during the
step minus the level before it, on CUDA that of torch's allocator. A separate process, because freed
memory stays in the process that freed it and would hide the next variant's need. With kept memory
the peak is that of a few steps: the memory that such a process keeps.

Elsewhere large blocks are mapped apart from glibc's heap (`_malloc.map_apart`). By default glibc
soon serves blocks of up to 32 MiB from its heap, whose holes are resident too: at the default sizes
without dropout they add 13 to 55 MiB to stock and 46 to 58 to swapped, by chance.
The tensors alive at once are 306 and 307 MiB there (torch's profiler), and these peaks 312 and 308.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import onepass
from onepass import _malloc
from onepass.tools.compare.inference import Inference
from onepass.tools.compare.settings import Settings, make_current
from onepass.tools.compare.variants import COMPILED, KEPT, trainer_of
from onepass.tools.compare.workload import workload_of
from onepass.tools.data import Text, load_text

KEPT_STEPS = 4  # in which the heap of a process that keeps freed memory grows most
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def peaks_of_steps(
    variants: Sequence[str], dropout: float | None, settings: Settings
) -> dict[str, int]:
    """Bytes that one step, or with --generate one call, of each variant needs at most."""
    task = {"variants": variants, "dropout": dropout, "settings": settings.task()}
    command = [sys.executable, "-m", "onepass.tools.compare.memory", json.dumps(task)]
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
    # After CUDA is initialized, a fork cannot use it.
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
    if variant.endswith(KEPT):
        onepass.keep_freed_memory()
    else:
        _malloc.map_apart()
    measure = _cuda_peak if settings.device.type == "cuda" else _cpu_peak
    if settings.generate:
        work = _inference(variant, settings)
    else:
        work = _training(variant, workload_of(settings, text, dropout), settings)
    with work as measured:
        gc.collect()
        sender.send(measure(measured))


@contextlib.contextmanager
def _training(variant: str, workload, settings: Settings) -> Iterator[Callable[[], None]]:
    """A step, or with kept memory a few, after a warm-up."""
    trainer, _ = trainer_of(variant, workload.build(), settings)
    # Optimizer state, caches, compiled code: there before the level is taken. A small batch leaves
    # little freed memory behind for the measured step to reuse.
    trainer.step(workload.batch(0) if variant.startswith(COMPILED) else workload.small_batch())
    batch = workload.batch(0)

    def steps() -> None:
        for _ in range(KEPT_STEPS if variant.endswith(KEPT) else 1):
            trainer.step(batch)

    yield steps


@contextlib.contextmanager
def _inference(variant: str, settings: Settings) -> Iterator[Callable[[], object]]:
    """A call, after one as a warm-up."""
    inference = Inference(settings)
    call, _ = inference.variant(variant)
    with inference.inside():
        call(inference.count)
        yield functools.partial(call, inference.count)


def _cuda_peak(step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(step) -> int:
    _malloc.trim()  # returned pages count again
    try:
        _CLEAR_REFS.write_text("5")  # resets the high-water mark to the present level
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
