"""LAMB."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.optim.checks import check_like_torch
from onepass.optim.contract import Hyper
from onepass.optim.optimizer import number_of
from onepass.optim.options import OPTIONS_DOC, constructor
from onepass.optim.updates import FormulaOptimizer, Values


class _LAMB(torch.optim.Optimizer):
    """LAMB's settings, with checks as in torch's constructors."""

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        settings = {key: value for key, value in locals().items() if key not in ("self", "params")}
        check_like_torch("LAMB", lr, betas, epsilon=eps, weight_decay=weight_decay)
        torch.optim.Optimizer.__init__(self, params, settings)


class LAMB(FormulaOptimizer, _LAMB):
    __doc__ = f"""LAMB: AdamW with the step of each tensor scaled by its norm, for large batches.

        update = (exp_avg / c1) / (sqrt(exp_avg_sq / c2) + eps) + weight_decay param
        param = param - lr |param| / |update| update

    where exp_avg, exp_avg_sq and the bias corrections c1, c2 are those of Adam. The ratio of norms
    is one if either norm is zero. States and arithmetic are float32, also for 16-bit parameters.
    torch's operations compute the update, so a step is not one pass; the operator applies it.
    DTensor parameters are refused.

    You et al.: Large batch optimization for deep learning: training BERT in 76 minutes, ICLR 2020;
    the norms are not limited (their phi is the identity).

    Args:
        params: as torch's optimizers take them.
        lr: learning rate; a number or a tensor of one element.
        betas, eps: as in Adam.
        weight_decay: part of the update, and so of the ratio of norms.
        maximize: as in AdamW.{OPTIONS_DOC}
    Raises:
        ValueError: a setting out of range, a `state_dtype` other than float32.
        RuntimeError: parameters that are not floating point, or DTensors.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = onepass.optim.LAMB(model.parameters(), lr=1e-2, weight_decay=0.0)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> before = model.weight.detach().clone()
        >>> optimizer.step()
        >>> moved = (model.weight.detach() - before).norm() / before.norm()
        >>> round(float(moved), 4)
        0.01
    """

    __init__ = constructor(_LAMB)

    def _shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": tuple(param.shape), "exp_avg_sq": tuple(param.shape)}

    def _hyper(self, group: dict) -> Hyper:
        return Hyper(number_of(group["lr"]))

    def _update(self, values: Values) -> tuple[Tensor, dict[str, Tensor]]:
        param, g, states, step, group, _ = values
        beta1, beta2 = group["betas"]
        average = states["exp_avg"].lerp(g, 1 - beta1)
        square = states["exp_avg_sq"].lerp(g.square(), 1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (average / (1 - beta1**step)).div_(root).add_(param, alpha=group["weight_decay"])
        norm, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        ratio = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
        return update.mul_(ratio), {"exp_avg": average, "exp_avg_sq": square}
