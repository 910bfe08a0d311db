"""Checkpoints and copies of an optimizer, and taking the place of another one."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from onepass.optim import codes, masters
from onepass.optim.adoption import Adoption, like, wrap
from onepass.optim.atomic import as_before, settled
from onepass.optim.flat_state import EMA, EMA_STEPS, SCALE, Places, is_signed, local
from onepass.optim.options import Options
from onepass.optim.settings import check_settings
from onepass.optim.states import StateOptimizer


class CheckpointOptimizer(StateOptimizer):
    """state_dict and load_state_dict, pickle and deepcopy."""

    _led: weakref.ref | None = None  # the optimizer that this one was fused from

    @torch._disable_dynamo
    def state_dict(self) -> dict:
        """Returns torch's state, with its keys and ``master`` for 16-bit parameters that have one.

        The keys do not depend on sharding, and so not on the number of processes of
        torch.distributed.checkpoint. States kept in another form are shown in float32: moments in
        8 bits, and remainders as their exact masters. That takes 4 bytes per
        element for as long as the dict is kept.
        """
        result = super().state_dict()
        groups = [group for group in self.param_groups for _ in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, entry in result["state"].items():
            if isinstance(entry, dict) and isinstance(key, int):  # torch numbers parameters
                entry = self._decoded(entry)
                entry = self._with_master(params[key], entry)
                result["state"][key] = _with_host_step(groups[key], entry)
        return result

    def _decoded(self, entry: dict) -> dict:
        scales = [key for key in entry if isinstance(key, str) and key.endswith(SCALE)]
        if not scales:
            return entry
        shown = dict(entry)
        for key in scales:
            moment = key[: -len(SCALE)]
            decoded = codes.decode(local(entry[moment]), entry[key], is_signed(moment))
            shown[moment] = like(entry[moment], decoded)
            del shown[key]
        return shown

    def _with_master(self, param: Tensor, entry: dict) -> dict:
        """Shows remainders as masters, so that there is one layout for both forms and for every
        sharding: collectives, which may gather a checkpoint, do not support 16-bit integers."""
        remainder = entry.get("remainder")
        if remainder is None:
            return entry
        shown = dict(entry)
        here = self._kept.get(param, local(param).detach())
        shown["master"] = like(param, masters.join(here, local(remainder)))
        del shown["remainder"]
        return shown

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
        load, hooks = super().load_state_dict, self._optimizer_load_state_dict_pre_hooks
        before, done = dict(self.__dict__), []

        def work() -> None:
            # The wrapper hides tensors from torch's own cast to the parameter's dtype. This hook is
            # the last one, so that the user's hooks see tensors.
            hooks[wrap] = wrap
            load(state_dict)
            done.append(True)

        def settle() -> None:
            hooks.pop(wrap, None)
            if not done:
                as_before(self, before)
            self._lead()

        settled(work, settle)

    def _lead(self) -> None:
        """Gives the fused torch optimizer the same groups, for its schedulers."""
        led = self._led and self._led()
        if led is not None:
            led.param_groups = self.param_groups

    def __getstate__(self) -> dict:
        if self._is_swapped:
            raise RuntimeError(
                f"{type(self).__name__}: copy and pickle must not be called inside swap_ema, got a "
                "call: the parameters are averages there"
            )
        options = {key: self.__dict__[key] for key in Options._fields}
        return {**super().__getstate__(), **options}

    @torch.no_grad()
    def __setstate__(self, state: dict) -> None:
        before, done = dict(self.__dict__), []

        def work() -> None:
            self._set(state)
            done.append(True)

        def settle() -> None:
            if not done:
                as_before(self, before)

        settled(work, settle)

    def _set(self, state: dict) -> None:
        if "state" not in state or "param_groups" not in state:
            super().__setstate__(state)
            return
        fresh = "_places" not in self.__dict__  # unpickled or copied, not loaded
        if fresh:
            for key in Options._fields:
                self.__dict__[key] = state.get(key, Options._field_defaults[key])
            self.__dict__["defaults"] = state["defaults"]
        groups = state["param_groups"]
        if not fresh:
            self._check_settings([{**self.defaults, **group} for group in groups])
        for group in groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        places = Places()
        converted = Adoption(self, places, groups, is_copy=fresh).adopt(state["state"])
        self._begin_averages(groups, converted)
        self._reset()
        self._places = places
        super().__setstate__({**state, "state": converted})

    def _check_settings(self, groups: list[dict]) -> None:
        """Raises for loaded settings that a step cannot use."""
        check_settings(type(self).__name__, groups)

    def _take_over(self, other: torch.optim.Optimizer) -> None:
        """Takes the place of `other`, on the same group dicts, with its states."""
        places = Places()
        state = Adoption(self, places, other.param_groups).adopt(
            other.state
        )  # or other is as it was
        self.param_groups = other.param_groups
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._begin_averages(self.param_groups, state)
        self._reset()
        self._places = places
        self.state = state

    def _begin_averages(self, groups: list[dict], state: dict) -> None:
        """Resets counts of steps if there are no averages: the next averages are then the first."""
        if any(isinstance(e, dict) and e.get(EMA) is not None for e in state.values()):
            return
        for group in groups:
            if self.ema_decay is None:
                group.pop(EMA_STEPS, None)
            else:
                group[EMA_STEPS] = 0


def _with_host_step(group: dict, entry: dict) -> dict:
    """Steps are on the device; torch expects them there only if it is fused or capturable."""
    step = entry.get("step")
    if not isinstance(step, Tensor) or step.device.type == "cpu":
        return entry
    if group.get("capturable") or group.get("fused"):
        return entry
    return {**entry, "step": step.cpu()}
