"""Float32 masters of 16-bit parameters, and their other form, the remainder.

A master follows its parameter: if other code changes the parameter, by an operation in place, which
torch counts in `_version`, or by giving it other memory, the master is reseeded from it. A clamp
after each step does that too; it is logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._dispatch_log import say
from onepass.optim.flat_state import Table, local

# By the names of the option: the state's key and dtype.
KEYS = {"fp32": ("master", torch.float32), "remainder16": ("remainder", torch.int16)}


def follow(table: Table, before: Table | None) -> None:
    """Follows the parameters of a new table that have a master.

    Masters of parameters that changed since the last table was in use, or that were loaded and do
    not fit, are reseeded.
    """
    seen = {}
    if before is not None:
        marks = zip(before.versions, before.pointers, strict=True)
        seen = dict(zip(before.masters, marks, strict=True))
    remember(table)
    table.pointers = _pointers(table)
    marks = zip(table.versions, table.pointers, strict=True)
    for (param, entry), mark in zip(table.masters.items(), marks, strict=True):
        if param in seen:
            changed = seen[param] != mark
        else:
            changed = "master" in entry and not bool(
                fits(local(param), local(entry["master"])).all()
            )
        if changed:
            reseed(param, entry)


def remember(table: Table) -> None:
    """Takes the parameters as they are: the optimizer itself has written to them."""
    table.versions = [p._version for p in table.masters]


def reseed_changed(table: Table) -> None:
    """Reseeds the masters of parameters that other code changed."""
    versions = [p._version for p in table.masters]
    if versions != table.versions:
        _reseed_where(table, table.versions, versions)


def reseed_moved(table: Table) -> None:
    """Reseeds the masters of parameters whose memory was replaced.

    The tables of steps hold the old addresses, so all tables are dropped.
    """
    pointers = _pointers(table)
    if pointers != table.pointers:
        _reseed_where(table, table.pointers, pointers)
        table.step_tables.clear()
        table.pointers = pointers


def _reseed_where(table: Table, before: list[int], now: list[int]) -> None:
    for (param, entry), one, other in zip(table.masters.items(), before, now, strict=True):
        if one != other:
            reseed(param, entry)


def _pointers(table: Table) -> list[int]:
    return [local(p).data_ptr() for p in table.masters]


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 parameter and its remainder."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def low(master: Tensor) -> Tensor:
    """The remainder of a float32 master: its low 16 bits, negative where rounding went up."""
    bits = master.float().view(torch.int32) & 0xFFFF
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)


def begin(param: Tensor, entry: dict) -> None:
    """Fills a new master, from a loaded remainder or from the parameter."""
    here, master = local(param).detach(), local(entry["master"])
    remainder = entry.pop("remainder", None)
    master.copy_(here if remainder is None else join(here, local(remainder)))


def value(param: Tensor, entry: dict) -> Tensor:
    """This rank's part of a parameter, in its full precision."""
    here, master, remainder = local(param).detach(), entry.get("master"), entry.get("remainder")
    if master is not None:
        return local(master)
    return here if remainder is None else join(here, local(remainder))


def reseed(param: Tensor, entry: dict) -> None:
    """Sets a master to its parameter.

    In all elements, also where a float32 master still rounds to the parameter: with a remainder the
    old value is lost, and both forms must give the same run.
    """
    say("a parameter was changed from outside: it becomes its own master")
    here = local(param).detach()
    if "master" in entry:
        local(entry["master"]).copy_(here)
    else:
        local(entry["remainder"]).zero_()


def fits(param: Tensor, master: Tensor) -> Tensor:
    """Elements in which the parameter is its master rounded to nearest, with any rule for ties."""
    nearest = master.to(param.dtype)
    off, least = ((rounded.double() - master.double()).abs() for rounded in (param, nearest))
    return (off <= least) | (param == nearest) | (param.isnan() & nearest.isnan())
