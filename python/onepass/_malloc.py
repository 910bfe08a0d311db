"""glibc's malloc: whether it serves this process, and whether it keeps freed memory.

By default it maps large blocks apart from its heap and unmaps them when they are freed. So every
large output costs a page fault per 4 KiB, in any library: beyond the cache these faults take longer
than any kernel here. With M_MMAP_MAX=0 all blocks are in the heap, and without M_TRIM_THRESHOLD
its top stays: a loop reuses its blocks after a few iterations, as under jemalloc. Standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

# Parameters of mallopt(3), by the name that GLIBC_TUNABLES has for them.
_PARAMETERS = {"trim_threshold": -1, "mmap_threshold": -3, "mmap_max": -4}
# In the environment malloc reads top_pad too.
_TUNABLES = (*_PARAMETERS, "top_pad")
_DEFAULTS = {"trim_threshold": 128 << 10, "mmap_threshold": 128 << 10, "mmap_max": 65536}
# malloc raises its thresholds as large blocks are freed, until one of them is set. It ends here.
_ADAPTED = _DEFAULTS | {"trim_threshold": 64 << 20, "mmap_threshold": 32 << 20}

LARGEST = 2**31 - 1  # mallopt takes an int


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def obstacle() -> str:
    """Why the malloc that serves torch cannot be configured; empty if it is glibc's."""
    process = _process()
    if not (hasattr(process, "mallopt") and hasattr(process, "gnu_get_libc_version")):
        return "this C library is not glibc"
    serving, glibc = (_file_of(name) for name in ("posix_memalign", "gnu_get_libc_version"))
    if serving != glibc:
        return f"memory is that of {Path(serving).name}, not of glibc"
    return ""


def keep(limit: int | None) -> bool:
    """Keeps all blocks in the heap from now on, and up to limit free bytes at its top.

    None: all. Returns whether malloc accepts that.
    """
    return not obstacle() and _set(
        {"mmap_max": 0, "trim_threshold": -1 if limit is None else limit}
    )


def map_apart() -> bool:
    """Maps and unmaps blocks of 128 KiB and more separately from now on, as when the
    process began: only memory in use is resident, because the heap has no large holes.

    Returns whether malloc accepts that.
    """
    return not obstacle() and _set({"mmap_threshold": _DEFAULTS["mmap_threshold"]})


def restore() -> bool:
    """Sets the environment's values, else malloc's own defaults; frees the memory that it can.

    glibc continues to serve large blocks from holes of its heap, and the top of a heap stays if
    something was mapped after it.
    """
    from_environment = told()
    values = (_DEFAULTS if from_environment else _ADAPTED) | from_environment
    restored = not obstacle() and _set({name: values[name] for name in _PARAMETERS})
    trim()
    return restored


def trim() -> None:
    """Gives freed memory back to the system, so that new tensors get new pages."""
    if hasattr(process := _process(), "malloc_trim"):
        process.malloc_trim(0)


def told() -> dict[str, int]:
    """The environment's settings of freed memory, by glibc's names; GLIBC_TUNABLES win."""
    pairs = [entry.partition("=") for entry in os.environ.get("GLIBC_TUNABLES", "").split(":")]
    tunables = {name: value for name, _, value in pairs}
    values = {}
    for name in _TUNABLES:
        text = tunables.get(f"glibc.malloc.{name}", os.environ.get(f"MALLOC_{name.upper()}_", ""))
        if re.fullmatch(r"-?(\d+|0x[\da-fA-F]+)", text):
            values[name] = int(text, 16 if "x" in text else 10)
    return values


def _process() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if os.name == "posix" else None


def _file_of(name: str) -> str:
    """The shared object that a function of this process comes from."""
    process, symbol = _process(), _Symbol()
    address = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    process.dladdr(address, ctypes.byref(symbol))
    return os.fsdecode(symbol.file or b"")


def _set(values: dict[str, int]) -> bool:
    mallopt = _process().mallopt
    return all(
        mallopt(_PARAMETERS[name], min(value, LARGEST)) == 1 for name, value in values.items()
    )
