"""Adafactor."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.optim.contract import Hyper
from onepass.optim.options import OPTIONS_DOC, constructor
from onepass.optim.updates import FormulaOptimizer, Values


class Adafactor(FormulaOptimizer, torch.optim.Adafactor):
    __doc__ = f"""`torch.optim.Adafactor` with masters, averages and clipping inside the step.

    The second moment of a matrix is kept as the means of its rows and of its columns. The arguments
    up to `maximize` are torch's. ``state_dict`` has torch's keys, and each loads the other's.
    States and arithmetic are float32, also for 16-bit parameters. torch's operations compute the
    update, so a step is not one pass; the operator applies it. DTensor
    parameters are refused.

    Shazeer, Stern: Adafactor: adaptive learning rates with sublinear memory cost, ICML 2018, in
    torch's form.

    Args:
        params, lr, beta2_decay, d, weight_decay, maximize: as torch's.
        eps: as torch's: lower bounds of the root mean square of the gradients and of that of the
            parameter. None for the first: the eps of the parameter's dtype, 2^-7 for bfloat16, so
            that smaller gradients make smaller steps; with a master ("stochastic" too) that of
            float32, 2^-23, as in a float32 run.
        foreach: accepted; it chooses between torch's implementations.{OPTIONS_DOC}
    Raises:
        ValueError: a setting out of range, a `state_dtype` other than float32.
        RuntimeError: parameters that are not floating point, or DTensors.

    Examples:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = onepass.optim.Adafactor(model.parameters(), lr=1e-2)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> {{key: tuple(v.shape) for key, v in optimizer.state[model.weight].items()}}
        {{'step': (), 'row_var': (32, 1), 'col_var': (1, 64)}}
    """

    _lr_is_in_updates = True

    __init__ = constructor(torch.optim.Adafactor)

    def _shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(param.shape)
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def _hyper(self, group: dict) -> Hyper:
        return Hyper(1.0, weight_decay=float(group["lr"]) * group["weight_decay"])

    def _update(self, values: Values) -> tuple[Tensor, dict[str, Tensor]]:
        param, g, states, step, group, dtype = values
        (eps1, eps2), weight = group["eps"], step ** group["beta2_decay"]
        eps1 = torch.finfo(dtype).eps if eps1 is None else eps1
        size = min(float(group["lr"]), step**-0.5) * max(eps2, _root_mean_square(param))
        if g.dim() > 1:
            row = states["row_var"].lerp(g.square().mean(-1, keepdim=True), weight)
            col = states["col_var"].lerp(g.square().mean(-2, keepdim=True), weight)
            square = row @ col / row.mean(-2, keepdim=True).clamp(min=eps1)
            after = {"row_var": row, "col_var": col}
        else:
            square = states["variance"].lerp(g.square(), weight)
            after = {"variance": square}
        update = g * square.clamp(min=eps1 * eps1).rsqrt()
        return update * (size / max(1.0, _root_mean_square(update) / group["d"])), after


def _root_mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / max(1, tensor.numel()) ** 0.5
