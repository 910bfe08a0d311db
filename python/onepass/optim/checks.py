"""What an optimizer asks of its tensors before a step is made, in words that name the parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.optim.flat_state import is_dense, local


def check_dtype(
    name: str, number: int, param: Tensor, key: str, dtype: torch.dtype, coded: bool
) -> None:
    """Whether a state has a dtype that the operator takes; coded: it has scales beside it."""
    if key == "remainder":
        fits, rule = dtype is torch.int16, "int16"
    elif key == "master":
        fits, rule = dtype is torch.float32, "float32"
    elif coded:
        fits, rule = dtype is torch.uint8, "uint8 beside its scales"
    elif param.dtype is torch.float64:
        fits, rule = dtype is torch.float64, "float64 like the parameter"
    else:
        fits = dtype in (torch.float32, torch.bfloat16, torch.float16)
        rule = "float32, bfloat16 or float16"
    if not fits:
        raise RuntimeError(
            f"{name}: {key} of parameter {number} must have dtype {rule}, got {dtype}"
        )


def refuse_shared_memory(name: str, params: Sequence[Tensor]) -> None:
    """Pieces of all parameters are written at the same time, so none may lie in another."""
    for number, here in enumerate(map(local, params)):
        if any(s == 0 and n > 1 for s, n in zip(here.stride(), here.shape, strict=True)):
            raise RuntimeError(
                f"{name}: params must not share memory, got strides "
                f"{here.stride()} for shape {tuple(here.shape)} in parameter {number} of those "
                "with gradients"
            )
    spans = sorted(
        (
            (here.data_ptr(), here.data_ptr() + here.numel() * here.element_size(), number)
            for number, here in enumerate(map(local, params))
            if here.numel() and is_dense(here)
        ),
    )
    for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise RuntimeError(
                f"{name}: params must not share memory, got parameters "
                f"{min(one, other)} and {max(one, other)} of those with gradients that do"
            )


def refuse_sparse(name: str, gradients: Sequence[Tensor]) -> None:
    """In torch's own words."""
    if any(gradient.is_sparse for gradient in gradients):
        raise RuntimeError(f"{name} does not support sparse gradients")
