"""Gradient clipping in one pass over all gradients."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from onepass import _C, _dispatch_log
from onepass._ops import optimizer as _optimizer
from onepass.optim.checks import refuse_freed

_NORM_TYPES = (1.0, 2.0, float("inf"))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place to a norm of at most max_norm, as `torch.nn.utils.clip_grad_norm_`.

    The norm is that of all gradients as one vector; above max_norm each of them is multiplied by
    ``max_norm / (norm + 1e-6)``. All tensors are read once in one parallel region, and written
    only if they have to be scaled. The norm is the same, bit for bit, for any number of threads.

    Gradients that are on other devices than the CPU or CUDA, are sparse, complex or of a subclass
    of Tensor (a DTensor), or have gaps between their elements, norms of another order than 1, 2 or
    infinity, and error_if_nonfinite on CUDA, are left to torch's own function.

    Args:
        parameters: those whose ``.grad`` is clipped; others are skipped. A tensor or an iterable.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm; may be ``float("inf")``.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is written.
        foreach: accepted and not needed: it chooses between torch's implementations.

    Returns:
        0-dim tensor, the norm before clipping, in the gradients' dtype (float32 if they differ,
        float64 if one of them is); 0 if there are no gradients.

    Raises:
        RuntimeError: the norm is not finite and error_if_nonfinite is set.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> norm = onepass.optim.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> bool(norm > 1.0), bool(model.weight.grad.norm() <= 1.0)
        (True, True)
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, list):
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.",
                stacklevel=3,
            )
    gradients, missing = _C.attributes(parameters, "grad")
    if missing:
        gradients = [gradient for gradient in gradients if gradient is not None]
    max_norm, norm_type = float(max_norm), float(norm_type)
    # Whether to raise is known only when the norm is: torch waits for it.
    waits = error_if_nonfinite and any(g.device.type != "cpu" for g in gradients)
    if gradients and norm_type in _NORM_TYPES and not waits:
        try:
            return _optimizer.clip_grad_norm(gradients, max_norm, norm_type, error_if_nonfinite)
        except RuntimeError as error:  # before anything was written
            if re.search("can't allocate memory|out of memory", str(error)):
                raise
            plain = [g for g in gradients if _has_memory(g)]
            refuse_freed("clip_grad_norm_", "gradients", plain)
            reason = str(error).strip().partition("\n")[0]
            _dispatch_log.say(f"clip_grad_norm_: torch's own function, since {reason}")
    return torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite, foreach
    )


def _has_memory(gradient: Tensor) -> bool:
    is_plain = type(gradient) in (Tensor, torch.nn.Parameter) and gradient.layout is torch.strided
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(gradient)
