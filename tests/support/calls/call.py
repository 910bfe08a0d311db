"""A call, and the tensors that calls are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import onepass  # noqa: F401  (which registers the operators)

F32 = torch.float32
RAW = torch.ops.onepass


@dataclass(frozen=True)
class Call:
    name: str
    tensors: Callable[[], dict[str, Tensor]]
    run: Callable[..., list[Tensor]]
    stock: Callable[..., list[Tensor]] | None = None
    written: tuple[str, ...] = ()  # in place
    optional: tuple[str, ...] = ()  # may be None
    differentiable: bool = False
    constant: tuple[str, ...] = ()  # of these, the arguments that get no gradient
    composed: bool = False  # of torch's operators beside ours: their errors and rounding count
    lists: tuple[str, ...] = ()  # arguments that are lists of tensors, given by their first


def flat(results) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, tuple | list):
        return [tensor for result in results for tensor in flat(result)]
    return []


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def sixteenths(*shape: int) -> Tensor:
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(sum(shape))) / 16


def ints(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
