"""Cases of the dropout family against torch's own dropout: forward and backward in one call, on
CUDA also each alone.

Tensors that must cross memory: the forward reads input and writes output, the backward reads the
upstream gradient and writes its own; a residual is one read more. No mask is stored between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._ops.random import draw_seed
from onepass.bench.case import Case, Operator
from onepass.reference import dropout as reference

SHAPE = (2048, 1024)
QUICK = (64, 96)
P = 0.1
CUDA_SHAPE = (65536, 1024)  # as large as those of the norms, and for the same reasons
CUDA_CHECKED = (512, 1024)


def _operator(ours, stock, formula) -> Operator:
    return Operator(ours, stock, formula, base=formula)


OPERATORS = {
    "dropout": _operator(
        lambda x: (functional.dropout(x, P),),
        lambda x: (F.dropout(x, P),),
        lambda x: (reference.dropout(x, P, draw_seed(x.device)),),
    ),
    "add_dropout": _operator(
        lambda x, r: (functional.add_dropout(x, r, P),),
        lambda x, r: (r + F.dropout(x, P),),
        lambda x, r: (reference.add_dropout(x, r, P, draw_seed(x.device)),),
    ),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward") if on_cuda else ("forward+backward",)
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            for phase in phases:
                yield _case(name, shape, dtype, phase, device)


def _case(name: str, shape: tuple, dtype: torch.dtype, phase: str, device: str) -> Case:
    inputs = 2 if name == "add_dropout" else 1
    backward = phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        drawn = (torch.randn(shape, device=device).to(dtype) for _ in range(inputs))
        return [tensor.requires_grad_(backward) for tensor in drawn]

    moved = {"forward": 1 + inputs, "backward": 2, "forward+backward": 3 + inputs}
    large = shape == CUDA_SHAPE
    return Case(
        f"dropout/{name}/{str(dtype).removeprefix('torch.')}/{shape[0]}x{shape[1]}/{phase}",
        OPERATORS[name],
        lambda: tensors(shape),
        backward,
        moved[phase],
        cold=large,
        backward_alone=phase == "backward",
        device=device,
        make_checked=(lambda: tensors(CUDA_CHECKED)) if large else None,
    )
