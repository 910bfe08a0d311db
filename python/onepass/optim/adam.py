"""Adam and AdamW."""

from __future__ import annotations

import torch

from onepass.optim.contract import ALGORITHMS, Hyper
from onepass.optim.optimizer import FlatOptimizer, number_of
from onepass.optim.options import OPTIONS_DOC, constructor


class _Adam(FlatOptimizer):
    _algorithm = ALGORITHMS["Adam"]
    _counts_steps = True
    _has_second_moment = True

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
    ``state_dict`` has torch's keys, and each loads the other's. Results are the same, bit for bit,
    for any number of threads.

    Kingma, Ba: Adam: a method for stochastic optimization, ICLR 2015.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as torch's.
        foreach, fused: accepted; they choose between torch's implementations. As with torch's
            optimizers, a trainer that finds ``fused=True`` leaves unscaling to the step, and cannot
            clip.
        capturable: for parameters on CUDA: a step can be captured in a graph.
        differentiable: must be False.{OPTIONS_DOC}
    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = onepass.optim.Adam(model.parameters(), lr=1e-3, zero_grads=True)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> bool(model.weight.grad.any())
        False
    """

    __init__ = constructor(torch.optim.Adam)


class AdamW(_Adam, torch.optim.AdamW):
    __doc__ = f"""`torch.optim.AdamW` in one pass over memory, with masters and small states.

    The arguments up to `fused` are torch's. Parameters, gradients and states may differ in dtype
    (float32, bfloat16, float16; float64 throughout); the arithmetic is float32. ``state_dict`` has
    torch's keys, and each loads the other's. Results are the same, bit for bit, for any number of
    threads.

    Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as torch's.
        foreach, fused: accepted; they choose between torch's implementations. As with torch's
            optimizers, a trainer that finds ``fused=True`` leaves unscaling to the step, and cannot
            clip.
        capturable: for parameters on CUDA: a step can be captured in a graph.
        differentiable: must be False.{OPTIONS_DOC}
    Examples:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = onepass.optim.AdamW(model.parameters(), master="fp32", max_grad_norm=1.0)
        >>> model(torch.randn(8, 64).bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["master"].dtype
        torch.float32
    """

    __init__ = constructor(torch.optim.AdamW)
