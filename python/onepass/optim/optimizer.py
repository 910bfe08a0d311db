"""The base of all optimizers here: states in flat buffers, one operator call per step, masters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from onepass._imported import is_fake
from onepass._ops import optimizer as _ops
from onepass.optim import checkpoints, ema, masters
from onepass.optim.atomic import all_or_nothing, settled
from onepass.optim.contract import Hyper, Settings
from onepass.optim.distributed import agreed, local_norm, total_norm
from onepass.optim.options import Options, told
from onepass.optim.scaling import StepUnscales
from onepass.optim.states import StateOptimizer
from onepass.optim.step import Step

LR = Hyper._fields.index("lr")


class FlatOptimizer(StateOptimizer):
    """Base of the optimizers: `onepass.optim.AdamW` documents their common options."""

    _step_supports_amp_scaling = StepUnscales()

    def __repr__(self) -> str:
        """torch's, with the options that are set beside those of its groups."""
        lines = [f"    {line}\n" for line in told(self)]
        options = f"Options\n{''.join(lines)}" if lines else ""
        return f"{super().__repr__().removesuffix(')')}{options})"

    # ---- a step ----------------------------------------------------------------------------------

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
        name = type(self).__name__
        if self._is_swapped:
            raise RuntimeError(f"{name}: step must not be called inside swap_ema, got a call")
        if self._accumulation is not None:
            # A scaler divides `.grad` and looks for infinities there, not in the sums.
            for key in ("grad_scale", "found_inf"):
                if getattr(self, key, None) is not None:
                    raise RuntimeError(
                        f"{name}: step must not be that of a GradScaler with fused_accumulate, got "
                        f"{key}: a scaler does not find the sums"
                    )
        step = Step(self)
        settled(step.make, step.settle)

    def _measure_norm(self, step: Step) -> bool:
        """Sets grad_norm if it is needed. False: the step must not be made."""
        step.grad_scale = getattr(self, "grad_scale", None)
        step.found_inf = getattr(self, "found_inf", None)
        if step.are_sharded and step.found_inf is not None:
            step.found_inf = agreed(step.found_inf, step.params)
        if self.max_grad_norm is not None:
            measure = total_norm if step.are_sharded else local_norm
            step.norm = measure(type(self).__name__, step.gradients)
            norm = step.norm if step.grad_scale is None else step.norm / step.grad_scale
            self.grad_norm = norm.float()
        if step.gradients[0].device.type != "cpu":
            return True  # the kernel decides: the host does not wait for it
        if step.found_inf is not None and float(step.found_inf) != 0.0:
            return False
        # Parameters without values (fake, "meta") are refused when the table is made.
        return step.norm is None or is_fake(norm) or bool(norm.isfinite())

    def _call(self, step: Step) -> bool:
        """Runs the operator. False: the table is stale, and no step was made."""
        table = step.table(step.numbers, step.local_params)
        if table is None:
            return False
        operands = self._operands(step)
        hyper, options = self._arguments(step)
        return _ops.optimizer_step(step.ran, self._algorithm, table, operands, hyper, **options)

    def _operands(self, step: Step) -> list[Tensor]:
        """The gradients for the operator."""
        return step.local_gradients

    def _arguments(self, step: Step) -> tuple[Tensor, dict]:
        """The operator's settings of all groups, and its options."""
        settings = self._current_settings(step.local_gradients[0].device)
        # Only values that differ from the defaults: every keyword costs dispatch time.
        options = {}
        if self._needs_noise():
            options["seed"] = self.param_groups[0].get("seed", 0)
            options["stochastic_params"] = self.master == "stochastic"
            options["stochastic_moments"] = self._rounds_moments()
        if self.zero_grads:
            options["zero_gradients"] = True
        if step.norm is not None:
            options.update(max_norm=self.max_grad_norm, norm=step.norm)
        if step.grad_scale is not None:
            options["grad_scale"] = step.grad_scale
        if step.found_inf is not None:
            options["found_inf"] = step.found_inf
        if settings.device is not None:
            options["device_hyper"] = settings.device
        return settings.host, options

    def _current_settings(self, device: torch.device) -> Settings:
        """The settings of this step."""
        settings, groups = self._settings, self.param_groups
        rows = tuple([self._hyper(group) for group in groups])
        if self.ema_decay is not None:
            pairs = zip(rows, groups, strict=True)
            rows = tuple([row._replace(ema_decay=ema.decay(self, group)) for row, group in pairs])
        settings.write(rows, device)
        if settings.device is not None and not self._lr_is_in_updates:
            for number, group in enumerate(groups):
                if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
                    # Without a copy to the host.
                    settings.device[number, LR].copy_(group["lr"].squeeze())
        return settings

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, and sums of `fused_accumulate` too."""
        super().zero_grad(set_to_none)
        if self._accumulation is not None:
            self._accumulation.clear()

    @torch.no_grad()
    def reseed_masters(self) -> None:
        """Reseeds every master from its parameter.

        Needed only after writes through ``p.data``, which torch does not count; other changes are
        noticed.
        """
        for param, entry in self.state.items():
            if isinstance(entry, dict) and ("master" in entry or "remainder" in entry):
                masters.reseed(param, entry)

    # ---- checkpoints and copies ------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict:
        """Returns torch's state, with its keys and ``master`` for 16-bit parameters that have one.

        The keys do not depend on sharding, and so not on the number of processes of
        torch.distributed.checkpoint. States kept in another form are shown in float32: moments in
        8 bits, and remainders as their exact masters. That takes 4 bytes per
        element for as long as the dict is kept.
        """
        return checkpoints.shown(self, super().state_dict())

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict) -> None:
        """Loads as torch does, from torch's optimizer or this one, with other rules for dtypes.

        States keep float32 where they have it, also those of 16-bit parameters, unless state_dtype
        names another; masters stay exact, are converted to the form this optimizer keeps, or made
        from the parameters where there are none; remainders, which checkpoints had before, are
        loaded too. States are placed like their parameters: DTensors are redistributed, and of a
        whole tensor every rank takes its part. Group settings that the checkpoint lacks are
        taken from the constructor.

        Raises:
            ValueError: other parameter groups, a state of another shape, numbers out of range.
            TypeError: settings that are no numbers, states that are no tensors.
            KeyError: states without the number of steps, where that matters, or without a moment
                after the first step.
            Nothing has changed then, and nothing if a hook raises.
        """
        checkpoints.load(self, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict:
        if self._accumulation is not None:
            self._accumulation.refuse_copies()
        if self._is_swapped:
            raise RuntimeError(
                f"{type(self).__name__}: copy and pickle must not be called inside swap_ema, got a "
                "call: the parameters are averages there"
            )
        options = {key: self.__dict__[key] for key in Options._fields}
        return {**super().__getstate__(), **options}

    @torch.no_grad()
    def __setstate__(self, state: dict) -> None:
        put = super().__setstate__
        all_or_nothing(self, lambda: put(checkpoints.adopted(self, state)))

    # ---- averages --------------------------------------------------------------------------------

    def swap_ema(self) -> AbstractContextManager[None]:
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
        return ema.swapped(self)

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
        ema.copy_to(self, averaged, model)

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
        ema.copy_from(self, averaged, model)


def number_of(setting: float | Tensor) -> float:
    """A setting for the host; 0 for a tensor on a device, which the kernel reads there."""
    if isinstance(setting, Tensor) and setting.device.type != "cpu":
        return 0.0
    return float(setting)
