"""What the optimizer family computes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_grad_norm(
    gradients: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
) -> tuple[Tensor, list[Tensor]]:
    """(norm of all gradients as one vector, the gradients scaled to max_norm if it is above that).

    Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks, ICML 2013.
    """
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    norm = torch.linalg.vector_norm(flat, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, [gradient * factor for gradient in gradients]
