"""Float32 masters of 16-bit parameters, and their other form, the remainder.

A master follows its parameter: whoever else changes the parameter, by an in-place operation, which
torch counts in `_version`, or by giving it other memory, makes it its own master again. So does
whoever only clamps it after each step; that is logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.dispatch_log import say
from onepass.optim.flat_state import Table, local

# By the names of the option: the state's key and dtype.
KEYS = {"fp32": ("master", torch.float32), "remainder16": ("remainder", torch.int16)}


def follow(table: Table, before: Table | None) -> None:
    """Notes what the parameters with a master are now.

    Those that changed since the last table was in use, or were loaded and do not fit to their
    master, are reseeded.
    """
    seen = {}
    if before is not None:
        seen = {
            id(p): (version, pointer)
            for p, version, pointer in zip(
                before.master_params, before.versions, before.pointers, strict=True
            )
        }
    table.versions = [p._version for p in table.master_params]
    table.pointers = [local(p).data_ptr() for p in table.master_params]
    now = zip(table.masters, table.versions, table.pointers, strict=True)
    for (param, entry), version, pointer in now:
        if id(param) in seen:
            changed = seen[id(param)] != (version, pointer)
        else:
            changed = "master" in entry and not bool(
                fits(local(param), local(entry["master"])).all()
            )
        if changed:
            reseed(param, entry)


def reseed_changed(table: Table) -> None:
    """A parameter that someone else changed becomes its own master."""
    versions = [p._version for p in table.master_params]
    if versions == table.versions:
        return
    for (param, entry), was, version in zip(table.masters, table.versions, versions, strict=True):
        if was != version:
            reseed(param, entry)


def reseed_moved(table: Table) -> None:
    """Reseeds the masters of parameters whose memory is another.

    The tables of steps know where those lay: all of them go, whichever parameters they are of.
    """
    pointers = [local(p).data_ptr() for p in table.master_params]
    for (param, entry), was, pointer in zip(table.masters, table.pointers, pointers, strict=True):
        if was != pointer:
            reseed(param, entry)
    if pointers != table.pointers:
        table.step_tables.clear()
    table.pointers = pointers


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 parameter and its remainder."""
    return ((param.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def low(master: Tensor) -> Tensor:
    """The remainder of a float32 master: its low 16 bits, negative where rounding went up."""
    bits = master.float().view(torch.int32) & 0xFFFF
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)


def begin(param: Tensor, entry: dict) -> None:
    """Fills a new master: from a remainder that another optimizer kept, or from the parameter."""
    here, master = local(param).detach(), local(entry["master"])
    remainder = entry.pop("remainder", None)
    master.copy_(here if remainder is None else join(here, local(remainder)))


def value(param: Tensor, entry: dict) -> Tensor:
    """This rank's part of a parameter, as exactly as it is known."""
    here, master, remainder = local(param).detach(), entry.get("master"), entry.get("remainder")
    if master is not None:
        return local(master)
    return here if remainder is None else join(here, local(remainder))


def reseed(param: Tensor, entry: dict) -> None:
    """Makes a parameter its own master.

    All of it, also where a float32 master still rounds to the parameter: what a remainder belonged
    to is not known any more, and the two forms give the same run.
    """
    say("a parameter was changed from outside: it becomes its own master")
    here = local(param).detach()
    if "master" in entry:
        local(entry["master"]).copy_(here)
    else:
        local(entry["remainder"]).zero_()


def fits(param: Tensor, master: Tensor) -> Tensor:
    """Where the parameter is its master rounded to nearest, however ties went."""
    nearest = master.to(param.dtype)
    off, least = ((rounded.double() - master.double()).abs() for rounded in (param, nearest))
    return (off <= least) | (param == nearest) | (param.isnan() & nearest.isnan())
