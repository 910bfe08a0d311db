"""Averages of the parameters: swapping them in, and converting to and from torch's
AveragedModel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from onepass.optim import masters
from onepass.optim.flat_state import EMA, EMA_STEPS, local
from onepass.optim.options import decay_at
from onepass.optim.states import StateOptimizer, complete


def decay(optimizer: StateOptimizer, group: dict) -> float:
    """The decay of this step's averages; the first average is the parameter."""
    before = group.get(EMA_STEPS, 0)
    if before == 0:
        return 0.0
    name, setting = type(optimizer).__name__, optimizer.ema_decay
    if optimizer._accumulation is None:
        return decay_at(name, setting, before + 1)
    held, key = optimizer._accumulation.decays, id(group)
    if key not in held or held[key][:2] != (setting, before):
        held[key] = setting, before, decay_at(name, setting, before + 1)
    return held[key][2]


@contextlib.contextmanager
def swapped(optimizer: StateOptimizer) -> Iterator[None]:
    """See `onepass.optim.AdamW.swap_ema`."""
    _require_averages(optimizer, "swap_ema")
    if optimizer._is_swapped:
        raise RuntimeError(
            f"{type(optimizer).__name__}: swap_ema must not be called inside swap_ema, got a call"
        )
    table = optimizer._table
    if table is not None:
        masters.reseed_changed(table)
        masters.remember(table)
    averages = {
        param: optimizer.state[param][EMA]
        for group in optimizer.param_groups
        for param in group["params"]
        if optimizer.state.get(param, {}).get(EMA) is not None
    }
    kept = {param: local(param).detach().clone() for param in averages}

    done: list[bool] = []

    def restore() -> None:
        if done:
            return
        _write(kept)
        if table is not None:
            masters.remember(table)
        optimizer._is_swapped, optimizer._kept = False, StateOptimizer._kept
        done.append(True)

    try:
        try:
            optimizer._is_swapped, optimizer._kept = True, kept
            _write(averages)
            yield
        finally:
            restore()
    finally:
        restore()


@torch.no_grad()
def copy_to(optimizer: StateOptimizer, averaged: AveragedModel, model: torch.nn.Module) -> None:
    """See `onepass.optim.AdamW.ema_to`."""
    for param, theirs in _pairs(optimizer, "ema_to", averaged, model):
        entry = optimizer.state.get(param, {})
        value = entry[EMA] if entry.get(EMA) is not None else param
        theirs.detach().copy_(value)
    if not averaged.use_buffers:
        for ours, theirs in zip(model.buffers(), averaged.module.buffers(), strict=True):
            theirs.detach().copy_(ours)
    averaged.n_averaged.fill_(max(group.get(EMA_STEPS, 0) for group in optimizer.param_groups))


@torch.no_grad()
def copy_from(optimizer: StateOptimizer, averaged: AveragedModel, model: torch.nn.Module) -> None:
    """See `onepass.optim.AdamW.ema_from`."""
    theirs = dict(_pairs(optimizer, "ema_from", averaged, model))
    count = int(averaged.n_averaged)
    groups = {p: group for group in optimizer.param_groups for p in group["params"] if p in theirs}
    optimizer._table = None  # remade with the states that are made here
    complete(optimizer, list(groups), list(groups.values()))
    for param in groups:
        local(optimizer.state[param][EMA]).copy_(local(theirs[param]))
    for group in optimizer.param_groups:
        group[EMA_STEPS] = count


def _require_averages(optimizer: StateOptimizer, call: str) -> None:
    if optimizer.ema_decay is None:
        raise RuntimeError(
            f"{type(optimizer).__name__}: {call} must be called with ema_decay, got None"
        )


def _pairs(
    optimizer: StateOptimizer, call: str, averaged: AveragedModel, model: torch.nn.Module
) -> Sequence[tuple[Tensor, Tensor]]:
    """(parameter, its counterpart) of all parameters of the model."""
    _require_averages(optimizer, call)
    ours, theirs = list(model.parameters()), list(averaged.module.parameters())
    if [p.shape for p in ours] != [p.shape for p in theirs]:
        raise ValueError(
            f"{type(optimizer).__name__}: {call} must be given an AveragedModel of the model, got "
            "other parameters"
        )
    return list(zip(ours, theirs, strict=True))


@torch.no_grad()  # an interrupt of a `with` could leave it switched on
def _write(values: dict[Tensor, Tensor]) -> None:
    """Sets these parameters to these values, rounded."""
    for param, value in values.items():
        local(param).copy_(local(value))
    torch.autograd.graph.increment_version(list(values))
