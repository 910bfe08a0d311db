"""Seeds for the ops that draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """int64[2] (seed, offset) from torch's generator of `device`.

    An aten op draws it, so `manual_seed`, activation checkpointing's restored random state, CUDA
    graphs and `torch.compile` all work as for torch's own dropout.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
