"""The table that steps pass to the operator: the places of all parameters' states."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import _C
from onepass.optim import masters
from onepass.optim.contract import LAYOUT
from onepass.optim.flat_state import (
    EMA,
    SCALE,
    Numbers,
    Table,
    addresses_of,
    layout_row,
    layouts_of,
    local,
    noise_number,
)
from onepass.optim.states import StateOptimizer, check_entry


def make_table(optimizer: StateOptimizer, params: list[Tensor], numbers: Numbers) -> Table:
    """The table of all parameters of an optimizer; those with these numbers have their states."""
    state, groups, kinds = optimizer.state, optimizer.param_groups, optimizer._kinds()
    buffers: dict[int, tuple[int, Tensor]] = {}
    rows: list[list[int]] = []
    entries: list[list[Tensor]] = []
    has_state: list[bool] = []
    with_master: dict[Tensor, dict] = {}
    with_gradient = set(numbers)
    group_numbers = [n for n, group in enumerate(groups) for _ in group["params"]]
    for number, (param, n) in enumerate(zip(params, group_numbers, strict=True)):
        entry, keys = state.get(param) or {}, kinds[n]
        shows_step = optimizer._shows_step(param, groups[n])
        step = entry.get("step") if shows_step else optimizer._hidden_steps.get(param)
        has_state.append(step is not None and all(entry.get(key) is not None for key in keys))
        if number in with_gradient or has_state[-1]:
            check_entry(optimizer, number, param, entry, keys)
        found = {LAYOUT["step"]: step}
        for i, key in enumerate(optimizer._moment_keys(groups[n])):
            found[LAYOUT["moments"] + 2 * i] = entry.get(key)
            found[LAYOUT["scales"] + 2 * i] = entry.get(key + SCALE)
        if EMA in keys:
            found[LAYOUT["average"]] = entry.get(EMA)
        master = entry.get("master", entry.get("remainder"))
        if master is not None and param.dtype.itemsize == 2:
            found[LAYOUT["master"]] = master
            with_master[param] = entry
        found = {column: value for column, value in found.items() if value is not None}
        rows.append(layout_row(noise_number(number, param), n, found, optimizer._places, buffers))
        if not shows_step:
            found.pop(LAYOUT["step"], None)  # nobody else reaches it
        entries.append([local(value) for value in found.values()])
    known = set(params)
    optimizer._hidden_steps = {p: s for p, s in optimizer._hidden_steps.items() if p in known}
    in_use = [*optimizer._hidden_steps.values(), *(v for e in state.values() for v in e.values())]
    optimizer._places.keep_only([v for v in in_use if isinstance(v, Tensor)])
    table = Table(
        params=params,
        watched=_C.contents([group["params"] for group in groups], state),
        has_state=has_state,
        kinds=kinds,
        layout=torch.tensor(rows, dtype=torch.int64, device="cpu"),
        buffers=[buffer for _, buffer in buffers.values()],
        entries=entries,
        addresses=addresses_of(entries),
        layouts=layouts_of(params),
        masters=with_master,
        are_sharded=any(local(p) is not p for p in params),
        device=local(params[numbers[0]]).device,
    )
    masters.follow(table, optimizer._table)
    return table
