"""The frame of optimizers whose update depends on a whole parameter: norms, means, products.

torch's operations compute the update. The operator applies it, and this file makes a step complete
or undone. An optimizer is its formula (`FormulaOptimizer._update`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from onepass._imported import is_dtensor
from onepass._ops import optimizer as _ops
from onepass.optim import masters
from onepass.optim.attempt import Attempt
from onepass.optim.averages import Factor
from onepass.optim.checks import refuse_freed
from onepass.optim.contract import ALGORITHMS
from onepass.optim.flat_state import Numbers, local, strides_of
from onepass.optim.optimizer import FlatOptimizer
from onepass.optim.scaling import StepUnscales


class UpdateOptimizer(FlatOptimizer):
    """Base of the optimizers that pass updates to the operator instead of gradients."""

    # The last part of a step: param - lr (update + weight_decay param).
    _algorithm = ALGORITHMS["SGD"]
    # torch.amp.GradScaler unscales before the step, and skips it if there are infinities.
    _step_supports_amp_scaling = StepUnscales(divides=False)
    _takes_codes = False  # moments in 8 bits

    def _accept(self, options, settings: dict) -> None:
        super()._accept(options, settings)
        if self.state_dtype == "int8" and not self._takes_codes:
            raise ValueError(
                f"{type(self).__name__}: state_dtype must be None, torch.float32 or "
                "torch.bfloat16, got 'int8'"
            )

    def _measure_norm(self, params, gradients, are_sharded: bool) -> bool:
        makes = super()._measure_norm(params, gradients, are_sharded)
        if makes and self._norm is not None and self._norm.device.type != "cpu":
            return bool(self._norm.isfinite())  # no kernel could decide it for these states
        return makes

    def _updates(
        self,
        attempt: Attempt,
        params: Sequence[Tensor],
        groups: Sequence[dict],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """The updates, in the parameters' memory order; further changes are recorded in the
        attempt.

        Args:
            params: DTensors if they are sharded.
            gradients: this rank's parts.
        """
        raise NotImplementedError

    def _call(
        self, attempt: Attempt, numbers: Numbers, params: list[Tensor], gradients: list[Tensor]
    ) -> bool:
        table = self._step_table(attempt, numbers, params)
        if table is None:
            return False
        groups = self._groups_of(numbers)
        updates = self._updates_of(attempt, attempt.params, groups, gradients)
        hyper, options = self._settings(gradients[0].device)
        options = self._options_of_updates(options)
        return _ops.optimizer_step(attempt.ran, self._algorithm, table, updates, hyper, **options)

    def _updates_of(
        self,
        attempt: Attempt,
        params: Sequence[Tensor],
        groups: Sequence[dict],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """`_updates`, and then gradients set to zeros if that is requested."""
        self._refuse_unlike(params, gradients)
        with _without_autocast(gradients[0].device.type):
            updates = self._updates(attempt, params, groups, gradients)
        if self.zero_grads:
            attempt.zeroed = [*attempt.zeroed, *gradients]
        return updates

    def _groups_of(self, numbers: Numbers) -> list[dict]:
        groups = [group for group in self.param_groups for _ in group["params"]]
        return [groups[i] for i in numbers]

    @staticmethod
    def _options_of_updates(options: dict) -> dict:
        """The options without those about gradients."""
        theirs = ("max_norm", "norm", "zero_gradients")
        return {key: value for key, value in options.items() if key not in theirs}

    def _refuse_unlike(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        name = type(self).__name__
        for param, gradient in zip(params, gradients, strict=True):
            if gradient.shape != local(param).shape:
                raise RuntimeError(
                    f"{name}: gradients must have their parameter's shape, "
                    f"{tuple(local(param).shape)}, got {tuple(gradient.shape)}"
                )
        refuse_freed(name, "gradients", gradients)
        refuse_freed(name, "params", params)

    def _factor(self) -> Factor:
        """The factor that clips gradients; None: they are within the limit."""
        if self._norm is None:
            return None
        factor = (self.max_grad_norm / (self._norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu":
            return factor
        return None if factor == 1.0 else float(factor)


def _without_autocast(device: str) -> AbstractContextManager:
    """Products keep their dtype.

    Entered only under autocast: an interrupt before `__exit__` runs leaves torch's count of nested
    autocasts one too high, and autocast then keeps the casts of old weights for the next steps.
    """
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class Values(NamedTuple):
    """The inputs of a formula for one parameter, in the dtype of the arithmetic."""

    param: Tensor  # the float32 master, where there is one
    gradient: Tensor  # clipped; its sign turned to maximize
    states: Mapping[str, Tensor]
    step: int  # this one's number, from 1
    group: dict
    dtype: torch.dtype  # of the results' precision: with a master, of the arithmetic


class FormulaOptimizer(UpdateOptimizer):
    """Base of the optimizers that are a formula of one parameter's tensors.

    A subclass defines the states of a parameter (`_shapes`) and the update (`_update`). The
    states are float32, float64 beside float64 parameters, and written after the operator has run.
    """

    _counts_steps = True

    def _shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """The states of a parameter, and their shapes."""
        raise NotImplementedError

    def _update(self, values: Values) -> tuple[Tensor, dict[str, Tensor]]:
        """(update, the states after the step): the operator computes param - lr update - lr
        weight_decay param with the lr and weight_decay of `_hyper`. Does not change its inputs."""
        raise NotImplementedError

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ()  # of the operator

    def _accept(self, options, settings: dict) -> None:
        super()._accept(options, settings)
        if self.state_dtype not in (None, torch.float32):
            raise ValueError(
                f"{type(self).__name__}: state_dtype must be None or torch.float32, got "
                f"{self.state_dtype!r}"
            )

    def _check_param(self, param: Tensor, group: dict) -> None:
        super()._check_param(param, group)
        name = type(self).__name__
        if is_dtensor(param):
            raise RuntimeError(
                f"{name}: params must not be DTensors, got one: the update depends on all of a "
                "parameter"
            )

    def _complete_states(self, params: Sequence[Tensor], groups: Sequence[dict]) -> None:
        super()._complete_states(params, groups)
        for param in params:
            entry = self.state[param]
            for key, shape in self._shapes(param).items():
                value, dtype = entry.get(key), _arithmetic(param)
                if value is None:
                    entry[key] = torch.zeros(shape, dtype=dtype, device=param.device)
                elif value.shape != torch.Size(shape):
                    raise RuntimeError(
                        f"{type(self).__name__}: {key} of a parameter must have shape {shape}, got "
                        f"{tuple(value.shape)}"
                    )
                elif not value.is_floating_point():
                    raise RuntimeError(
                        f"{type(self).__name__}: {key} of a parameter must have a floating-point "
                        f"dtype, got {value.dtype}"
                    )
                elif value.dtype is not dtype:
                    entry[key] = value.to(dtype)

    def _updates(self, attempt, params, groups, gradients) -> list[Tensor]:
        factor = self._factor()
        updates, written = [], []
        for param, group, gradient in zip(params, groups, gradients, strict=True):
            entry, dtype = self.state[param], _arithmetic(param)
            # Sums depend on the order of elements in memory: make it always the same.
            gradient = gradient.to(dtype).contiguous()
            if factor is not None:
                gradient = gradient * factor
            states = {key: entry[key] for key in self._shapes(param)}
            update, after = self._update(
                Values(
                    masters.value(param, entry).to(dtype).contiguous(),
                    -gradient if group["maximize"] else gradient,
                    states,
                    int(entry["step"]) + 1,
                    group,
                    param.dtype if self.master is None else dtype,
                )
            )
            updates.append(laid_as(param, update))
            written += [(states[key], value) for key, value in after.items()]
        attempt.written = written
        return updates


def _arithmetic(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def laid_as(param: Tensor, update: Tensor) -> Tensor:
    """An update in its parameter's memory order, or contiguous if that has gaps; itself or a
    copy."""
    strides = strides_of(param)
    if update.stride() == strides:
        return update
    like = torch.empty_strided(param.shape, strides, dtype=update.dtype, device=update.device)
    return like.copy_(update)
