"""Keeping freed memory, so that a training loop does not pay page faults in every step."""

from __future__ import annotations

import numbers
import warnings

from onepass import _malloc


def keep_freed_memory(limit: int | None = None) -> bool:
    """Lets this process keep the memory that tensors on the CPU have freed.

    glibc hands a freed block of more than 32 MiB back to the system. The next tensor of that size
    gets fresh pages, and each costs a page fault when it is first written: one per 4 KiB, in every
    step, in any library. From this call on, blocks stay in the heap and are reused after a few
    steps. The saving depends on the machine: `onepass doctor` measures the cost of a new tensor,
    ``onepass compare --keep-memory`` the gain of a training step.

    It costs resident memory. The process keeps its peak, and the heap grows beyond that before a
    loop finds all its blocks again (a block may need up to nine places).

    - It holds for the process and its forks (forked workers of a DataLoader), not for newly started
      processes.
    - The backward of a model on the CPU runs in the thread that calls it. Other threads than the
      main one have heaps of their own, of at most 64 MiB each: there larger blocks go back as
      before. With MALLOC_ARENA_MAX=1 in the environment all threads share the main one.
    - ``keep_freed_memory(0)`` undoes it, and gives free memory back. malloc's thresholds are then
      those that it comes to by itself, or those of the environment. Two things stay: large blocks
      that fit into a hole of the heap are still put there, and a free top of the heap is not
      returned if something in use, or another mapping, lies after it.

    Args:
        limit: bytes that may lie free at the top of the heap; if more do, all of it goes back. No
            more than a precaution: free memory below any block in use, however small, stays.
            None: everything is kept. 0: undone.

    Returns:
        whether malloc takes that. False, and a warning that says why, where memory is not glibc's:
        another C library, or jemalloc, tcmalloc and others in front of it (which keep freed memory
        by their own rules).

    Raises:
        TypeError: limit is no whole number.
        ValueError: limit is negative, or more than mallopt takes (2^31 - 1).

    Examples:
        >>> kept = onepass.keep_freed_memory()  # True where malloc is glibc's
        >>> undone = onepass.keep_freed_memory(0)
    """
    if isinstance(limit, bool) or not isinstance(limit, (numbers.Integral, type(None))):
        raise TypeError(
            f"keep_freed_memory: limit must be a whole number or None, got {type(limit).__name__}"
        )
    if limit is not None and not 0 <= limit <= _malloc.LARGEST:
        raise ValueError(
            f"keep_freed_memory: limit must be None or lie in [0, {_malloc.LARGEST}], got {limit}"
        )
    obeyed = _malloc.restore() if limit == 0 else _malloc.keep(limit and int(limit))
    if not obeyed:
        reason = _malloc.obstacle() or "mallopt refused"
        warnings.warn(f"keep_freed_memory: nothing is changed: {reason}", stacklevel=2)
    return obeyed
