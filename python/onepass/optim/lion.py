"""Lion."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.optim.checks import check_like_torch
from onepass.optim.contract import ALGORITHMS, Hyper
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC, constructor


class _Lion(torch.optim.Optimizer):
    """Lion's settings, with checks as in torch's constructors."""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        settings = {key: value for key, value in locals().items() if key not in ("self", "params")}
        check_like_torch("Lion", lr, betas, weight_decay=weight_decay)
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        torch.optim.Optimizer.__init__(self, params, settings)


class Lion(FlatOptimizer, _Lion):
    __doc__ = f"""Lion in one pass over memory: one moment, and steps of the same size everywhere.

        update = sign(beta1 exp_avg + (1 - beta1) grad)
        param = param (1 - lr weight_decay) - lr update
        exp_avg = beta2 exp_avg + (1 - beta2) grad

    Parameters, gradients and the moment may differ in dtype (float32, bfloat16, float16; float64
    throughout); the arithmetic is float32. Results are the same, bit for bit, for any number of
    threads.

    Chen et al.: Symbolic discovery of optimization algorithms, NeurIPS 2023. They advise a learning
    rate 3-10 times smaller, and a weight decay as many times larger, than AdamW's.

    Args:
        params: as torch's optimizers take them.
        lr: learning rate; a number or a tensor of one element.
        betas: (beta1 of the update, beta2 of the moment).
        weight_decay: decoupled, as in AdamW.
        maximize, foreach, fused, differentiable: as in AdamW.{OPTIONS_DOC}
    Raises:
        ValueError: a setting out of range.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = onepass.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
    """

    _algorithm = ALGORITHMS["Lion"]

    __init__ = constructor(_Lion)

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ("exp_avg",)

    def _hyper(self, group: dict) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(
            number_of(group["lr"]),
            beta1,
            beta2,
            weight_decay=group["weight_decay"],
            decoupled=True,
            maximize=group["maximize"],
        )
