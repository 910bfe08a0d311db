"""The optimizer family's ops and fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._ops.dispatch_log import logged, say

_clip_grad_norm = torch.ops.onepass.clip_grad_norm.default

NORM_TYPES = (1.0, 2.0, float("inf"))


def left_to_torch(error: RuntimeError) -> None:
    """Writes to the log, where that is on, why torch's own function takes these gradients."""
    say(f"clip_grad_norm_: torch's own function, since {str(error).strip().partition(chr(10))[0]}")


@logged
def clip_grad_norm(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """The norm of all gradients together, which are scaled in place where it is above max_norm."""
    return _clip_grad_norm(gradients, max_norm, norm_type, error_if_nonfinite)


@torch.library.register_fake("onepass::clip_grad_norm")
def _(gradients, max_norm, norm_type, error_if_nonfinite):
    dtypes = {gradient.dtype for gradient in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if torch.float64 in dtypes:
        dtype = torch.float64
    return gradients[0].new_empty((), dtype=dtype)
