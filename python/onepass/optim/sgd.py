"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.optimizer import SGD as ALGORITHM
from onepass._ops.optimizer import Hyper
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC


class SGD(FlatOptimizer, torch.optim.SGD):
    __doc__ = f"""`torch.optim.SGD` in one pass over memory, with masters and small states.

    The arguments up to `fused` are torch's. Parameters, gradients and the momentum buffer may
    differ in dtype (float32, bfloat16, float16; float64 throughout); the arithmetic is float32.
    ``state_dict`` has torch's keys, and either loads the other's. Results are the same, bit for
    bit, for any number of threads.

    Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep
    learning, ICML 2013, in torch's form.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch's.
        foreach, fused: accepted; they choose between torch's implementations.
        differentiable: must be False.{OPTIONS_DOC}"""

    _algorithm = ALGORITHM

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = None,
        state_dtype: torch.dtype | str | None = None,
        max_grad_norm: float | None = None,
        zero_grads: bool = False,
    ) -> None:
        self._accept(
            master,
            state_dtype,
            max_grad_norm,
            zero_grads,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
        )
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._draw_seed()

    def _needs_noise(self) -> bool:
        return self.master == "stochastic"

    def _shows_step(self, param: Tensor) -> bool:
        # torch's SGD counts no steps; the noise needs their number in the checkpoint.
        return self._needs_noise() and param.dtype.itemsize == 2

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _hyper(self, group: dict) -> Hyper:
        return Hyper(
            number_of(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
