"""Cases of the causal convolution family against torch's convolution, cut to length, and silu.

Tensors that must cross memory: the forward reads x and writes output, the backward reads doutput
and x and writes dx. "channels last" is a part of a projection, as models hold it; torch's
convolution copies it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional, reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (1, 2048, 1024)  # of Mamba 130m to 370m, 1,024 tokens
QUICK = (1, 48, 64)
WIDTH = 4


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (functional.causal_conv1d(x, weight, bias, activation="silu"),)


def _torchs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """The fallback of transformers."""
    output = F.conv1d(x, weight[:, None], bias, padding=WIDTH - 1, groups=len(weight))
    return (F.silu(output[..., : x.shape[-1]]),)


def _formula(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (reference.causal_conv.causal_conv1d(x, weight, bias, "silu"),)


OPERATOR = Operator(_ours, _torchs, _formula, _torchs)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel. `quick` keeps a small shape."""
    if device != "cpu":
        return
    for order in ("channels last", "channels first"):
        for dtype in (torch.float32, torch.bfloat16):
            for phase in ("forward", "forward+backward"):
                yield _case(order, QUICK if quick else SHAPE, dtype, phase)


def _case(order: str, shape: tuple[int, int, int], dtype: torch.dtype, phase: str) -> Case:
    batch, channels, length = shape
    backward = phase != "forward"

    def make() -> list[Tensor]:
        drawn = [
            torch.randn(size, device="cpu").to(dtype)
            for size in ((batch, length, channels), shape, (channels, WIDTH), (channels,))
        ]
        x = drawn.pop(0).transpose(1, 2)
        if order == "channels last":
            drawn[0] = x
        return [tensor.requires_grad_(backward) for tensor in drawn]

    return Case(
        f"causal_conv/{order}/{str(dtype).removeprefix('torch.')}/{batch}x{channels}x{length}/"
        f"{phase}",
        OPERATOR,
        make,
        backward,
        5 if backward else 2,
    )
