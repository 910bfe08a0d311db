"""Cases of the dropout family against torch's own dropout: forward and backward in one call, on
CUDA also each alone.

Tensors that must cross memory: the forward reads input and writes output, the backward reads the
upstream gradient and writes its own; a residual is one read more. No mask is stored between them.
A scaled branch (LayerScale, DropPath) has no dropout, and its backward reads the branch as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass._random import draw_seed
from onepass.reference import dropout as reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (2048, 1024)
QUICK = (64, 96)
P = 0.1
CUDA_SHAPE = (65536, 1024)  # as large as those of the norms, and for the same reasons
CUDA_CHECKED = (512, 1024)
# Samples of a scaled branch's rows; each has a factor, and one is dropped.
SAMPLES = 8
SCALED = "add_dropout, scaled"


def _stock_scaled(x, residual, gamma, factors):
    """The composition of vision transformers."""
    return (residual + x * gamma * factors.to(x.dtype)[:, None, None],)


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
    SCALED: Operator(
        lambda x, r, c, f: (functional.add_dropout(x, r, 0.0, column_scale=c, row_scale=f),),
        _stock_scaled,
        lambda x, r, c, f: (reference.add_dropout(x, r, 0, None, column_scale=c, row_scale=f),),
        base=_stock_scaled,
    ),
}


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    each = ("forward", "backward", "forward+backward")
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        phases = each if on_cuda else each[::2] if name == SCALED else each[2:]
        for dtype in (torch.float32, torch.bfloat16):
            for phase in phases:
                yield _case(name, shape, dtype, phase, device)


def _case(name: str, shape: tuple, dtype: torch.dtype, phase: str, device: str) -> Case:
    inputs = 1 if name == "dropout" else 2
    backward = phase != "forward"

    def tensors(shape: tuple) -> list[Tensor]:
        sizes = [shape] * inputs
        if name == SCALED:
            sizes = [(SAMPLES, shape[0] // SAMPLES, shape[1])] * inputs + [shape[1:]]
        drawn = [torch.randn(size, device=device).to(dtype) for size in sizes]
        drawn = [tensor.requires_grad_(backward) for tensor in drawn]
        return drawn + [row_factors(SAMPLES, device)] if name == SCALED else drawn

    of_backward = 3 if name == SCALED else 2
    moved = {"forward": 1 + inputs, "backward": of_backward}
    moved["forward+backward"] = sum(moved.values())
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


def row_factors(samples: int, device: str) -> Tensor:
    """DropPath's factors, one of them 0."""
    factors = torch.full((samples,), samples / (samples - 1), device=device)
    factors[samples // 2] = 0.0
    return factors
