"""Faults from inside: a KeyboardInterrupt at the n-th bytecode of a call.

CPython delivers a signal between two bytecodes, so a state that survives this survives Ctrl-C. The
trace counts bytecodes of the frames whose file is in one of the given folders; code that they call
elsewhere (torch, the standard library) is not counted.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import onepass

PACKAGE = os.path.dirname(onepass.__file__)


class _Trace:
    """Counts bytecodes while installed, and raises at one of them."""

    def __init__(self, folders: tuple[str, ...], at: int | None):
        self.folders, self.at, self.count = folders, at, 0
        self.runs: dict[tuple, list[int]] = {}  # of each instruction: its first and last number

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.folders):
            return None
        frame.f_trace_opcodes = True
        return self._in_frame

    def _in_frame(self, frame, event, argument):
        if event == "opcode":
            self.count += 1
            runs = self.runs.setdefault((frame.f_code, frame.f_lasti), [self.count, 0])
            runs[1] = self.count
            if self.count == self.at:
                raise KeyboardInterrupt(f"bytecode {self.at}")
        return self._in_frame


def run_interrupted(
    call: Callable[[], Any], at: int | None, folders: tuple[str, ...] = (PACKAGE,)
) -> tuple[bool, _Trace]:
    """Calls `call`, interrupted at its at-th bytecode (None: not at all).

    Returns:
        (whether the interrupt left the call, what ran).
    """
    trace = _Trace(folders, at)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True, trace
    finally:
        sys.settrace(before)
    return False, trace


def every_instruction(call: Callable[[], Any]) -> list[int]:
    """The number of every bytecode; for one that runs often, its first and last run."""
    left, trace = run_interrupted(call, None)
    assert not left
    return sorted({number for runs in trace.runs.values() for number in runs})


def interruptions(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    *,
    most: int = 400,
    folders: tuple[str, ...] = (PACKAGE,),
) -> Iterator[tuple[int, Any]]:
    """(n, subject) for each n: `subject = make()` after `call(subject)` was interrupted at n.

    All n if the call has at most `most` bytecodes, else the first and last quarter of `most` and as
    many others, drawn once. The last ones are half neighbours, half at doubled distances
    from the end: a call may run a dozen bytecodes fewer than the one that was counted. The caller
    compares the subject with one that was never touched; an n whose interrupt `call` swallowed
    fails here.
    """
    subject = make()
    left, trace = run_interrupted(lambda: call(subject), None, folders)
    total = trace.count
    assert not left and total > 0, "the call runs no bytecode of the package"
    points = list(range(1, total + 1))
    if total > most:
        ends = most // 4
        middle = random.Random(0).sample(points[ends:-ends], most - 2 * ends)
        near = ends - ends // 2
        doubled = [total - (near << k) for k in range(1, ends // 2 + 1) if near << k < total]
        points = sorted({*points[:ends], *middle, *doubled, *points[-near:]})
    for at in points:
        subject = make()
        interrupted, trace = run_interrupted(lambda subject=subject: call(subject), at, folders)
        assert interrupted or trace.count < at, f"the interrupt at {at} of {total} was swallowed"
        if interrupted:
            yield at, subject


def bits(value: Any) -> Any:
    """`value` with every tensor as its bytes and metadata, to be compared with ==."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), value.stride(), data.numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        found = [bits(item) for item in value]
        return tuple(found) if type(value) is tuple else found
    if isinstance(value, Path):
        return value.read_bytes() if value.exists() else None
    return value
