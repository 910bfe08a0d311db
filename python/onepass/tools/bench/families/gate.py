"""Cases of the gate family against torch's own two passes, `F.silu(gate) * up`.

Tensors that must cross memory: the forward reads gate and up and writes output, the backward reads
doutput, gate and up and writes dgate and dup. "halves" are gate and up in one tensor, as a fused
projection leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.tools.bench.case import Case, Operator

SHAPE = (2048, 11008)  # of Llama-2 7B's feed-forward block
QUICK = (64, 96)
CUDA_SHAPE = (8192, 11008)
CUDA_CHECKED = (16, 11008)
HALVES = ", halves"


def _operator(ours: Callable, activation: Callable) -> Operator:
    def torchs(*factors: Tensor) -> tuple[Tensor]:
        gate, up = factors if len(factors) == 2 else factors[0].chunk(2, -1)
        return (activation(gate) * up,)

    return Operator(lambda *factors: (ours(*factors),), torchs, torchs, torchs)


OPERATORS = {
    "silu_mul": _operator(functional.silu_mul, F.silu),
    "gelu_mul": _operator(functional.gelu_mul, F.gelu),
    f"silu_mul{HALVES}": _operator(functional.silu_mul, F.silu),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward")[:: 1 if on_cuda else 2]
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            for phase in phases[-1:] if name.endswith(HALVES) else phases:
                yield _case(name, shape, dtype, phase, device)


def _case(name: str, shape: tuple, dtype: torch.dtype, phase: str, device: str) -> Case:
    halves, backward = name.endswith(HALVES), phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        sizes = [(shape[0], 2 * shape[1])] if halves else [shape] * 2
        drawn = (torch.randn(size, device=device).to(dtype) for size in sizes)
        return [tensor.requires_grad_(backward) for tensor in drawn]

    moved = {"forward": 3, "backward": 5, "forward+backward": 8}[phase]
    large = shape == CUDA_SHAPE
    return Case(
        f"gate/{name}/{str(dtype).removeprefix('torch.')}/{shape[0]}x{shape[1]}/{phase}",
        OPERATORS[name],
        lambda: tensors(shape),
        backward,
        moved // 2 if halves else moved,  # halves are one tensor of twice the size
        cold=large,
        backward_alone=phase == "backward",
        device=device,
        make_checked=(lambda: tensors(CUDA_CHECKED)) if large else None,
    )
