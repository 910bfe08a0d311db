"""A step as a whole: its tensors, its table; undone if its operator did not run, else completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onepass import _C
from onepass.optim import masters, states
from onepass.optim.averages import Average
from onepass.optim.checks import (
    check_device,
    refuse_freed,
    refuse_mixed,
    refuse_partial,
    refuse_shared_memory,
    refuse_sparse,
)
from onepass.optim.contract import StepTable
from onepass.optim.distributed import parts_like
from onepass.optim.flat_state import (
    EMA_STEPS,
    Numbers,
    Table,
    are_same,
    is_dense,
    laid_like,
    layouts_of,
    local,
)
from onepass.optim.tables import make_table


class Step:
    """One step of an optimizer: `make` and then, whatever happened, `settle`.

    An interrupt may leave a step at any bytecode. `ran` is filled by the same call that runs the
    operator, so it tells whether to undo or to complete.

    A master that was reseeded, because its parameter was changed from outside, stays: the next step
    would reseed it alike.
    """

    # The parameters with a gradient, and their gradients in the same placement:
    numbers: Numbers = ()
    params: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()
    # This rank's parts of both, where they are sharded; later copies that the operator can use.
    are_sharded = False
    local_params: Sequence[Tensor] = ()
    local_gradients: Sequence[Tensor] = ()

    norm: Tensor | None = None  # as measured, of scaled gradients
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    # What completes it:
    copied: Sequence[tuple[Tensor, Tensor]] = ()  # (parameter with gaps, its new values)
    zeroed: Sequence[Tensor] = ()  # gradients that the operator does not set to zeros
    counted: Sequence[tuple[dict, str, int]] = ()  # (group, setting, its value after the step)
    written: Sequence[tuple[Tensor, Tensor]] = ()  # (state, its values after the step)
    averages: Sequence[Average] = ()  # momenta that the operator does not move
    _states: tuple | None = None
    _is_settled = False

    def __init__(self, optimizer: states.StateOptimizer):
        self.ran: list[bool] = []  # the results of the operator's calls: whether it made the step
        self._optimizer = optimizer
        self._accumulation = optimizer._accumulation  # whose sums are the gradients
        self._before = optimizer._table, optimizer.grad_norm

    def make(self) -> None:
        """Makes the step of all parameters with a gradient.

        Raises:
            RuntimeError, TypeError: nothing has changed after `settle`.
        """
        optimizer, table = self._optimizer, self._optimizer._table
        lists = [group["params"] for group in optimizer.param_groups]
        if table is not None and not _C.holds(lists, optimizer.state, table.watched):
            table = None
        params = _all(type(optimizer).__name__, lists) if table is None else table.params
        self._take_gradients(params)
        if optimizer.ema_decay is not None and not self._is_partial():
            self.counted = [
                (group, EMA_STEPS, group.get(EMA_STEPS, 0) + 1) for group in optimizer.param_groups
            ]
        if not self.gradients:
            clips = optimizer.max_grad_norm is not None
            zero = torch.zeros((), dtype=torch.float32, device="cpu") if clips else None
            optimizer.grad_norm = zero
            self.ran.append(True)
            return
        self.are_sharded = table.are_sharded if table else any(local(p) is not p for p in params)
        if self.are_sharded:
            self._place()
        if not optimizer._measure_norm(self):
            if optimizer.zero_grads:
                self.zeroed = [*self.zeroed, *self.local_gradients]
            self.params = self.counted = ()
            self.ran.append(True)
            return
        self._find_table(table, params)
        try:
            is_made = optimizer._call(self)
        except RuntimeError:
            if optimizer._table.states_stayed():
                self._refuse()  # with a message that names the parameter
                raise
            is_made = False
        if not is_made:
            self._call_anew(params)

    def _take_gradients(self, params: list[Tensor]) -> None:
        taken = self._accumulation
        if self._is_partial():
            number, gradient = taken.only(params)
            self.numbers, self.params, self.gradients = (number,), [params[number]], [gradient]
        else:
            gradients, missing = _C.attributes(params, "grad")
            if taken is not None:
                gradients = taken.gradients(params, gradients)
                missing = any(gradient is None for gradient in gradients)
            self.numbers, self.params, self.gradients = range(len(params)), params, gradients
            if missing:
                self.numbers = tuple([i for i, g in enumerate(gradients) if g is not None])
                self.params = [params[i] for i in self.numbers]
                self.gradients = [gradients[i] for i in self.numbers]
        self.local_params, self.local_gradients = self.params, self.gradients

    def _is_partial(self) -> bool:
        """Whether this is the step of one parameter within backward."""
        return self._accumulation is not None and self._accumulation.is_in_hook()

    def _place(self) -> None:
        """Gives the gradients the placement of their parameters, and finds this rank's parts."""
        given, name = self.gradients, type(self._optimizer).__name__
        self.gradients, self.local_params, self.local_gradients = parts_like(
            name, self.params, given
        )
        if self._optimizer.zero_grads:
            pairs = zip(given, self.gradients, strict=True)
            self.zeroed = [local(g) for g, placed in pairs if g is not placed]

    # ---- the table -------------------------------------------------------------------------------

    def _find_table(self, table: Table | None, params: list[Tensor]) -> None:
        """Gives the optimizer a table that has this step's parameters and states.

        Args:
            table: the present one, if the groups and states are those that it was made from.
        """
        device = self.gradients[0].device
        if table is None or table.device != device or table.kinds != self._optimizer._kinds():
            table = self._make_table(params)
        if self.are_sharded and not are_same(self.local_params, table.local_params):
            table.step_tables.clear()
            table.local_params = self.local_params
        if self.numbers not in table.step_tables:
            if not table.fits(self.numbers, self.params):
                table = self._make_table(params)
            masters.reseed_moved(table)
        masters.reseed_changed(table)

    def _make_table(self, params: list[Tensor]) -> Table:
        optimizer, name = self._optimizer, type(self._optimizer).__name__
        refuse_sparse(name, self.gradients)  # before any state is made
        refuse_mixed(name, self.params, self.gradients)
        numbers = self._accumulation.to_come(params) if self._is_partial() else self.numbers
        stepped = [params[i] for i in numbers]
        check_device(name, stepped)
        refuse_shared_memory(name, "params", stepped)
        if not optimizer._is_linear:
            refuse_partial(name, stepped)
        self._may_change_states()
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        states.complete(optimizer, stepped, [groups[i] for i in numbers])
        optimizer._table = make_table(optimizer, params, numbers)
        return optimizer._table

    def table(
        self, numbers: Numbers, params: list[Tensor], watched: Numbers | None = None
    ) -> StepTable | None:
        """The operator's arguments for these of the parameters; None if one has gaps."""
        table = self._optimizer._table
        if self.copied:
            return StepTable(params, table.buffers, table.layout[list(numbers)])
        return table.step_table(numbers, params, numbers if watched is None else watched)

    def _call_anew(self, params: list[Tensor]) -> None:
        """Makes the step with a new table.

        Parameters that changed their shape, dtype or memory need a new table, and states in their
        memory order; so do states that changed their memory. For parameters or gradients in another
        order, or with gaps, it works on copies.
        """
        optimizer, table = self._optimizer, self._optimizer._table
        self._refuse()
        if table.layouts != layouts_of(params) or not table.states_stayed():
            self._make_table(params)
        else:
            masters.reseed_moved(table)
        dense = [p if is_dense(p) else p.contiguous() for p in self.local_params]
        laid = [laid_like(p, g) for p, g in zip(dense, self.local_gradients, strict=True)]
        pairs = zip(self.local_params, dense, strict=True)
        self.copied = [(param, copy) for param, copy in pairs if copy is not param]
        if optimizer.zero_grads:
            pairs = zip(self.local_gradients, laid, strict=True)
            self.zeroed = [*self.zeroed, *[g for g, copy in pairs if copy is not g]]
        self.local_params, self.local_gradients = dense, laid
        if not optimizer._call(self):
            raise RuntimeError(
                f"{type(optimizer).__name__}: params must stay where they are during a step, got "
                "others"
            )

    def _refuse(self) -> None:
        """Raises for tensors that a step cannot use."""
        name = type(self._optimizer).__name__
        refuse_sparse(name, self.local_gradients)
        refuse_freed(name, "gradients", self.local_gradients)
        refuse_freed(name, "params", self.local_params)
        if self._optimizer.zero_grads:
            refuse_shared_memory(name, "gradients set to zeros", self.local_gradients)
        refuse_shared_memory(name, "params", self.local_params)

    # ---- the end ---------------------------------------------------------------------------------

    def _may_change_states(self) -> None:
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
        if self._accumulation is not None and not self._accumulation.is_in_hook():
            self._accumulation.end_round()
        for group, setting, value in self.counted:
            group[setting] = value
        for target, value in (*self.copied, *self.written):
            target.copy_(value)
        for gradient in self.zeroed:
            gradient.zero_()
        if self.params:
            # Autograd, which may have saved one for a backward, must know that it changed.
            torch.autograd.graph.increment_version(self.params)
            masters.remember(self._optimizer._table)

    def _undo(self) -> None:
        optimizer = self._optimizer
        optimizer._table, optimizer.grad_norm = self._before
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


def _all(name: str, lists: list) -> list[Tensor]:
    """The parameters of all groups."""
    for params in lists:
        if isinstance(params, Iterator):
            raise TypeError(f"{name}: params must be a list, got {type(params).__name__}")
    return [p for params in lists for p in params]
