"""The optimizer family's ops and fakes."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from onepass._ops.dispatch_log import logged, say

_clip_grad_norm = torch.ops.onepass.clip_grad_norm.default
_gradient_norm = torch.ops.onepass.gradient_norm.default
_optimizer_table = torch.ops.onepass.optimizer_table.default
_optimizer_table_release = torch.ops.onepass.optimizer_table_release.default
_optimizer_step = torch.ops.onepass.optimizer_step.default

NORM_TYPES = (1.0, 2.0, float("inf"))
ADAM, SGD, LION = range(3)


def left_to_torch(error: RuntimeError) -> None:
    """Writes to the log, where that is on, why torch's own function takes these gradients."""
    say(f"clip_grad_norm_: torch's own function, since {str(error).strip().partition(chr(10))[0]}")


@logged
def clip_grad_norm(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """The norm of all gradients together, which are scaled in place where it is above max_norm."""
    return _clip_grad_norm(gradients, max_norm, norm_type, error_if_nonfinite)


@logged
def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """0-dim float64 tensor, the 2-norm of all gradients together."""
    return _gradient_norm(gradients, 2.0)


class Hyper(NamedTuple):
    """A row of settings, in the order of csrc/ops/optimizer.h."""

    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    decoupled: bool = False  # weight decay acts on the parameter, not on the gradient
    amsgrad: bool = False
    nesterov: bool = False
    maximize: bool = False


class StepTable:
    """Parameters and where their states lie, handed over once for many steps.

    Args:
        params: without gaps between their elements.
        states: the tensors that the states lie in.
        layout: (parameters, columns) int64, see csrc/ops/optimizer_table.h.
    """

    def __init__(self, params: list[Tensor], states: list[Tensor], layout: Tensor):
        self.number = _optimizer_table(params, states, layout)
        state = states[0].new_empty(0)  # says on which device
        release = weakref.finalize(self, _optimizer_table_release, state, self.number)
        release.atexit = False  # memory ends with the process


@logged
def optimizer_step(
    algorithm: int, table: StepTable, gradients: list[Tensor], hyper: Tensor, **options
) -> None:
    """One step of all parameters of a table; `hyper` is (groups, settings) float64."""
    _optimizer_step(algorithm, table.number, gradients, hyper, **options)


@torch.library.register_fake("onepass::clip_grad_norm")
def _(gradients, max_norm, norm_type, error_if_nonfinite):
    dtypes = {gradient.dtype for gradient in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if torch.float64 in dtypes:
        dtype = torch.float64
    return gradients[0].new_empty((), dtype=dtype)


@torch.library.register_fake("onepass::gradient_norm")
def _(gradients, norm_type=2.0):
    return gradients[0].new_empty((), dtype=torch.float64)


@torch.library.register_fake("onepass::optimizer_table")
def _(params, states, layout):
    return torch.library.get_ctx().new_dynamic_size()


@torch.library.register_fake("onepass::optimizer_table_release")
def _(state, table):
    return None


@torch.library.register_fake("onepass::optimizer_step")
def _(*args, **kwargs):
    return None
