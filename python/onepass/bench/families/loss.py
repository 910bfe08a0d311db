"""Cases of the loss family against `F.cross_entropy`.

Tensors that must cross memory: the forward reads the logits, the backward reads them and writes
their gradient. The shape is that of a step of GPT-2: 2,048 tokens, 50,257 words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.bench.case import Case, Operator
from onepass.reference import loss as reference

SHAPE = (2048, 50257)
QUICK = (16, 96)
CUDA_SHAPE = (8192, 50257)
CHECKED = (8, 50257)


@functools.cache
def _target(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device) * 7919 % cols


def _of_logits(loss: Callable) -> Callable:
    return lambda logits: (loss(logits, _target(*logits.shape, logits.device)),)


OPERATORS = {
    "cross_entropy": Operator(
        _of_logits(functional.cross_entropy),
        _of_logits(F.cross_entropy),
        _of_logits(reference.cross_entropy),
        _of_logits(F.cross_entropy),
    )
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward")[:: 1 if on_cuda else 2]
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            for phase in phases:
                yield _case(name, shape, dtype, phase, device)


def _case(name: str, shape: tuple, dtype: torch.dtype, phase: str, device: str) -> Case:
    backward = phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        return [torch.randn(shape, device=device).to(dtype).requires_grad_(backward)]

    return Case(
        f"loss/{name}/{str(dtype).removeprefix('torch.')}/{shape[0]}x{shape[1]}/{phase}",
        OPERATORS[name],
        lambda: tensors(shape),
        backward,
        {"forward": 1, "backward": 2, "forward+backward": 3}[phase],
        cold=shape == CUDA_SHAPE,
        backward_alone=phase == "backward",
        device=device,
        make_checked=None if shape == QUICK else lambda: tensors(CHECKED),
    )
