"""Checkpoints and copies of an optimizer, and taking the place of another one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from onepass.optim import codes, masters
from onepass.optim.adoption import Adoption, wrap
from onepass.optim.atomic import all_or_nothing
from onepass.optim.flat_state import EMA, EMA_STEPS, SCALE, Places, is_signed, local, placed_like
from onepass.optim.options import Options
from onepass.optim.states import StateOptimizer


def shown(optimizer: StateOptimizer, result: dict) -> dict:
    """The state_dict that torch made, in the form that checkpoints have."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for key, entry in result["state"].items():
        if isinstance(entry, dict) and isinstance(key, int):  # torch numbers parameters
            entry = _shown_entry(optimizer, params[key], entry)
            result["state"][key] = _with_host_step(groups[key], entry)
    return result


def _shown_entry(optimizer: StateOptimizer, param: Tensor, entry: dict) -> dict:
    """An entry with moments for their codes, and with a master for its remainder: so there is one
    layout for both forms and for every sharding. Collectives, which may gather a checkpoint, do not
    support 16-bit integers."""
    scales = [key for key in entry if isinstance(key, str) and key.endswith(SCALE)]
    if not scales and entry.get("remainder") is None:
        return entry
    shown = dict(entry)
    for key in scales:
        moment = key[: -len(SCALE)]
        decoded = codes.decode(local(entry[moment]), shown.pop(key), is_signed(moment))
        shown[moment] = placed_like(entry[moment], decoded)
    if entry.get("remainder") is not None:
        here = optimizer._kept.get(param, local(param).detach())
        shown["master"] = placed_like(param, masters.join(here, local(shown.pop("remainder"))))
    return shown


def _with_host_step(group: dict, entry: dict) -> dict:
    """Steps are on the device; torch expects them there only if it is fused or capturable."""
    step = entry.get("step")
    if not isinstance(step, Tensor) or step.device.type == "cpu":
        return entry
    if group.get("capturable") or group.get("fused"):
        return entry
    return {**entry, "step": step.cpu()}


def load(optimizer: StateOptimizer, of_torch: Callable[[dict], None], state_dict: dict) -> None:
    """Loads by torch's own load_state_dict; all of it or nothing."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks

    def work() -> None:
        # The wrapper hides tensors from torch's own cast to the parameter's dtype. This hook is the
        # last one, so that the user's hooks see tensors.
        hooks[wrap] = wrap
        of_torch(state_dict)

    def finish() -> None:
        hooks.pop(wrap, None)
        led = optimizer._led and optimizer._led()
        if led is not None:
            led.param_groups = optimizer.param_groups  # for its schedulers

    all_or_nothing(optimizer, work, finish)


def adopted(optimizer: StateOptimizer, state: dict) -> dict:
    """The attributes for torch's `__setstate__`, with states of this optimizer's own."""
    if "state" not in state or "param_groups" not in state:
        return state
    fresh = "_places" not in optimizer.__dict__  # unpickled or copied, not loaded
    groups = state["param_groups"]
    if fresh:
        for key in Options._fields:
            optimizer.__dict__[key] = state.get(key, Options._field_defaults[key])
        optimizer.__dict__["defaults"] = state["defaults"]
    else:
        optimizer._check_settings([{**optimizer.defaults, **group} for group in groups])
    return {**state, "state": _adopt(optimizer, groups, state["state"], is_copy=fresh)}


def take_over(optimizer: StateOptimizer, other: Optimizer) -> None:
    """Takes the place of `other`, on the same group dicts, with its states."""
    optimizer.state = _adopt(optimizer, other.param_groups, other.state)
    optimizer.param_groups = other.param_groups


def _adopt(
    optimizer: StateOptimizer, groups: list[dict], state: dict, is_copy: bool = False
) -> dict:
    """A foreign state as this optimizer's, for these groups, which get all settings."""
    for group in groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
    places = Places()
    state = Adoption(optimizer, places, groups, is_copy).adopt(state)
    if not any(isinstance(e, dict) and e.get(EMA) is not None for e in state.values()):
        for group in groups:  # the next averages are the first
            if optimizer.ema_decay is None:
                group.pop(EMA_STEPS, None)
            else:
                group[EMA_STEPS] = 0
    optimizer._reset()
    optimizer._places = places
    return state
