"""Seeds for the ops that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as _are_modes_active


def draw_seed(device: torch.device, check: Callable | None = None, *arguments, **options) -> Tensor:
    """int64[2] (seed, offset) from torch's generator of `device`.

    An aten op draws it, so `manual_seed`, activation checkpointing's restored random state, CUDA
    graphs and `torch.compile` all work as for torch's own dropout. `check` is the operator's, of
    the call without its seed: one that is refused leaves the generator as it was. Traces hold no
    checks, they are made of calls that work.
    """
    if check is not None and not torch.compiler.is_compiling() and not _are_modes_active():
        check(*arguments, **options)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
