"""Cases of the causal convolution family against torch's convolution, cut to length, and silu.

Tensors that must cross memory: the forward reads x and writes output, the backward reads doutput
and x and writes dx. "channels last" is a part of a projection, as models hold it; torch's
convolution copies it. Of an update the state must be read and written, which lies in no cache, as
those of a model's layers.
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
STATE, QUICK_STATE = (64, 5120, WIDTH), (2, 48, WIDTH)  # of an update


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (functional.causal_conv1d(x, weight, bias, activation="silu"),)


def _torchs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """The fallback of transformers."""
    output = F.conv1d(x, weight[:, None], bias, padding=WIDTH - 1, groups=len(weight))
    return (F.silu(output[..., : x.shape[-1]]),)


def _formula(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (reference.causal_conv.causal_conv1d(x, weight, bias, "silu"),)


OPERATOR = Operator(_ours, _torchs, _formula, _torchs)


def _update(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (functional.causal_conv1d_update(x, state, weight, bias, "silu"),)


def _stock_update(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """The fallback of transformers."""
    together = torch.cat([state, x], -1)
    state.copy_(together[..., -state.shape[-1] :])
    output = F.conv1d(together, weight[:, None], bias, groups=len(weight))
    return (F.silu(output[..., -x.shape[-1] :]),)


def _formula_of_update(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    given = (x, state, weight, bias, "silu")
    return (reference.causal_conv.causal_conv1d_update(*given)[0],)


UPDATE = Operator(_update, _stock_update, _formula_of_update, _stock_update)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a CPU; CUDA has no kernel. `quick` keeps a small shape."""
    if device != "cpu":
        return
    for order in ("channels last", "channels first"):
        for dtype in (torch.float32, torch.bfloat16):
            for phase in ("forward", "forward+backward"):
                yield _case(order, QUICK if quick else SHAPE, dtype, phase)
    for dtype in (torch.float32, torch.bfloat16):
        yield _update_case(QUICK_STATE if quick else STATE, dtype)


def _update_case(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    batch, channels, _ = shape

    def make() -> list[Tensor]:
        sizes = (shape, (batch, channels, 1), (channels, WIDTH), (channels,))
        return [torch.randn(size, device="cpu").to(dtype) for size in sizes]

    return Case(
        f"causal_conv/update/{str(dtype).removeprefix('torch.')}/{batch}x{channels}/forward",
        UPDATE,
        make,
        False,
        2,
        cold=True,
        compiles=False,
    )


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
