"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.optim.contract import ALGORITHMS, Hyper
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC, constructor


class SGD(FlatOptimizer, torch.optim.SGD):
    __doc__ = f"""`torch.optim.SGD` in one pass over memory, with masters and small states.

    The arguments up to `fused` are torch's. Parameters, gradients and the momentum buffer may
    differ in dtype (float32, bfloat16, float16; float64 throughout); the arithmetic is float32.
    ``state_dict`` has torch's keys, and each loads the other's. Results are the same, bit for
    bit, for any number of threads.

    Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep
    learning, ICML 2013, in torch's form.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch's.
        foreach, fused: accepted; they choose between torch's implementations. As with torch's
            optimizers, a trainer that finds ``fused=True`` leaves unscaling to the step, and cannot
            clip.
        differentiable: must be False.{OPTIONS_DOC}
    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = onepass.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
    """

    _algorithm = ALGORITHMS["SGD"]
    _is_linear = True

    __init__ = constructor(torch.optim.SGD)

    def _moment_keys(self, group: dict) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _required(self, param: Tensor, group: dict) -> tuple[str, ...]:
        return ()  # as in torch, a momentum may begin later

    def _hyper(self, group: dict) -> Hyper:
        return Hyper(
            number_of(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
