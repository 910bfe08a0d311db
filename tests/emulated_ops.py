"""Runs an operator of the emulated CUDA back end on files, for attention, whose tests do not run on
the executors yet (tests/executors.py).
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import emulated
import torch
from executors import Launch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Calls:
    """The calls of one test: plan, launches and counted bytes, by op."""

    program: tuple[str, ...] = ()  # the name, and the kernels that it is linked with
    build: str = "plain"
    seed: int = 0
    resident: int = 1  # blocks that run at the same time, at least
    shared: int = 227 * 1024  # bytes that a block may have
    misalign: int = 0  # bytes that tensors of rows begin beyond a multiple of 16
    misaligned: str = ""  # the tensors that do, a pattern of their names; empty: all of them
    done: list[dict] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)  # of the kernels that ran

    def of(self, op: str) -> list[dict]:
        return [call for call in self.done if call["op"] == op]


def all_instances(build: str, program: tuple[str, ...]) -> set[str]:
    """Every instance of a kernel that the ops of a program could launch."""
    name, *kernels = program
    executable = emulated.program(name, build, *kernels)
    return set(emulated.run(executable, "--kernels").stdout.splitlines())


def run(calls: Calls, op: str, numbers: dict, tensors: dict[str, Tensor | None]) -> None:
    """Runs the op; tensors that it writes change in place."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    moved = {}
    for name, tensor in present.items():
        pattern = calls.misaligned
        hit = re.fullmatch(pattern, name) if pattern else tensor.dim() > 1
        moved[name] = calls.misalign if hit else 0
    run_case(calls, op, numbers, present, moved)


def run_case(
    calls: Calls, op: str, numbers: dict, storages: dict[str, Tensor], moved: dict[str, int],
    views: dict[str, tuple[str, int]] | None = None,
) -> None:  # fmt: skip
    """Runs the op on whole storages, which change in place, each so many bytes beyond a multiple of
    16; views are (name of a storage, bytes behind its beginning).
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"op {op}"]
        lines += [f"{name} {_number(value)}" for name, value in numbers.items()]
        parts = []
        for name, tensor in storages.items():
            data = _bytes(tensor)
            lines.append(f"{name}: {data.numel()} {moved[name]}")
            parts.append(data.numpy().tobytes())
        lines += [f"{name}@ {of} {behind}" for name, (of, behind) in (views or {}).items()]
        file = Path(folder, "tensors.bin")
        file.write_bytes(b"".join(parts))
        Path(folder, "case.txt").write_text("\n".join(lines))
        name, *kernels = calls.program
        program = emulated.program(name, calls.build, *kernels)
        result = emulated.run(
            program, folder, seed=calls.seed, resident=calls.resident, shared=calls.shared
        )
        assert result.returncode == 0, f"{result.returncode}: {numbers}\n{result.stderr[-3000:]}"
        assert not result.stderr, result.stderr[-3000:]
        plan = dict(line.split() for line in result.stdout.splitlines())
        assert "kernel" in plan, f"the program has no {op}"
        lines = Path(folder, "counters.txt").read_text().splitlines()
        counted = {name: int(value) for name, value in map(str.split, lines)}
        plan |= {name: int(value) for name, value in plan.items() if name != "kernel"}
        launches = [
            Launch(*map(int, line.split(" ", 3)[:3]), line.split(" ", 3)[3])
            for line in Path(folder, "kernels.txt").read_text().splitlines()
        ]
        calls.done.append({"op": op, **plan, **counted, "launched": launches})
        calls.instances.update(launch.kernel for launch in launches)
        read = torch.frombuffer(bytearray(file.read_bytes()) or bytearray(1), dtype=torch.uint8)
        begin = 0
        for tensor, part in zip(storages.values(), parts, strict=True):
            _bytes(tensor).copy_(read[begin : begin + len(part)])
            begin += len(part)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's whole storage."""
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(tensor.detach().untyped_storage())


def _number(value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, torch.dtype):
        return str(DTYPES.index(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value)
