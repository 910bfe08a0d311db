"""Writes to DTensors between a call and its backward, which autograd counts apart from their parts.

An operator saves parts for its backward. After `x.add_(1)` on a DTensor the version of x is another
one, and that of its part is as before: autograd would compute with overwritten numbers and say
nothing. Here the parts of a call get counters of their own, and a write of the DTensor is added to
its part's before the backward reads what was saved. Autograd then raises its own error for tensors
that the operator saved, and none for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as _are_modes_active
from torch.distributed.tensor import DTensor

_OF_DTENSOR = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


class Writes:
    """Those to the tensors of one call. Keeps counters alone, and no memory alive."""

    __slots__ = ("_watched",)

    def __init__(self):
        # A tensor that may be written, its version, and one whose counter is told of it.
        self._watched: list[tuple[Tensor | ReferenceType, int, Tensor | ReferenceType]] = []

    @staticmethod
    def of_call() -> Writes | None:
        """None where none are watched: while a call is compiled, whose graph has no writes, and in
        modes, which would see operators that are not the call's."""
        if torch.compiler.is_compiling() or _are_modes_active():
            return None
        return Writes()

    def parts(self, tensors: Sequence[DTensor], local: Sequence[Tensor]) -> list[Tensor]:
        """local, with which a call computes in place of tensors: the same memory, and counters of
        their own. Not differentiable."""
        parts = [x.data for x in local]
        for x, counter, mine, part in zip(tensors, _detached(tensors), local, parts, strict=True):
            told = ref(part)  # what is saved of it keeps it alive
            self._watched.append((counter, x._version, told))
            if mine.data_ptr() == x._local_tensor.data_ptr():  # x was not moved
                self._watched.append((ref(mine), mine._version, told))
        return parts

    def watch(self, whole: DTensor, result: Tensor) -> None:
        """A result, which may be saved as well."""
        counter = result.detach()
        counter.data = result.new_empty(0)
        self._watched.append((*_detached([whole]), whole._version, counter))

    def check(self) -> None:
        """Before the backward reads what was saved."""
        for x, version, told in self._watched:
            x, told = _alive(x), _alive(told)
            if x is not None and told is not None and x._version != version:
                torch.autograd.graph.increment_version(told)


class Checked(torch.autograd.Function):
    """A result of a call, whose backward checks the call's writes first."""

    @staticmethod
    def forward(ctx, result, writes):
        ctx.writes = writes
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        ctx.writes.check()
        return gradient, None


class Counted(torch.autograd.Function):
    """A part with a counter of its own, of `Writes.parts`, in place of another one."""

    @staticmethod
    def forward(ctx, local, parts):  # not as a tensor, of which the result would be a view
        return parts[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _detached(tensors: Sequence[DTensor]) -> list[Tensor]:
    """They share the counters of DTensors, and have no memory: a DTensor has none in C++."""
    with torch._C._ExcludeDispatchKeyGuard(_OF_DTENSOR):
        return [x.detach() for x in tensors]


def _alive(x: Tensor | ReferenceType) -> Tensor | None:
    return x() if type(x) is ReferenceType else x
