"""Cases of the loss family against `F.cross_entropy`, and against that of `F.linear`.

Tensors that must cross memory: the forward reads the logits, the backward reads them and writes
their gradient. The shape is that of a step of GPT-2: 2,048 tokens, 50,257 words. The loss of a
layer of 768 features is bound by its products, so 512 tokens are enough; "whole logits" is
onepass's alternative: `functional.linear`, and `functional.cross_entropy` with its gradient in
place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.reference import loss as reference
from onepass.tools.bench.case import Case, Operator

SHAPE = (2048, 50257)
QUICK = (16, 96)
CUDA_SHAPE = (8192, 50257)
CHECKED = (8, 50257)
LAYER_ROWS, FEATURES, QUICK_FEATURES = 512, 768, 24


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

WITH_LAYER = "linear_cross_entropy"


def _of_layer(loss: Callable) -> Callable:
    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (loss(hidden, weight, _target(len(hidden), len(weight), hidden.device)),)

    return run


def _torchs_of_layer(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _whole_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits, target, inplace_backward=True)


def _torchs_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)
    return F.linear_cross_entropy(hidden, weight, target, options=options)


LAYER = Operator(
    _of_layer(functional.linear_cross_entropy),
    _of_layer(_torchs_of_layer),
    _of_layer(reference.linear_cross_entropy),
    _of_layer(_torchs_of_layer),
    others={"whole logits": _of_layer(_whole_logits)},
    optional={"torch in chunks of 256": _of_layer(_torchs_chunks)},  # torch 2.13
)


def cases(quick: bool = False, device: str = "cpu") -> Iterator[Case]:
    """All cases of a device; `quick` keeps a small shape."""
    on_cuda = device == "cuda"
    phases = ("forward", "backward", "forward+backward")[:: 1 if on_cuda else 2]
    shape = QUICK if quick else CUDA_SHAPE if on_cuda else SHAPE
    for name in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            for phase in phases:
                yield _case(name, shape, dtype, phase, device)
    if on_cuda:
        return  # its products are torch's
    for dtype in (torch.float32, torch.bfloat16):
        for phase in phases:
            yield _case_of_layer(quick, dtype, phase)


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


def _case_of_layer(quick: bool, dtype: torch.dtype, phase: str) -> Case:
    rows, classes = QUICK if quick else (LAYER_ROWS, SHAPE[1])
    features = QUICK_FEATURES if quick else FEATURES
    backward = phase != "forward"

    def tensors(rows: int) -> list[Tensor]:
        sizes = ((rows, features), (classes, features))
        drawn = [torch.randn(size, device="cpu").mul(features**-0.25).to(dtype) for size in sizes]
        return [tensor.requires_grad_(backward) for tensor in drawn]

    size = f"{rows}x{features}x{classes}"
    return Case(
        f"loss/{WITH_LAYER}/{str(dtype).removeprefix('torch.')}/{size}/{phase}",
        LAYER,
        lambda: tensors(rows),
        backward,
        None,
        flops=2 * rows * features * classes * (3 if backward else 1),
        unit="bfloat16" if dtype is torch.bfloat16 else "float32",
        make_checked=None if quick else lambda: tensors(CHECKED[0]),
    )
