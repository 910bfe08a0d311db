"""Whether a call has to go through autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_differentiated(*tensors: Tensor | None) -> bool:
    """True if some input requires a gradient, or inside forward-mode differentiation.

    The raw ops know no tangents and would drop them without a word; the autograd.Functions have no
    forward mode and say so.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return forward_ad._current_level >= 0
