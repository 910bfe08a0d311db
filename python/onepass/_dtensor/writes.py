"""Writes to DTensors between a call and its backward, which autograd counts apart from their parts.

A tensor's version counts its writes, and autograd refuses a backward that would read a saved tensor
whose version has changed. An operator saves parts, but `x.add_(1)` on a DTensor changes the version
of x and not that of its part: autograd would compute with overwritten numbers and say nothing.

So the operator gets doubles of the parts: the same memory, and versions that nothing else shares.
Before the backward reads what was saved, the doubles of tensors that were written get another
version, and autograd raises its own error for those that the operator saved. Results that it saved
are watched in the same way: what the caller gets is a double.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as _are_modes_active
from torch.distributed.tensor import DTensor

_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_WITH_MEMORY = (Tensor, torch.nn.Parameter)


class Writes:
    """Tracker of in-place writes to one call's tensors. Keeps versions, and none of their
    memory."""

    __slots__ = ("_watched",)

    def __init__(self):
        # What may be written, its version at the call, and what the operator may have saved.
        self._watched: list[tuple[Tensor, int, Tensor]] = []

    @staticmethod
    def of_call() -> Writes | None:
        """None where none are watched: while a call is compiled, whose graph has no writes, and in
        modes, which would see operators that are not the call's."""
        if torch.compiler.is_compiling() or _are_modes_active():
            return None
        return Writes()

    def double(self, x: Tensor, part: Tensor) -> Tensor:
        """Alias of x's part, for the operator. Not differentiable."""
        double = part.data
        self.watch(x, double)
        return double

    def watch(self, x: Tensor, saved: Tensor) -> None:
        """Writes to x, or to the part of x by itself, are writes to what the operator may save."""
        if saved.is_inference():  # autograd refuses to save it
            return
        of_saved = _version_of(saved)
        for written in (x, x._local_tensor) if isinstance(x, DTensor) else (x,):
            if not written.is_inference():  # which has no version
                self._watched.append((_version_of(written), written._version, of_saved))

    def check(self) -> None:
        """Before the backward reads what was saved."""
        for written, version, saved in self._watched:
            if written._version != version:
                torch.autograd.graph.increment_version(saved)


def _version_of(x: Tensor) -> Tensor:
    """Empty alias that shares x's version counter."""
    if type(x) in _WITH_MEMORY:
        version = x.detach()
        version.data = _nothing(x.device)
        return version
    with torch._C._ExcludeDispatchKeyGuard(_PYTHON):  # in C++ a DTensor has no memory
        return x.detach()


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class Doubled(torch.autograd.Function):
    """A double, of `Writes.double`, in place of a part that has a gradient."""

    @staticmethod
    def forward(ctx, part, double, writes):  # [double]: of a tensor the result would be a view
        ctx.writes = writes
        return double[0]

    @staticmethod
    def backward(ctx, gradient):
        return checked_again(gradient, ctx.writes), None, None


class Checked(torch.autograd.Function):
    """A double of a result. Its backward, which comes before the operator's, checks the writes."""

    @staticmethod
    def forward(ctx, result, writes):
        ctx.writes = writes
        return result.data

    @staticmethod
    def backward(ctx, gradient):
        ctx.writes.check()
        return gradient, None


def checked_again(gradient: Tensor, writes: Writes | None) -> Tensor:
    """A gradient of a call. With create_graph=True its own backward reads what was saved too."""
    if writes is None or not torch.is_grad_enabled():
        return gradient
    return Checked.apply(gradient, writes)
