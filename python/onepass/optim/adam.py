"""Adam and AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.optimizer import ADAM, Hyper
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC


class _Adam(FlatOptimizer):
    _algorithm = ADAM

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        if group["amsgrad"]:
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return ("exp_avg", "exp_avg_sq")

    def _hyper(self, group: dict) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(
            number_of(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
        )


class Adam(_Adam, torch.optim.Adam):
    __doc__ = f"""`torch.optim.Adam` in one pass over memory, with masters and small states.

    The arguments up to `decoupled_weight_decay` are torch's. Parameters, gradients and states may
    differ in dtype (float32, bfloat16, float16; float64 throughout); the arithmetic is float32.
    ``state_dict`` has torch's keys, and either loads the other's. Results are the same, bit for
    bit, for any number of threads.

    Kingma, Ba: Adam: a method for stochastic optimization, ICLR 2015.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch's.
        foreach, fused: accepted; they choose between torch's implementations.
        capturable: for parameters on CUDA: a step can be captured in a graph.
        differentiable: must be False.{OPTIONS_DOC}"""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._draw_seed()


class AdamW(_Adam, torch.optim.AdamW):
    __doc__ = f"""`torch.optim.AdamW` in one pass over memory, with masters and small states.

    The arguments up to `fused` are torch's. Parameters, gradients and states may differ in dtype
    (float32, bfloat16, float16; float64 throughout); the arithmetic is float32. ``state_dict`` has
    torch's keys, and either loads the other's. Results are the same, bit for bit, for any number of
    threads.

    Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as torch's.
        foreach, fused: accepted; they choose between torch's implementations.
        capturable: for parameters on CUDA: a step can be captured in a graph.
        differentiable: must be False.{OPTIONS_DOC}"""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
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
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )
        self._draw_seed()
