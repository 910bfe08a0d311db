"""The executors, which run a test's operators: the CPU, emulated CUDA kernels, a CUDA device.

A test with the fixture `executor` (or marked `everywhere`) runs once on each. Its tensors are on
the CPU in each case; for the other two, only the operators under the public functions are replaced.

The tests' library (tests/cuda_emulator/runtime_emulated.cpp) is csrc/ops and csrc/cuda as they
ship, registered as `onepass_emulated::*` for tensors on the CPU. It runs every call on a copy of
its memory between guard bands, new memory is poison, and it counts what kernels read and write.
Checks that fail in a kernel are exceptions here.

On a device every call gets copies of its tensors, with the memory around them.
ONEPASS_TEST_DEVICE=cpu makes the copies on the CPU, to try that where there is no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from onepass import _library, _ops
from onepass._ops import operator
from tests.emulator import emulated

DEVICE = torch.device(os.environ.get("ONEPASS_TEST_DEVICE", "cuda"))
NO_DEVICE = _library.no_cuda() if DEVICE.type == "cuda" else ""

SETTINGS = dict(
    seed=0,  # of the order of blocks and threads
    resident=1,  # blocks that run at the same time, at least
    shared=227 * 1024,  # bytes that a block may have
    l2=50 << 20,
    multiprocessors=132,
    capability=90,  # 86 for 8.6: below 9.0 a reduction adds one number at a time
    truncates=16,  # products of 16-bit matrices at once, as an H100; 8: an A100; 0: rounded
    shift=0,  # bytes that tensors begin beyond where they lie
    misaligned=-1,  # the one that does, in the order of an argument struct; -1: all of them
    far=0,  # the dimension, from 1, of arguments of four that 32 bits do not reach; 0: none
    far_new=0,  # the same for tensors that operators allocate
    plain=0,  # 1: attention's plain kernels also run calls that fit its tiles
    run=1,  # 0: calls are planned alone
)


@dataclass(frozen=True)
class Launch:
    blocks: int
    threads: int
    shared: int  # bytes of a block
    kernel: str  # the instance


class Cost(NamedTuple):
    """Counted accesses: wavefronts of shared memory or sectors of global memory (accesses.h)."""

    taken: int
    least: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.taken + other.taken, self.least + other.least)

    @property
    def ratio(self) -> float:
        """1.0 without accesses."""
        return round(self.taken / self.least, 2) if self.least else 1.0


@dataclass
class Accesses:
    """Accesses of all instances of a kernel that ran, and by line where above the minimum."""

    costs: list[Cost] = field(default_factory=lambda: [Cost(0, 0)] * 4)
    places: list[tuple[Callable[[], str], list[Cost]]] = field(default_factory=list)

    def add(self, costs: list[Cost]) -> None:
        self.costs = [a + b for a, b in zip(self.costs, costs, strict=True)]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios of reads and writes of shared memory, then of global memory."""
        return tuple(cost.ratio for cost in self.costs)

    def __str__(self) -> str:
        lines = [f"  {at()}: {[tuple(cost) for cost in costs]}" for at, costs in self.places]
        return "\n".join([f"{self.ratios}, {[tuple(cost) for cost in self.costs]}", *lines])


@functools.cache
def _library() -> ctypes.CDLL:
    path = emulated.library()
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.emulated_spread.argtypes = [ctypes.POINTER(ctypes.c_int64)] * 2
    library.emulated_keep.argtypes = [ctypes.c_char_p]
    library.emulated_calls.restype = library.emulated_kernels.restype = ctypes.c_char_p
    return library


def all_instances() -> set[str]:
    """Every instance of a kernel that an operator could launch."""
    return set(_library().emulated_kernels().decode().splitlines())


def kernel_of(instance: str) -> str:
    """The kernel's name, without the instance's arguments."""
    return re.search(r"kKernel = .*?(\w+_kernel)\b", instance)[1]


@dataclass
class Emulated:
    """The calls of one test: plan, launches and counted bytes, by operator.

    `keywords` are added to every call whose operator has them, and override the caller's.
    """

    done: list[dict] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)  # of the kernels that ran
    keywords: dict[str, object] = field(default_factory=dict)

    def of(self, op: str) -> list[dict]:
        return [call for call in self.done if call["op"] == op]

    def set(self, **settings: int) -> None:
        """Changes settings for the following calls; others stay."""
        assert settings.keys() <= SETTINGS.keys()
        for name, value in settings.items():
            _library().emulated_set(name.encode(), value)

    @contextlib.contextmanager
    def sanitized(self, build: str, *kernels: str, **settings: int) -> Iterator[None]:
        """The calls within run once more, in a program with these kernels under a sanitizer.

        The results must be the same bits. For "plain" nothing more happens. The settings hold for
        the following calls.
        """
        self.set(**settings)
        if build == "plain":
            yield
            return
        with self._run_again(build, *kernels):
            yield

    @contextlib.contextmanager
    def seen(self, *kernels: str) -> Iterator[dict[str, Accesses]]:
        """The calls within run once more, in a program with these kernels that sees accesses.

        Yields a dict, filled after the calls: the accesses by kernel name, without arguments.
        """
        found: dict[str, Accesses] = {}
        with self._run_again("accesses", *kernels) as told:
            yield found
        program = emulated.program("replay", "accesses", *kernels)
        for kind, name, *rest in (line.split("\t") for line in told[1:]):
            costs = [Cost(*map(int, rest[i : i + 2])) for i in range(len(rest) - 8, len(rest), 2)]
            kernel = kernel_of(name)
            if kind == "kernel":
                found.setdefault(kernel, Accesses()).add(costs)
            else:
                lines = functools.partial(emulated.lines_of, program, rest[0].split())
                found[kernel].places.append((lines, costs))

    @contextlib.contextmanager
    def _run_again(self, build: str, *kernels: str) -> Iterator[list[str]]:
        """Yields a list, filled after the calls with the lines that the program has printed."""
        told: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            _library().emulated_keep(folder.encode())
            try:
                yield told
            finally:
                _library().emulated_keep(b"")
            files = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
            assert files, "no call was made"
            program = emulated.program("replay", build, *kernels)
            result = emulated.run(program, *files)
            said = f"{result.returncode}: {result.stderr[-3000:]}"
            assert result.returncode == 0 and not result.stderr, said
            told += result.stdout.splitlines()
            assert int(told[0]) == len(files)

    @contextlib.contextmanager
    def under_the_package(self) -> Iterator[None]:
        """Inside, every operator is the emulated one, for tensors on the CPU."""
        with _replaced(lambda op: _emulated(op) and functools.partial(self.run, _emulated(op))):
            yield

    def run(self, op, *arguments, **keywords):
        """A call of an operator; tensors that its schema only reads must not change."""
        library = _library()
        library.emulated_begin()
        names = {argument.name for argument in op._schema.arguments}
        keywords |= {name: value for name, value in self.keywords.items() if name in names}
        before = [(name, t, t.clone()) for name, t in _read_only(op, arguments, keywords)]
        placed = [_spread(value) for value in arguments]
        placed_keywords = {name: _spread(value) for name, value in keywords.items()}
        try:
            return op(*placed, **placed_keywords)
        finally:
            for call in json.loads(library.emulated_calls()):
                call["op"] = op._schema.name.partition("::")[2]
                call["launched"] = [Launch(*launch) for launch in call["launched"]]
                self.instances.update(launch.kernel for launch in call["launched"])
                self.done.append(call)
            for name, tensor, copy in before:
                assert torch.equal(tensor, copy), f"{op} wrote {name}"
            for one, other in zip(arguments, placed, strict=True):
                if other is not one:
                    one.copy_(other)


def _spread(value):
    """A tensor of four dimensions with the strides that the setting `far` asks for."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    sizes, strides = ((ctypes.c_int64 * 4)(*n) for n in (value.shape, value.stride()))
    _library().emulated_spread(sizes, strides)
    if tuple(strides) == value.stride():
        return value
    return torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype).copy_(value)


def _read_only(op, arguments: tuple, keywords: dict) -> Iterator[tuple[str, Tensor]]:
    """The bytes of storages that the operator may not write."""
    schema = op._schema.arguments
    given = [*zip(schema, arguments, strict=False)]
    given += [(a, keywords[a.name]) for a in schema if a.name in keywords]
    tensors = [(a, value.detach()) for a, value in given if isinstance(value, Tensor)]
    storages = [
        (a.name, tensor.untyped_storage(), bool(a.alias_info and a.alias_info.is_write))
        for a, tensor in tensors
    ]
    written = {storage.data_ptr() for _, storage, writes in storages if writes}
    for name, storage, _ in storages:
        if storage.data_ptr() not in written and storage.nbytes() <= 1 << 26:
            yield name, torch.empty(0, dtype=torch.uint8).set_(storage)


class OnDevice:
    """Every operator on the device, for tensors on the CPU. `keywords` as those of Emulated."""

    def __init__(self):
        self.keywords: dict[str, object] = {}
        self.calls = 0
        self.shift = 0  # bytes after an aligned address at which every tensor there begins

    def run(self, op, *arguments, **keywords):
        self.calls += 1
        names = {argument.name for argument in op._schema.arguments}
        keywords |= {name: value for name, value in self.keywords.items() if name in names}
        memory: dict[int, tuple[Tensor, Tensor]] = {}  # of each storage: here, and on the device

        def moved(value):
            if isinstance(value, list | tuple):
                return [moved(part) for part in value]
            if not isinstance(value, Tensor):
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in memory:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                there = torch.empty(here.numel() + self.shift, dtype=torch.uint8, device=DEVICE)
                memory[storage.data_ptr()] = here, there[self.shift :].copy_(here)
            there = memory[storage.data_ptr()][1].untyped_storage()
            empty = torch.empty(0, dtype=value.dtype, device=DEVICE)
            first = value.storage_offset() + self.shift // value.itemsize
            twin = empty.set_(there, first, value.shape, value.stride())
            return torch._neg_view(twin) if value.is_neg() else twin

        found = op(*map(moved, arguments), **{name: moved(v) for name, v in keywords.items()})
        for here, there in memory.values():
            here.copy_(there)
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, found)


def operators(namespace: str) -> dict[str, object]:
    """The operators of a namespace, by name."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = [name.partition("::")[2] for name in names if name.startswith(f"{namespace}::")]
    return {name: getattr(getattr(torch.ops, namespace), name).default for name in names}


@functools.cache
def _emulated_operators() -> dict[str, object]:
    _library()
    return operators("onepass_emulated")


def _emulated(op) -> object | None:
    return _emulated_operators().get(op._schema.name.partition("::")[2])


@functools.cache
def _places() -> list[tuple[object, str, object]]:
    """(object, attribute, operator) wherever the package, or a test, looks up an operator."""
    ops = operators("onepass")
    places = [(torch.ops.onepass, name, op) for name, op in ops.items()]
    for found in pkgutil.iter_modules(_ops.__path__, "onepass._ops."):
        importlib.import_module(found.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("onepass._ops.")]
    for place in (*modules, *operator.Raw.all.values()):
        for attribute, value in vars(place).items():
            if isinstance(value, torch._ops.OpOverload) and value in ops.values():
                places.append((place, attribute, value))
    return places


@contextlib.contextmanager
def _replaced(by: Callable) -> Iterator[None]:
    """Inside, operators are replaced by the results of `by`, unless it returns None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_operators_are_replaced", True)
        for place, name, op in _places():
            if (other := by(op)) is not None:
                patch.setattr(place, name, other)
        yield


replaced_operators = _replaced
_operators_are_replaced = False


def are_cuda() -> bool:
    """Whether operators run on CUDA now, emulated or on a device."""
    return _operators_are_replaced


# ---- fixtures ------------------------------------------------------------------------------------

Parameters = type(pytest.param())
CUDA = ["emulated"] + [pytest.param("device", marks=pytest.mark.device)] * (not NO_DEVICE)
everywhere = pytest.mark.usefixtures("executor")
on_cuda = pytest.mark.parametrize("executor", CUDA, indirect=True)


def each(name: str, *, cpu: Iterable, cuda: Iterable) -> pytest.MarkDecorator:
    """Everywhere, with other values of a parameter on the CPU than on CUDA."""
    values = [("cpu", value, ()) for value in cpu] + [("emulated", value, ()) for value in cuda]
    values += [("device", value, (pytest.mark.device,)) for value in cuda if not NO_DEVICE]
    cases = []
    for executor, value, marks in values:
        value = value if isinstance(value, Parameters) else pytest.param(value)
        of = f"{executor}-{value.id or value.values[0]}"
        cases.append(pytest.param(executor, *value.values, marks=(*value.marks, *marks), id=of))
    return pytest.mark.parametrize(f"executor, {name}", cases, indirect=["executor"])


@dataclass(frozen=True)
class Executor:
    name: str
    calls: Emulated | OnDevice | None = None

    @property
    def is_cuda(self) -> bool:
        return self.calls is not None

    @property
    def draws(self) -> int:
        """How many draws of a case are pooled: in a single one torch may be exact by luck. The
        emulator, which is slow, takes one."""
        return {"cpu": 2, "emulated": 1, "device": 4}[self.name]


@pytest.fixture(params=["cpu", *CUDA])
def executor(request) -> Iterator[Executor]:
    """The executor of the test's operators."""
    if request.param == "emulated":
        yield Executor("emulated", request.getfixturevalue("cuda"))
    elif request.param == "device":
        calls = OnDevice()
        with _replaced(lambda op: functools.partial(calls.run, op)):
            yield Executor("device", calls)
    else:
        yield Executor("cpu")


def of_this_level(items: list[pytest.Item]) -> list[pytest.Item]:
    """At a chosen CPU level, only the CPU executor runs."""
    if "ONEPASS_CPU_ISA" not in os.environ:
        return items
    names = (getattr(item, "callspec", None) for item in items)
    names = [spec.params.get("executor", "cpu") if spec else "cpu" for spec in names]
    return [item for item, name in zip(items, names, strict=True) if name == "cpu"]


@pytest.fixture
def emulator() -> Iterator[Emulated]:
    """Emulated CUDA, which a test puts under the package itself."""
    calls = Emulated()
    yield calls
    calls.set(**SETTINGS)


@pytest.fixture
def cuda(emulator) -> Iterator[Emulated]:
    """Emulated CUDA in the place of every operator."""
    with emulator.under_the_package():
        yield emulator
