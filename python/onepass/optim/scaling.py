"""Unscaling of gradients: by the step itself, or by a trainer that clips them before it."""

from __future__ import annotations

import sys

import torch


class StepUnscales:
    """``_step_supports_amp_scaling``: whether steps take scaled gradients and their scale.

    `torch.amp.GradScaler.step` reads this and gets True: it sets ``grad_scale``, and the step
    divides in its one pass. Trainers that clip gradients read it too (Lightning): they unscale
    first only if it is False, and refuse to clip if it is True. They get True for ``fused=True``
    alone, as with torch's optimizers. torch's constructors then set an attribute of the instance,
    which hides this one; a user may do so too.

    Accelerate replaces ``step`` by its own function while the scaler steps, and counts the step as
    skipped, so that schedulers wait, if that was not called. The scaler gets False then, and calls
    it only for finite gradients.

    A scaler does not find gradients that `fused_accumulate` takes. Then every optimizer answers
    True: so the step receives the scale, and can refuse it.
    """

    def __init__(self, divides: bool = True):
        self._divides = divides  # the step divides, given a scale

    def __get__(self, optimizer: torch.optim.Optimizer | None, owner: type | None = None):
        if optimizer is None:
            return self
        asking = sys._getframe(1).f_locals.get("self")
        is_scaler = isinstance(asking, torch.amp.GradScaler)
        if is_scaler and optimizer._accumulation is not None:
            return True
        if not self._divides:
            return False
        if is_scaler:
            step = vars(optimizer).get("step")
            return getattr(step, "__module__", None) != "accelerate.optimizer"
        return bool(optimizer.defaults.get("fused"))
