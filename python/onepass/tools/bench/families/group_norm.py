"""Cases of the group norm family against torch's own two passes, `F.silu(F.group_norm(x))`.

Tensors that must cross memory: the forward reads input and writes output, the backward reads
doutput and input and writes the gradient. Cases "last" have channels last in memory. Sizes are
those of a denoiser of images (Stable Diffusion's at 512 x 512), whose norms have 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.tools.bench.case import Case, Operator

GROUPS = 32
SHAPES = ((2, 320, 64, 64), (2, 1280, 16, 16))
LAST = ((2, 320, 64, 64),)
QUICK = ((2, 64, 4, 8),)
CUDA_SHAPES = ((64, 320, 64, 64),)
CUDA_CHECKED = (1, 320, 8, 64)


def _operator(ours: Callable, torchs: Callable) -> Operator:
    def stock(*tensors: Tensor) -> tuple[Tensor]:
        return (torchs(*tensors),)

    return Operator(lambda *tensors: (ours(*tensors),), stock, stock, stock)


OPERATORS = {
    "group_norm": _operator(
        lambda x, w, b: functional.group_norm(x, GROUPS, w, b),
        lambda x, w, b: F.group_norm(x, GROUPS, w, b),
    ),
    "group_norm_silu": _operator(
        lambda x, w, b: functional.group_norm(x, GROUPS, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, GROUPS, w, b)),
    ),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward")[:: 1 if on_cuda else 2]
    shapes = QUICK if quick else CUDA_SHAPES if on_cuda else SHAPES
    for name in OPERATORS:
        for last in (False, True):
            for shape in shapes if quick or on_cuda or not last else LAST:
                for dtype in (torch.float32, torch.bfloat16):
                    for phase in phases:
                        yield _case(name, shape, last, dtype, phase, device)


def _case(name: str, shape: tuple, last: bool, dtype: torch.dtype, phase: str, device: str) -> Case:
    backward = phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        x = torch.randn(*shape, device=device).to(dtype)
        if last:
            x = x.to(memory_format=torch.channels_last)
        weights = [torch.randn(shape[1], device=device).to(dtype) for _ in range(2)]
        return [tensor.requires_grad_(backward) for tensor in (x, *weights)]

    large = shape in CUDA_SHAPES
    order = "last" if last else "first"
    size = "x".join(map(str, shape))
    return Case(
        f"group_norm/{name}/{order}/{str(dtype).removeprefix('torch.')}/{size}/{phase}",
        OPERATORS[name],
        lambda: tensors(shape),
        backward,
        {"forward": 2, "backward": 3, "forward+backward": 5}[phase],
        cold=large,
        backward_alone=phase == "backward",
        device=device,
        make_checked=(lambda: tensors(CUDA_CHECKED)) if large else None,
    )
