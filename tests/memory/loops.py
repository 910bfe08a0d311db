"""Loops of tensors whose page faults and resident memory are counted.

A program: `python -m tests.memory.loops NAME...` prints {name: figures} as JSON, each found in a
fork of its own, whose heap is as imports left it.

Blocks are of 64 MiB, which malloc's defaults never keep: a fault per page, or (huge pages) per
2 MiB. A heap that keeps them first grows a few times (up to nine were seen): a free block is too
small for an aligned block of the same size.
"""

import ctypes
import functools
import json
import os
import sys
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable

import torch

import onepass
from onepass import _malloc
from onepass.tools.machine import page_faults, recycled_memory
from tests.support import isolated

GROWING = 12  # steps until a heap that keeps its blocks has all it needs
COUNTED = 4


def block(mebibytes: int = 64) -> torch.Tensor:
    return torch.zeros(mebibytes << 18)


def beyond_holes() -> torch.Tensor:
    """A block that fits into no hole of the heap; as many bytes are written as in other blocks."""
    return torch.empty(12 * (64 << 18))[: 64 << 18].zero_()


def faults(work: Callable[[], object] = block, warm_up: int = GROWING) -> int:
    """Page faults of some steps after the warm-up."""
    for _ in range(warm_up):
        work()
    before = page_faults()
    for _ in range(COUNTED):
        work()
    return page_faults() - before


def resident() -> int:
    """Mebibytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def in_thread(work: Callable[[], object]) -> object:
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def bench():
    fresh = faults(warm_up=1)
    with recycled_memory() as recycled:
        kept = faults()
    return fresh, kept, faults(beyond_holes), recycled


def backward():
    x, weight, threads = torch.ones(16 << 20), torch.ones((), requires_grad=True), set()
    weight.register_hook(lambda gradient: threads.add(threading.current_thread()))

    def step():
        (x * weight * weight).sum().backward()

    fresh = faults(step, warm_up=1)
    onepass.keep_freed_memory()
    return fresh, faults(step), threads == {threading.main_thread()}


def undone():
    before = resident()
    onepass.keep_freed_memory()
    blocks = [block() for _ in range(6)]
    del blocks
    kept = resident() - before
    onepass.keep_freed_memory(0)
    return kept, resident() - before


def undone_small():
    onepass.keep_freed_memory()
    onepass.keep_freed_memory(0)
    return faults(lambda: block(8)), faults(warm_up=1)


def in_the_heap(apart: bool = False):
    """(mebibytes that freed blocks below one in use leave resident, whether malloc obeyed)."""
    faults(lambda: block(24), warm_up=1)  # from now on malloc has such blocks in its heap
    obeyed = apart and _malloc.map_apart()
    before = resident()
    blocks = [block(24) for _ in range(4)]
    del blocks[:3]
    return resident() - before - 24, obeyed


apart = functools.partial(in_the_heap, True)


def below_the_limit(limit: int = 128 << 20):
    """malloc itself limits this: it caches the rest that it cuts off an aligned block, which may be
    the top of the heap."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    obeyed = onepass.keep_freed_memory(limit)
    before = resident()
    held = libc.malloc(64 << 20)
    ctypes.memset(held, 0, 64 << 20)
    most = resident() - before
    libc.free(held)
    return obeyed, most, resident() - before


beyond_the_limit = functools.partial(below_the_limit, 16 << 20)


def forked():
    onepass.keep_freed_memory()
    return [isolated.each(lambda name: faults(), ["child"])["child"]]


def in_threads():
    onepass.keep_freed_memory()
    return in_thread(lambda: faults(lambda: block(24))), in_thread(faults), faults()


def undone_twice():
    started = faults()
    onepass.keep_freed_memory(1 << 20)
    onepass.keep_freed_memory(0)
    return started, faults()


def refused():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        obeyed = onepass.keep_freed_memory()
    return obeyed, [str(warning.message) for warning in told]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    found = [isolated.each(lambda name: globals()[name](), [name]) for name in names]
    print(json.dumps(dict(ChainMap(*found))))


if __name__ == "__main__":
    main(sys.argv[1:])
