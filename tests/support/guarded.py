"""Tensors that end, or begin, where the process may not read: one element beyond is a fault."""

import ctypes
import mmap

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NOBODY = 0  # PROT_NONE


def guarded(tensor: Tensor, *, end: bool = True) -> Tensor:
    """The values, in separate memory between two inaccessible pages.

    The last element ends at the second of these pages, or (end=False) the first one begins after
    the first. A fault ends the process, so make calls in a child (isolated.each); its end
    frees the memory.
    """
    size = tensor.numel() * tensor.element_size()
    inside = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    begin = _libc.mmap(None, inside + 2 * mmap.PAGESIZE, access, flags, -1, 0)
    if begin in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    first = begin + mmap.PAGESIZE
    for guard in (begin, first + inside):
        if _libc.mprotect(guard, mmap.PAGESIZE, _NOBODY) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    memory = (ctypes.c_char * size).from_address(first + (inside - size if end else 0))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
