"""Who divides scaled gradients by their scale: the step itself, or who clips them before it."""

from __future__ import annotations

import sys

import torch


class StepUnscales:
    """``_step_supports_amp_scaling``: whether steps take scaled gradients and their scale.

    `torch.amp.GradScaler.step` asks this and is told yes: it sets ``grad_scale``, and the step
    divides in its one pass. Trainers that clip gradients ask it too (Lightning), and unscale before
    only if told no; with yes they refuse to clip. They are told yes for ``fused=True`` alone, as of
    torch's optimizers. torch's constructors then set an attribute of the instance, which hides this
    one; so may a user.

    Accelerate puts a function of its own in the place of ``step`` while the scaler steps, and takes
    a step for skipped, so that schedulers wait, if that was not called. The scaler is told no then,
    and calls it for finite gradients alone.

    Gradients that `fused_accumulate` takes are where no scaler finds them. The scaler is told yes
    then by every optimizer: what it hands over is what the step can refuse.
    """

    def __init__(self, divides: bool = True):
        self._divides = divides  # the step, given a scale

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
