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
from onepass.optim.states import StateOptimizer


class AveragingOptimizer(StateOptimizer):
    """Uses of the averages that steps keep (`ema_decay`)."""

    @contextlib.contextmanager
    def swap_ema(self) -> Iterator[None]:
        """Puts the averages, rounded, in place of the parameters, within a ``with``.

        For evaluating and saving a model. Afterwards the parameters have their old values, whatever
        was written to them inside. Inside, the optimizer's ``state_dict`` is the same as outside,
        and its steps, copies and pickles are refused. Parameters without an average, which no step
        has changed yet, stay unchanged; so do buffers, such as a batch norm's. Holds a copy of the
        parameters.

        Raises:
            RuntimeError: no ema_decay, or a ``with`` of this kind inside another.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = onepass.optim.AdamW(model.parameters(), lr=0.1, ema_decay=0.9)
            >>> for _ in range(2):
            ...     model(torch.ones(8, 2)).sum().backward()
            ...     optimizer.step()
            >>> last = model.weight.detach().clone()
            >>> with optimizer.swap_ema():
            ...     torch.equal(model.weight, optimizer.state[model.weight]["ema"])
            True
            >>> torch.equal(model.weight, last)
            True
        """
        self._require_averages("swap_ema")
        if self._is_swapped:
            raise RuntimeError(
                f"{type(self).__name__}: swap_ema must not be called inside swap_ema, got a call"
            )
        table = self._table
        if table is not None and table.masters:
            masters.reseed_changed(table)
            table.versions = [p._version for p in table.master_params]
        averages = {
            param: self.state[param][EMA]
            for group in self.param_groups
            for param in group["params"]
            if self.state.get(param, {}).get(EMA) is not None
        }
        kept = {param: local(param).detach().clone() for param in averages}

        done: list[bool] = []

        def restore() -> None:
            if done:
                return
            _write(kept)
            if table is not None and table.masters:
                table.versions = [p._version for p in table.master_params]
            self._is_swapped, self._kept = False, StateOptimizer._kept
            done.append(True)

        try:
            try:
                self._is_swapped, self._kept = True, kept
                _write(averages)
                yield
            finally:
                restore()
        finally:
            restore()

    @torch.no_grad()
    def ema_to(self, averaged: AveragedModel, model: torch.nn.Module) -> None:
        """Writes the averages into a `torch.optim.swa_utils.AveragedModel`.

        Parameters without an average, and buffers unless `averaged` averages those itself, are
        copied from the model.

        Args:
            averaged: made from `model`, or from one with the same parameters in the same order.
            model: whose parameters this optimizer steps, or some of them.

        Raises:
            RuntimeError: no ema_decay.
            ValueError: other parameters.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=0.9)
            >>> model(torch.ones(8, 2)).sum().backward()
            >>> optimizer.step()
            >>> averaged = torch.optim.swa_utils.AveragedModel(model)
            >>> optimizer.ema_to(averaged, model)
            >>> torch.equal(averaged.module.weight, model.weight), int(averaged.n_averaged)
            (True, 1)
        """
        self._require_averages("ema_to")
        pairs = self._pairs("ema_to", averaged, model)
        for param, theirs in pairs:
            entry = self.state.get(param, {})
            value = entry[EMA] if entry.get(EMA) is not None else param
            theirs.detach().copy_(value)
        if not averaged.use_buffers:
            for ours, theirs in zip(model.buffers(), averaged.module.buffers(), strict=True):
                theirs.detach().copy_(ours)
        averaged.n_averaged.fill_(max(group.get(EMA_STEPS, 0) for group in self.param_groups))

    @torch.no_grad()
    def ema_from(self, averaged: AveragedModel, model: torch.nn.Module) -> None:
        """Continues the averages of a `torch.optim.swa_utils.AveragedModel`.

        Args:
            averaged, model: as of ``ema_to``. Only parameters count.

        Raises:
            RuntimeError: no ema_decay.
            ValueError: other parameters; nothing has changed.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> averaged = torch.optim.swa_utils.AveragedModel(model)
            >>> averaged.update_parameters(model)
            >>> optimizer = onepass.optim.AdamW(model.parameters(), ema_decay=0.9)
            >>> optimizer.ema_from(averaged, model)
            >>> optimizer.param_groups[0]["ema_steps"]
            1
        """
        self._require_averages("ema_from")
        theirs = dict(self._pairs("ema_from", averaged, model))
        count = int(averaged.n_averaged)
        groups = {p: group for group in self.param_groups for p in group["params"] if p in theirs}
        self._table = None  # remade with the states that are made here
        self._complete_states(list(groups), list(groups.values()))

        for param in groups:
            local(self.state[param][EMA]).copy_(local(theirs[param]))
        for group in self.param_groups:
            group[EMA_STEPS] = count

    def _require_averages(self, call: str) -> None:
        if self.ema_decay is None:
            raise RuntimeError(
                f"{type(self).__name__}: {call} must be called with ema_decay, got None"
            )

    def _pairs(
        self, call: str, averaged: AveragedModel, model: torch.nn.Module
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """(parameter, its counterpart) of all parameters of the model."""
        ours, theirs = list(model.parameters()), list(averaged.module.parameters())
        if [p.shape for p in ours] != [p.shape for p in theirs]:
            raise ValueError(
                f"{type(self).__name__}: {call} must be given an AveragedModel of the model, got "
                "other parameters"
            )
        return list(zip(ours, theirs, strict=True))


@torch.no_grad()  # an interrupt of a `with` could leave it switched on
def _write(values: dict[Tensor, Tensor]) -> None:
    """Sets these parameters to these values, rounded."""
    for param, value in values.items():
        local(param).copy_(local(value))
    torch.autograd.graph.increment_version(list(values))
