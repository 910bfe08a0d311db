"""The options that torch's optimizers do not have: what they mean, and their rules."""

from __future__ import annotations

import torch

MASTERS = (None, "fp32", "remainder16", "stochastic")
STATE_DTYPES = (None, torch.float32, torch.bfloat16, "int8")

OPTIONS_DOC = """
        master: what 16-bit parameters keep of the float32 result. None: nothing, they are rounded
            to nearest even. "fp32": a float32 copy (``state[p]["master"]``), of which the parameter
            is the nearest 16-bit number, ties away from zero. "remainder16", for bfloat16: the 16
            bits that this rounding leaves (``state[p]["remainder"]``), bitwise the same run in half
            the memory. "stochastic": nothing, but the parameter is rounded up or down at random, so
            that it is right on average. Without effect on float32 parameters. A parameter that is
            changed from outside becomes its new master; writes through ``p.data`` alone are not
            seen, see ``reseed_masters``.
        state_dtype: of the moments. None: the parameter's, rounded to nearest, as in torch.
            torch.float32. torch.bfloat16: with the second moment rounded stochastically, since its
            changes of 1 - beta2, some 0.1 %, are below half a unit in the last place (0.2-0.4 %)
            and would be rounded away for ever. "int8": codes of 8 bits with a scale per 256
            elements, the second moment rounded stochastically likewise, but never to zero; tensors
            of less than 4,096 elements or not a multiple of 256 stay float32; ``state_dict``
            shows float32.
        max_grad_norm: gradients are scaled to a global norm of at most this inside the step and
            stay unwritten; :attr:`grad_norm` is the norm before. A step whose norm is not finite
            changes no parameter and no state. ``float("inf")`` only checks.
        zero_grads: sets gradients to zeros in the same pass, also where the step is not made.
"""


def check_options(
    name: str,
    master: str | None,
    state_dtype: torch.dtype | str | None,
    max_grad_norm: float | None,
    differentiable: bool,
) -> None:
    """Raises what torch's constructors would for settings that are not there."""
    if master not in MASTERS:
        raise ValueError(f"{name}: master must be one of {MASTERS}, got {master!r}")
    if state_dtype not in STATE_DTYPES:
        raise ValueError(
            f"{name}: state_dtype must be None, torch.float32, torch.bfloat16 or 'int8', "
            f"got {state_dtype!r}"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"{name}: max_grad_norm must be positive, got {max_grad_norm}")
    if differentiable:
        raise RuntimeError(
            f"{name}: differentiable must be False, got True: like torch's, this kernel's "
            "`fused` does not support `differentiable`"
        )
