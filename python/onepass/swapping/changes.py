"""Changes to a model, recorded before the first of them is made.

Ctrl-C raises between any two bytecodes. So a call lists all its edits, a journal records the old
values, and only then are the edits made. If the call ends before it returns, the journal restores
the old values. That is a single call into C for all edits, which no signal can divide, and it is
idempotent.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

ABSENT = type("ABSENT", (), {"__repr__": lambda self: "ABSENT"})()


class Edit(NamedTuple):
    """A value for `owner.__class__`, or for a key of the owner's `__dict__`: ABSENT removes it."""

    owner: object
    name: str
    value: object

    def current(self) -> object:
        if self.name == "__class__":
            return type(self.owner)
        return vars(self.owner).get(self.name, ABSENT)

    def make(self) -> None:
        if self.name == "__class__":
            self.owner.__class__ = self.value  # unlike `setting`, it calls the owner's __setattr__
        else:
            self.setting(self.value)()

    def setting(self, value: object) -> functools.partial:
        """A call into C that sets this."""
        if self.name == "__class__":
            return functools.partial(object.__setattr__, self.owner, "__class__", value)
        if value is ABSENT:
            return functools.partial(dict.pop, vars(self.owner), self.name, None)
        return functools.partial(dict.__setitem__, vars(self.owner), self.name, value)


class Change(NamedTuple):
    """One module's two classes, so that `verify` can run it either way."""

    module: nn.Module
    original: type[nn.Module]
    swapped: type[nn.Module]


def refusal(module: nn.Module, cls: type) -> str:
    """Why a module does not let its class be set; empty if it does. Its own `__setattr__` is tried
    on a shallow copy."""
    if any("__class__" in vars(base) for base in type(module).__mro__[:-1]):
        return "it has a __class__ of its own"
    if type(module).__setattr__ is nn.Module.__setattr__ or hasattr(type(module), "__del__"):
        return ""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    try:
        Edit(twin, "__class__", cls).make()
    except MemoryError:
        raise
    except Exception as error:  # foreign code may raise anything: each is a reason
        return str(error) or type(error).__name__
    return ""


class Journal:
    """The edits of one call, and the values they replaced."""

    def __init__(self):
        self._noted: list[tuple[Edit, object]] = []

    def make(self, edits: Sequence[Edit]) -> None:
        """Once per journal."""
        self._noted = [(edit, edit.current()) for edit in edits]
        for edit in edits:
            edit.make()

    def owners(self, name: str) -> list:
        return [edit.owner for edit, _ in self._noted if edit.name == name]

    def undo(self) -> None:
        """Undoes the edits that were made, except those that were replaced since."""
        settings = [
            edit.setting(before)
            for edit, before in reversed(self._noted)
            if edit.current() is edit.value
        ]
        collections.deque(map(operator.methodcaller("__call__"), settings), maxlen=0)

    def forget(self) -> None:
        """Keeps the edits."""
        self._noted = []


@contextlib.contextmanager
def in_force(edits: Sequence[Edit]) -> Iterator[None]:
    """Makes the edits for the block."""
    journal = Journal()
    try:
        try:
            journal.make(edits)
            yield
        finally:
            journal.undo()
    finally:
        journal.undo()  # an interrupt may have prevented the first call
