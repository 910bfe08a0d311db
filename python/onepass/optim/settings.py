"""Checks of loaded group settings, as in torch's constructors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

from torch import Tensor

_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")
_FLAGS = ("amsgrad", "nesterov", "maximize", "decoupled_weight_decay")


def number(value: object) -> float | None:
    """A number, or a tensor of one, as a float; None for anything else."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        return float(value)
    return float(value) if isinstance(value, numbers.Real) else None


def check_settings(name: str, groups: Sequence[dict]) -> None:
    """Raises for settings that a step cannot use.

    Raises:
        TypeError: a setting that is not a number, or not a pair of numbers.
        ValueError: one out of range.
    """
    for index, group in enumerate(groups):
        what = f"of parameter group {index}"
        for key in _NOT_NEGATIVE:
            if key in group:
                values = [group[key]]
                if key == "eps" and "beta2_decay" in group:  # Adafactor's two
                    values = _two(name, f"{key} {what}", group[key])
                for value in values:
                    _check(name, f"{key} {what}", value, "at least 0", 0.0, math.inf)
        if "dampening" in group:
            _check(name, f"dampening {what}", group["dampening"], "finite", -1e308, 1e308)
        if "betas" in group:
            betas = group["betas"]
            if not isinstance(betas, tuple | list) or len(betas) != 2:
                raise TypeError(f"{name}: betas {what} must be two numbers, got {betas!r}")
            for i, beta in enumerate(betas):
                below_1 = math.nextafter(1.0, 0.0)
                _check(name, f"betas[{i}] {what}", beta, "at least 0 and below 1", 0.0, below_1)
        for key in _FLAGS:
            if key in group and not isinstance(group[key], bool | int):
                raise TypeError(f"{name}: {key} {what} must be a bool, got {group[key]!r}")
        count = group.get("ema_steps", 0)
        if not isinstance(count, int) or count < 0:
            raise TypeError(f"{name}: ema_steps {what} must be a whole number, got {count!r}")
        seed = group.get("seed", 0)
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise TypeError(f"{name}: seed {what} must be an integer of 64 bits, got {seed!r}")


def _two(name: str, what: str, values: object) -> list:
    """The settings, of two, that are not None."""
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise TypeError(f"{name}: {what} must be two numbers, got {values!r}")
    return [value for value in values if value is not None]


def _check(name: str, what: str, value: object, rule: str, low: float, high: float) -> None:
    found = number(value)
    if found is None:
        raise TypeError(f"{name}: {what} must be a number, got {value!r}")
    if not low <= found <= high:
        raise ValueError(f"{name}: {what} must be {rule}, got {value!r}")
