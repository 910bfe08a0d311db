"""A step as a whole: undone if its operator did not run, completed if it did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.optim.averages import Average
from onepass.optim.states import StateOptimizer


class Attempt:
    """The changes of one step before its operator runs, and those after it.

    An interrupt may leave a step at any bytecode. `ran` is filled by the same call that runs the
    operator, so it tells whether to undo or to complete.

    A master that was reseeded, because its parameter was changed from outside, stays: the next step
    would reseed it alike.
    """

    params: Sequence[Tensor] = ()  # changed by the operator
    copied: Sequence[tuple[Tensor, Tensor]] = ()  # (parameter with gaps, its new values)
    zeroed: Sequence[Tensor] = ()  # gradients that the operator does not set to zeros
    accumulation: object = None  # a FusedAccumulate whose sums are the gradients
    counted: Sequence[tuple[dict, str, int]] = ()  # (group, setting, its value after the step)
    written: Sequence[tuple[Tensor, Tensor]] = ()  # (state, its values after the step)
    averages: Sequence[Average] = ()  # momenta that the operator does not move
    _states: tuple | None = None
    _is_settled = False

    def __init__(self, optimizer: StateOptimizer):
        self.ran: list[bool] = []  # the results of the operator's calls: whether it made the step
        self._optimizer = optimizer
        self._before = optimizer._table, optimizer._norm, optimizer.grad_norm

    def may_change_states(self) -> None:
        """Records the present states; call it before one is made, moved or dropped."""
        if self._states is not None:
            return
        optimizer = self._optimizer
        entries = [(key, entry, _items(entry)) for key, entry in optimizer.state.items()]
        self._states = entries, optimizer._hidden_steps, optimizer._places
        optimizer._hidden_steps = dict(optimizer._hidden_steps)
        optimizer._places = optimizer._places.copy()

    def settle(self) -> None:
        """Completes the step or undoes it; may be called again."""
        if self._is_settled:
            return
        if any(self.ran):
            self._complete()
        else:
            self._undo()
        self._is_settled = True

    def _complete(self) -> None:
        for average in self.averages:
            average.move()
        if self.accumulation is not None and not self.accumulation.is_in_hook():
            self.accumulation.end_round()
        for group, setting, value in self.counted:
            group[setting] = value
        for target, value in (*self.copied, *self.written):
            target.copy_(value)
        for gradient in self.zeroed:
            gradient.zero_()
        if not self.params:
            return
        # Autograd, which may have saved a parameter for a backward, must know that it changed.
        torch.autograd.graph.increment_version(self.params)
        table = self._optimizer._table
        if table.masters:
            table.versions = [p._version for p in table.master_params]

    def _undo(self) -> None:
        optimizer = self._optimizer
        optimizer._table, optimizer._norm, optimizer.grad_norm = self._before
        if self._states is None:
            return
        entries, optimizer._hidden_steps, optimizer._places = self._states
        known = {id(key) for key, _, _ in entries}
        for key in [key for key in optimizer.state if id(key) not in known]:
            del optimizer.state[key]
        for _, entry, items in entries:
            if items is not None:
                entry.clear()
                entry.update(items)


def _items(entry: object) -> dict | None:
    return dict(entry) if isinstance(entry, dict) else None
