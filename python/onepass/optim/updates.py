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
from onepass.optim import masters
from onepass.optim.averages import Factor
from onepass.optim.checks import refuse_freed
from onepass.optim.contract import ALGORITHMS
from onepass.optim.flat_state import local, strides_of
from onepass.optim.optimizer import FlatOptimizer
from onepass.optim.scaling import StepUnscales
from onepass.optim.step import Step


class UpdateOptimizer(FlatOptimizer):
    """Base of the optimizers that pass updates to the operator instead of gradients."""

    # The last part of a step: param - lr (update + weight_decay param).
    _algorithm = ALGORITHMS["SGD"]
    # torch.amp.GradScaler unscales before the step, and skips it if there are infinities.
    _step_supports_amp_scaling = StepUnscales(divides=False)
    _state_dtypes = (None, torch.float32, torch.bfloat16)

    def _measure_norm(self, step: Step) -> bool:
        makes = super()._measure_norm(step)
        if makes and step.norm is not None and step.norm.device.type != "cpu":
            return bool(step.norm.isfinite())  # no kernel could decide it for these states
        return makes

    def _updates(
        self,
        step: Step,
        params: Sequence[Tensor],
        groups: Sequence[dict],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """The updates, in the parameters' memory order; further changes are recorded in the step.

        Args:
            params: DTensors if they are sharded.
            gradients: this rank's parts.
        """
        raise NotImplementedError

    def _operands(self, step: Step) -> list[Tensor]:
        """The updates, in place of the gradients."""
        groups = self._groups_of(step)
        return self._updates_of(step, step.params, groups, step.local_gradients)

    def _updates_of(
        self,
        step: Step,
        params: Sequence[Tensor],
        groups: Sequence[dict],
        gradients: Sequence[Tensor],
    ) -> list[Tensor]:
        """`_updates`, and then gradients set to zeros if that is requested."""
        self._refuse_unlike(params, gradients)
        with _without_autocast(gradients[0].device.type):
            updates = self._updates(step, params, groups, gradients)
        if self.zero_grads:
            step.zeroed = [*step.zeroed, *gradients]
        return updates

    def _groups_of(self, step: Step) -> list[dict]:
        groups = [group for group in self.param_groups for _ in group["params"]]
        return [groups[i] for i in step.numbers]

    def _arguments(self, step: Step) -> tuple[Tensor, dict]:
        """The operator's settings, and its options without those about gradients."""
        hyper, options = super()._arguments(step)
        return hyper, without_gradients(options)

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

    def _factor(self, step: Step) -> Factor:
        """The factor that clips gradients; None: they are within the limit."""
        if step.norm is None:
            return None
        factor = (self.max_grad_norm / (step.norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu":
            return factor
        return None if factor == 1.0 else float(factor)


def without_gradients(options: dict) -> dict:
    """The operator's options without those about gradients."""
    theirs = ("max_norm", "norm", "zero_gradients")
    return {key: value for key, value in options.items() if key not in theirs}


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
    _state_dtypes = (None, torch.float32)

    def _shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """The states of a parameter, and their shapes."""
        raise NotImplementedError

    def _update(self, values: Values) -> tuple[Tensor, dict[str, Tensor]]:
        """(update, the states after the step): the operator computes param - lr update - lr
        weight_decay param with the lr and weight_decay of `_hyper`. Does not change its inputs."""
        raise NotImplementedError

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ()  # of the operator

    def _check_param(self, param: Tensor, group: dict) -> None:
        super()._check_param(param, group)
        name = type(self).__name__
        if is_dtensor(param):
            raise RuntimeError(
                f"{name}: params must not be DTensors, got one: the update depends on all of a "
                "parameter"
            )

    def _updates(self, step, params, groups, gradients) -> list[Tensor]:
        factor = self._factor(step)
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
        step.written = written
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
