"""How close the kernels of a step come to their bounds, by single calls.

The first calls of each operator are computed again by its formula in torch's operators, in float64
and in the dtype of the call. By the numerics rule the result may be off by twice the formula's
error plus one ulp; as one call of few numbers says little, that error is the largest of all calls.
Backwards have no formula: the gradients of the step are compared instead.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import _dispatch_log, numerics
from onepass._ops.decomposition import FORMULAS
from onepass.swapping.trials import in_double
from onepass.swapping.verification import distance, largest_of

_MOST_CALLS = 4  # of each operator
_COPIES = 16  # of the scores of attention that its formula may make, in float64


class Kernels(TorchDispatchMode):
    """Compares the operators that run while it is active."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        # By operator: the error of each call, that of the formula, and one ulp, all relative.
        self._errors: dict[str, list[tuple[float, float, float]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in FORMULAS:
            return func(*args, **kwargs)
        with _dispatch_log.record() as records:
            result = func(*args, **kwargs)
        ours = [record["op"] for record in records if record["level"] != _dispatch_log.TORCH]
        if ours and len(self._errors.setdefault(ours[0], [])) < _MOST_CALLS:
            found = _errors(func, args, kwargs, result)
            self._errors[ours[0]] += [] if found is None else [found]
        return result

    def shares(self) -> dict[str, float]:
        """Largest error of each operator, divided by what it may be."""
        shares = {}
        for name, calls in self._errors.items():
            largest = max((of_formula for _, of_formula, _ in calls), default=0.0)
            for error, _, ulp in calls:
                share = error / (numerics.FACTOR * largest + ulp)
                shares[name] = max(shares.get(name, 0.0), share)
        return shares


def _errors(func, args, kwargs, result) -> tuple[float, float, float] | None:
    """Errors of a call's first result; None if its formula cannot be computed."""
    first = result if isinstance(result, Tensor) else result[0]
    if not first.numel() or not _has_room(func, args, kwargs):
        return None
    formula, device = FORMULAS[func], first.device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            exact, plain = (
                formula(*given, **named)
                for given, named in (pytree.tree_map(in_double, (args, kwargs)), (args, kwargs))
            )
            exact, plain = (x if isinstance(x, Tensor) else x[0] for x in (exact, plain))
    except (RuntimeError, TypeError):  # no formula for these arguments: it has no result either
        return None
    size = largest_of(exact) or 1.0
    ulp = numerics.ulp(first.dtype, size) / size
    if first.dtype is torch.float64:
        ulp = numerics.FLOAT64_RELATIVE
    return distance(first, exact) / size, distance(plain, exact) / size, ulp


def _has_room(func, args, kwargs) -> bool:
    """Whether the formula fits: attention's makes matrices of scores."""
    if "attention" not in func._schema.name:
        return True
    query, key = args[:2]
    rows = query.numel() // max(query.shape[-1], 1)
    needed = 8 * _COPIES * rows * (kwargs.get("max_k") or key.shape[-2])
    return needed < free_memory(query.device)


def free_memory(device: torch.device) -> int:
    """Free memory of a GPU or of the host, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
