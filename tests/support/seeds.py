"""The seeds that the operators draw."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn_seed(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """The seed tensor that an op draws on a device after manual_seed(seed)."""
    torch.manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
