"""What runs the operators of a test: `emulated` puts the CUDA kernels under the public functions.

The tests' library (tests/cuda_emulator/runtime_emulated.cpp) is csrc/ops and csrc/cuda as they
ship, registered as `onepass_emulated::*` for tensors on the CPU. It runs every call on a copy of
its memory between guard bands, new memory is poison, and it counts what kernels read and write.
Checks that fail in a kernel are exceptions here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import pkgutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onepass import _ops
from tests.emulator import emulated

SETTINGS = dict(
    seed=0,  # of the order of blocks and threads
    resident=1,  # blocks that run at the same time, at least
    shared=227 * 1024,  # bytes that a block may have
    l2=50 << 20,
    multiprocessors=132,
    shift=0,  # bytes that tensors begin beyond where they lie
    misaligned=-1,  # the one that does, in the order of an argument struct; -1: all of them
    far=0,  # the dimension, from 1, of arguments of four that 32 bits do not reach; 0: none
    far_new=0,  # likewise of what operators make
    plain=0,  # 1: attention's plain kernels take what its tiles do as well
    run=1,  # 0: calls are planned alone
)


@dataclass(frozen=True)
class Launch:
    blocks: int
    threads: int
    shared: int  # bytes of a block
    kernel: str  # the instance


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


@dataclass
class Emulated:
    """The calls of one test: plan, launches and counted bytes, by operator.

    `keywords` are those of every call whose operator has them, whatever the caller says.
    """

    done: list[dict] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)  # of the kernels that ran
    keywords: dict[str, object] = field(default_factory=dict)

    def of(self, op: str) -> list[dict]:
        return [call for call in self.done if call["op"] == op]

    def set(self, **settings: int) -> None:
        """From here on; what is not named stays."""
        assert settings.keys() <= SETTINGS.keys()
        for name, value in settings.items():
            _library().emulated_set(name.encode(), value)

    @contextlib.contextmanager
    def sanitized(self, build: str, *kernels: str, **settings: int) -> Iterator[None]:
        """The calls within run once more, in a program with these kernels under a sanitizer.

        There they must come to the same, to the bit. Nothing more happens for "plain". The settings
        are those of the calls from here on.
        """
        self.set(**settings)
        if build == "plain":
            yield
            return
        with tempfile.TemporaryDirectory() as folder:
            _library().emulated_keep(folder.encode())
            try:
                yield
            finally:
                _library().emulated_keep(b"")
            files = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
            assert files, "no call was made"
            program = emulated.program("replay", build, *kernels)
            result = emulated.run(program, *files)
            said = f"{result.returncode}: {result.stderr[-3000:]}"
            assert result.returncode == 0 and not result.stderr, said
            assert int(result.stdout) == len(files)

    @contextlib.contextmanager
    def under_the_package(self) -> Iterator[None]:
        """Within, every operator is the emulated one, for tensors on the CPU."""
        _library()
        with pytest.MonkeyPatch.context() as patch:
            for place, name, op in _places():
                patch.setattr(place, name, functools.partial(self.run, op))
            yield

    def run(self, op, *arguments, **keywords):
        """A call of an operator; tensors that its schema lends it to read stay what they were."""
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
    """The bytes of storages that the operator is handed and may not write."""
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


@pytest.fixture
def emulator() -> Iterator[Emulated]:
    """Emulated CUDA, where a test says."""
    calls = Emulated()
    yield calls
    calls.set(**SETTINGS)


@pytest.fixture
def cuda(emulator) -> Iterator[Emulated]:
    """Emulated CUDA in the place of every operator."""
    with emulator.under_the_package():
        yield emulator


@functools.cache
def _places() -> list[tuple[object, str, object]]:
    """Where the package, or a test, finds an operator; and the emulated one for that place."""
    shipped, emulated = torch.ops.onepass, torch.ops.onepass_emulated
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = [name.partition("::")[2] for name in names if name.startswith("onepass_emulated::")]
    by = {getattr(shipped, name).default: getattr(emulated, name).default for name in names}
    places = [(shipped, name, getattr(emulated, name).default) for name in names]
    for found in pkgutil.iter_modules(_ops.__path__, "onepass._ops."):
        module = importlib.import_module(found.name)
        for attribute, value in vars(module).items():
            if isinstance(value, torch._ops.OpOverload) and value in by:
                places.append((module, attribute, by[value]))
    return places
