"""The base of all optimizers here: states in flat buffers, one operator call per step, masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from onepass import _C
from onepass._imported import is_fake
from onepass._ops import optimizer as _ops
from onepass.optim import masters
from onepass.optim.atomic import settled
from onepass.optim.attempt import Attempt
from onepass.optim.checkpoints import CheckpointOptimizer
from onepass.optim.checks import refuse_freed, refuse_shared_memory, refuse_sparse
from onepass.optim.contract import StepTable
from onepass.optim.distributed import agreed, local_norm, parts_like, total_norm
from onepass.optim.ema import AveragingOptimizer
from onepass.optim.flat_state import (
    EMA_STEPS,
    Numbers,
    are_same,
    is_dense,
    laid_like,
    layouts_of,
    local,
)
from onepass.optim.options import told
from onepass.optim.scaling import StepUnscales
from onepass.optim.tables import TableOptimizer


class FlatOptimizer(TableOptimizer, CheckpointOptimizer, AveragingOptimizer):
    """Base of the optimizers: `onepass.optim.AdamW` documents their common options."""

    _step_supports_amp_scaling = StepUnscales()
    _accumulation: FusedAccumulate | None = None  # takes the gradients, if set

    def __repr__(self) -> str:
        """torch's, with the options that are set beside those of its groups."""
        lines = [f"    {line}\n" for line in told(self)]
        options = f"Options\n{''.join(lines)}" if lines else ""
        return f"{super().__repr__().removesuffix(')')}{options})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the gradients of all parameters that have one.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: sparse gradients, tensors that do not fit together; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch._disable_dynamo
    def _step(self) -> None:
        attempt = Attempt(self)
        settled(lambda: self._make_step(attempt), attempt.settle)

    def _make_step(self, attempt: Attempt) -> None:
        if self._is_swapped:
            raise RuntimeError(
                f"{type(self).__name__}: step must not be called inside swap_ema, got a call"
            )
        if self._accumulation is not None:
            self._refuse_scaler()
        lists = [group["params"] for group in self.param_groups]
        table = self._table
        is_known = table is not None and _C.hold_same(lists, table.grouped)
        if not is_known:
            for params in lists:
                if isinstance(params, Iterator):
                    raise TypeError(
                        f"{type(self).__name__}: params must be a list, got {type(params).__name__}"
                    )
        all_params = table.params if is_known else [p for params in lists for p in params]
        numbers, params, gradients = self._gradients(attempt, all_params)
        if self.ema_decay is not None and not self._is_partial():
            attempt.counted = [
                (group, EMA_STEPS, group.get(EMA_STEPS, 0) + 1) for group in self.param_groups
            ]
        if not gradients:
            clips = self.max_grad_norm is not None
            self.grad_norm = torch.zeros((), dtype=torch.float32, device="cpu") if clips else None
            attempt.ran.append(True)
            return
        are_sharded = table.are_sharded if is_known else any(local(p) is not p for p in all_params)
        given, local_params, local_gradients = gradients, params, gradients
        if are_sharded:
            gradients, local_params, local_gradients = parts_like(
                type(self).__name__, params, given
            )
        if not self._measure_norm(params, gradients, are_sharded):
            if self.zero_grads:
                attempt.zeroed = [local(g) for g in given]
            attempt.counted = ()
            attempt.ran.append(True)
            return
        if not is_known or not self._is_current(table, numbers, gradients[0].device):
            table = self._table = self._make_table(attempt, all_params, numbers, gradients)
        if table.masters:
            masters.reseed_changed(table)
        if are_sharded and not are_same(local_params, table.local_params):
            table.step_tables.clear()
            table.local_params = local_params
        if numbers not in table.step_tables:  # a new table has the present parameters
            if [table.layouts[i] for i in numbers] != layouts_of(params):
                table = self._table = self._make_table(attempt, all_params, numbers, gradients)
            masters.reseed_moved(table)
        attempt.params = params
        if are_sharded and self.zero_grads:
            pairs = zip(given, gradients, strict=True)
            attempt.zeroed = [local(g) for g, placed in pairs if g is not placed]
        try:
            try:
                is_made = self._call(attempt, numbers, local_params, local_gradients)
            except RuntimeError:
                if self._table.states_stayed():
                    raise
                is_made = False
            if not is_made:
                self._call_anew(
                    attempt, all_params, numbers, gradients, local_params, local_gradients
                )
        except RuntimeError:
            self._refuse(local_params, local_gradients)  # with a message that names the parameter
            raise

    def _gradients(
        self, attempt: Attempt, params: list[Tensor]
    ) -> tuple[Numbers, list[Tensor], list[Tensor]]:
        """(numbers, parameters, gradients) of those to be stepped."""
        taken = attempt.accumulation = self._accumulation
        if taken is not None and taken.is_in_hook():
            number, gradient = taken.only(params)
            return (number,), [params[number]], [gradient]
        gradients, missing = _C.attributes(params, "grad")
        if taken is not None:
            gradients = taken.gradients(params, gradients)
            missing = any(gradient is None for gradient in gradients)
        if not missing:
            return range(len(params)), params, gradients
        numbers = tuple([i for i, g in enumerate(gradients) if g is not None])
        return numbers, [params[i] for i in numbers], [gradients[i] for i in numbers]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, and sums of `fused_accumulate` too."""
        super().zero_grad(set_to_none)
        if self._accumulation is not None:
            self._accumulation.clear()

    def __getstate__(self) -> dict:
        if self._accumulation is not None:
            self._accumulation.refuse_copies()
        return super().__getstate__()

    def _is_partial(self) -> bool:
        """Whether this is the step of one parameter within backward."""
        return self._accumulation is not None and self._accumulation.is_in_hook()

    def _measure_norm(
        self, params: list[Tensor], gradients: list[Tensor], are_sharded: bool
    ) -> bool:
        """Sets grad_norm if it is needed. False: the step must not be made."""
        self._norm = None
        self._grad_scale = grad_scale = getattr(self, "grad_scale", None)
        self._found_inf = getattr(self, "found_inf", None)
        if are_sharded and self._found_inf is not None:
            self._found_inf = agreed(self._found_inf, params)
        if self.max_grad_norm is not None:
            measure = total_norm if are_sharded else local_norm
            self._norm = measure(type(self).__name__, gradients)
            norm = self._norm if grad_scale is None else self._norm / grad_scale
            self.grad_norm = norm.float()
        if gradients[0].device.type != "cpu":
            return True  # the kernel decides: the host does not wait for it
        if self._found_inf is not None and float(self._found_inf) != 0.0:
            return False
        # Parameters without values (fake, "meta") are refused when the table is made.
        return self._norm is None or is_fake(norm) or bool(norm.isfinite())

    def _call(
        self, attempt: Attempt, numbers: Numbers, params: list[Tensor], gradients: list[Tensor]
    ) -> bool:
        """A step of the parameters with these numbers; `params` are this rank's parts.

        False: the table is stale, and no step was made.
        """
        table = self._step_table(attempt, numbers, params)
        if table is None:
            return False
        hyper, options = self._settings(gradients[0].device)
        return _ops.optimizer_step(attempt.ran, self._algorithm, table, gradients, hyper, **options)

    def _step_table(
        self,
        attempt: Attempt,
        numbers: Numbers,
        params: list[Tensor],
        watched: Numbers | None = None,
    ) -> StepTable | None:
        """The operator's arguments for these of the parameters; None if one has gaps."""
        table = self._table
        if attempt.copied:
            return StepTable(params, table.buffers, table.layout[list(numbers)])
        return table.step_table(numbers, params, numbers if watched is None else watched)

    def _settings(self, device: torch.device) -> tuple[Tensor, dict]:
        """The operator's settings of all groups, and its options."""
        hyper, device_hyper = self._hyper_tables(device)
        # Only values that differ from the defaults: every keyword costs dispatch time.
        options = {}
        if self._needs_noise():
            options["seed"] = self.param_groups[0].get("seed", 0)
            options["stochastic_params"] = self.master == "stochastic"
            options["stochastic_moments"] = self._rounds_moments()
        if self.zero_grads:
            options["zero_gradients"] = True
        if self._norm is not None:
            options.update(max_norm=self.max_grad_norm, norm=self._norm)
        if self._grad_scale is not None:
            options["grad_scale"] = self._grad_scale
        if self._found_inf is not None:
            options["found_inf"] = self._found_inf
        if device_hyper is not None:
            options["device_hyper"] = device_hyper
        return hyper, options

    def _refuse_scaler(self) -> None:
        """Refuses a scaler: it divides ``.grad`` and looks for infinities there, not in the
        sums."""
        for name in ("grad_scale", "found_inf"):
            if getattr(self, name, None) is not None:
                raise RuntimeError(
                    f"{type(self).__name__}: step must not be that of a GradScaler with "
                    f"fused_accumulate, got {name}: a scaler does not find the sums"
                )

    def _refuse(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Raises for tensors that a step cannot use."""
        name = type(self).__name__
        refuse_sparse(name, gradients)
        refuse_freed(name, "gradients", gradients)
        refuse_freed(name, "params", params)
        if self.zero_grads:
            refuse_shared_memory(name, "gradients set to zeros", gradients)
        refuse_shared_memory(name, "params", params)

    def _call_anew(
        self,
        attempt: Attempt,
        all_params: list[Tensor],
        numbers: Numbers,
        gradients: list[Tensor],
        local_params: list[Tensor],
        local_gradients: list[Tensor],
    ) -> None:
        """Makes the step with a new table.

        Parameters that changed their shape, dtype or memory need a new table, and states in their
        memory order; so do states that changed their memory. For parameters or gradients in another
        order, or with gaps, it works on copies.
        """
        table = self._table
        self._refuse(local_params, local_gradients)
        if table.layouts != layouts_of(all_params) or not table.states_stayed():
            table = self._table = self._make_table(attempt, all_params, numbers, gradients)
        else:
            masters.reseed_moved(table)
        params = [p if is_dense(p) else p.contiguous() for p in local_params]
        laid = [laid_like(p, g) for p, g in zip(params, local_gradients, strict=True)]
        pairs = zip(local_params, params, strict=True)
        attempt.copied = [(param, copy) for param, copy in pairs if copy is not param]
        if self.zero_grads:
            pairs = zip(local_gradients, laid, strict=True)
            copied = [gradient for gradient, copy in pairs if copy is not gradient]
            attempt.zeroed = [*attempt.zeroed, *copied]
        if not self._call(attempt, numbers, params, laid):
            raise RuntimeError(
                f"{type(self).__name__}: params must stay where they are during a step, got others"
            )

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reseeds every master from its parameter.

        Needed only after writes through ``p.data``, which torch does not count; other changes are
        noticed.
        """
        for param, entry in self.state.items():
            if isinstance(entry, dict) and ("master" in entry or "remainder" in entry):
                masters.reseed(param, entry)


class FusedAccumulate(Protocol):
    """See `onepass.optim.accumulate`."""

    decays: dict[int, tuple]

    def gradients(
        self, params: list[Tensor], gradients: list[Tensor | None]
    ) -> list[Tensor | None]: ...
    def only(self, params: list[Tensor]) -> tuple[int, Tensor]: ...
    def to_come(self, params: list[Tensor]) -> Numbers: ...
    def is_in_hook(self) -> bool: ...
    def end_round(self) -> None: ...
    def refuse_copies(self) -> None: ...
    def clear(self) -> None: ...


def number_of(setting: float | Tensor) -> float:
    """A setting for the host; 0 for a tensor on a device, which the kernel reads there."""
    if isinstance(setting, Tensor) and setting.device.type != "cpu":
        return 0.0
    return float(setting)
