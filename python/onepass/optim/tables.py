"""The tables that steps pass to the operator: the places of states, and all groups' settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass import _C
from onepass.optim import masters
from onepass.optim.attempt import Attempt
from onepass.optim.checks import (
    check_device,
    check_dtype,
    check_shape,
    refuse_mixed,
    refuse_partial,
    refuse_shared_memory,
    refuse_sparse,
)
from onepass.optim.contract import Hyper
from onepass.optim.distributed import state_like
from onepass.optim.flat_state import (
    EMA,
    EMA_STEPS,
    SCALE,
    Numbers,
    Request,
    Table,
    TableWriter,
    addresses_of,
    layouts_of,
    local,
    noise_number,
    on_device,
    strides_of,
)
from onepass.optim.options import decay_at
from onepass.optim.states import StateOptimizer

LR = Hyper._fields.index("lr")


class TableOptimizer(StateOptimizer):
    """Makes the tables, and checks whether they are current."""

    def _is_current(self, table: Table, numbers: Numbers, device: torch.device) -> bool:
        """Whether these are the settings and states that the table was made for."""
        return (
            table.device == device
            and table.contents is not None
            and isinstance(self.state, dict)
            and _C.holds(self.state, table.contents)
            and (table.all_have_state or all(map(table.has_state.__getitem__, numbers)))
            and table.kinds == self._kinds()
        )

    def _kinds(self) -> list[tuple[str, ...]]:
        """The states of each group per element, without masters."""
        averages = () if self.ema_decay is None else (EMA,)
        return [(*self._moment_keys(group), *averages) for group in self.param_groups]

    def _make_table(
        self, attempt: Attempt, params: list[Tensor], numbers: Numbers, gradients: list[Tensor]
    ) -> Table:
        name = type(self).__name__
        groups = [group for group in self.param_groups for _ in group["params"]]
        refuse_sparse(name, gradients)  # before any state is made
        refuse_mixed(name, [params[i] for i in numbers], gradients)
        if attempt.accumulation is not None and attempt.accumulation.is_in_hook():
            numbers = attempt.accumulation.to_come(params)
        check_device(name, [params[i] for i in numbers])
        refuse_shared_memory(name, "params", [params[i] for i in numbers])
        if not self._is_linear:
            refuse_partial(name, [params[i] for i in numbers])
        attempt.may_change_states()
        self._complete_states([params[i] for i in numbers], [groups[i] for i in numbers])
        writer = TableWriter(self._places)
        kinds, moments = self._kinds(), [self._moment_keys(group) for group in self.param_groups]
        group_numbers = [n for n, g in enumerate(self.param_groups) for _ in g["params"]]
        with_grad = set(numbers)
        has_state: list[bool] = []
        with_master: list[tuple[Tensor, dict]] = []
        for number, (param, group) in enumerate(zip(params, groups, strict=True)):
            entry = self.state.get(param) or {}
            shows_step = self._shows_step(param, group)
            step = entry.get("step") if shows_step else self._hidden_steps.get(param)
            keys = kinds[group_numbers[number]]
            has_state.append(step is not None and all(entry.get(k) is not None for k in keys))
            if number in with_grad or has_state[-1]:
                self._check_entry(number, param, entry, keys)
            master = entry.get("master", entry.get("remainder"))
            if param.dtype.itemsize != 2:
                master = None
            writer.add(
                noise_number(number, param),
                group_numbers[number],
                step,
                shows_step,
                [entry.get(k) for k in moments[group_numbers[number]]],
                [entry.get(k + SCALE) for k in moments[group_numbers[number]]],
                master,
                entry.get(EMA) if EMA in keys else None,
            )
            if master is not None:
                with_master.append((param, entry))
        known = set(params)
        self._hidden_steps = {p: step for p, step in self._hidden_steps.items() if p in known}
        entries = list(self.state.values())
        are_dicts = all(isinstance(holder, dict) for holder in (self.state, *entries))
        in_use = [*self._hidden_steps.values(), *(v for entry in entries for v in entry.values())]
        self._places.keep_only([v for v in in_use if isinstance(v, Tensor)])
        table = Table(
            params=params,
            grouped=[list(group["params"]) for group in self.param_groups],
            contents=_C.contents(self.state) if are_dicts else None,
            has_state=has_state,
            all_have_state=all(has_state),
            kinds=kinds,
            layout=writer.layout(),
            buffers=writer.buffers,
            entries=writer.entries,
            addresses=addresses_of(writer.entries),
            layouts=layouts_of(params),
            masters=with_master,
            master_params=[p for p, _ in with_master],
            are_sharded=any(local(p) is not p for p in params),
            device=local(params[numbers[0]]).device,
        )
        masters.follow(table, self._table)
        return table

    def _check_entry(self, number: int, param: Tensor, entry: dict, keys: Sequence[str]) -> None:
        """Checks that every state has its parameter's memory order: a replaced one may not."""
        name, here = type(self).__name__, local(param)
        for key in (*keys, "master", "remainder"):
            value = entry.get(key)
            if value is None:
                continue
            value = entry[key] = state_like(param, value)
            tensor = local(value)
            check_shape(name, param, key, value, number)
            check_dtype(name, number, param, key, tensor.dtype, key + SCALE in entry)
            if tensor.stride() != strides_of(here) and tensor.numel() > 1:
                (made,) = self._places.make([Request(param, key, tensor.dtype)])
                local(made).copy_(tensor)
                entry[key] = made

    def _decay(self, group: dict) -> float:
        """The decay of this step's averages; the first average is the parameter."""
        before = group.get(EMA_STEPS, 0)
        if before == 0:
            return 0.0
        name, decay = type(self).__name__, self.ema_decay
        if self._accumulation is None:
            return decay_at(name, decay, before + 1)
        held, key = self._accumulation.decays, id(group)
        if key not in held or held[key][:2] != (decay, before):
            held[key] = decay, before, decay_at(name, decay, before + 1)
        return held[key][2]

    def _hyper_tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(settings of all groups, the same on `device` if that is not the CPU)."""
        rows = tuple([self._hyper(group) for group in self.param_groups])
        if self.ema_decay is not None:
            pairs = zip(rows, self.param_groups, strict=True)
            rows = tuple([row._replace(ema_decay=self._decay(group)) for row, group in pairs])
        known, table, device_table = self._hyper_tables_held
        if rows != known or (device_table is None) != (device.type == "cpu"):
            # If an interrupt arrives from here on, the next step writes them again.
            self._hyper_tables_held = None, table, device_table
            table = torch.tensor(rows, dtype=torch.float64, device="cpu")
            device_table = on_device(table, device, device_table)
            self._hyper_tables_held = rows, table, device_table
        if device_table is not None and not self._lr_is_in_updates:
            for number, group in enumerate(self.param_groups):
                if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
                    # Without a copy to the host.
                    device_table[number, LR].copy_(group["lr"].squeeze())
        return table, device_table
