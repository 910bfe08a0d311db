"""Facts beside the code on which a figure depends: the machine, the software, the allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from onepass import _malloc

_MAX_HOLES = 256


def machine_facts() -> dict[str, str | int]:
    """CPU, instruction sets, threads, GPU, versions and commit: the footer of every table."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "isa": _level(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "onepass": _version(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts |= _gpu_facts()
    return facts


def command_line() -> str:
    """The command that this process was started with, to be run again."""
    return "onepass " + shlex.join(sys.argv[1:])


def page_faults() -> int:
    """Page faults of this process so far that needed no disk: pages touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class OtherLoad:
    """How many cores other processes (not this one or its children) used since this was made.

    On a busy machine threads wait for each other and ratios are unreliable: a benchmark must say
    so. Time taken by a hypervisor counts as well.
    """

    def __init__(self):
        self._start = self._read()

    def cores(self) -> float | None:
        """None if the system does not report it."""
        if self._start is None or (now := self._read()) is None:
            return None
        busy, own, wall = (end - start for end, start in zip(now, self._start, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        try:
            with open("/proc/stat", encoding="ascii") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return busy, sum(times[:4]), times.elapsed


@contextlib.contextmanager
def recycled_memory() -> Iterator[bool]:
    """Inside, freed memory stays in the process; yields whether the allocator complies.

    Otherwise page faults of fresh outputs hide every kernel (`onepass._malloc`).
    """
    try:
        yield _malloc.keep(None)
    finally:
        _malloc.restore()


@contextlib.contextmanager
def medium_precision() -> Iterator[None]:
    """Inside, torch may multiply float32 matrices in bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fill_holes(block_bytes: int) -> list[torch.Tensor]:
    """Takes every free block of that size below the top of the heap; the result holds them.

    Then a large output comes from the top, with the same address in every call. With holes left, a
    loop's outputs alternate between two or three of them, which can triple its memory in the cache:
    by chance, for one variant and not for another.
    """
    break_of = getattr(ctypes.CDLL(None), "sbrk", None)
    if break_of is None:
        return []
    break_of.argtypes, break_of.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    taken = []
    for _ in range(_MAX_HOLES):
        before = break_of(0)
        block = torch.empty(block_bytes, dtype=torch.uint8, device="cpu")
        if break_of(0) != before:  # the heap had to grow for it
            break
        taken.append(block)
    return taken


def _cpu_name() -> str:
    """The model name and, since virtual machines shorten it, family and model number."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def _gpu_facts() -> dict[str, str | int]:
    """torch's current CUDA device, its driver and the CUDA that torch was built with."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_l2": f"{properties.L2_cache_size >> 20} MiB",
        "gpu_memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "cuda": torch.version.cuda or "none",
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return output.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _level() -> str:
    try:
        from onepass import _C
    except ImportError:
        return "not built"
    return _C.cpu_level()


def _version() -> str:
    import onepass

    return getattr(onepass, "__version__", "unknown")


def _commit() -> str:
    """The commit of the checkout that this is imported from; an installed wheel has none."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return "none (not a checkout)"
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "none (not a checkout)"


def medium_has_effect() -> bool:
    """Whether medium precision changes this torch's products on this CPU."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(1024, 1024, generator=generator, device="cpu")[:128] for _ in range(2)
    )
    product = left @ right.t()
    with medium_precision():
        return not torch.equal(product, left @ right.t())
