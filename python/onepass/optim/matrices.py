"""The matrices that a parameter consists of: stacked projections, heads, experts, filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Matrices = int | Sequence[int] | str | None

STACKED, FLATTENED = "stacked", "flattened"


def check_matrices(name: str, shape: torch.Size, matrices: Matrices) -> None:
    """Raises if a parameter of this shape does not consist of such matrices.

    Raises:
        ValueError: with torch's message if the setting is not given.
    """
    shown = tuple(shape)
    if matrices is None:
        if len(shape) != 2:
            raise ValueError(
                f"{name} only supports 2D parameters whereas we found a parameter with size: "
                f"{shape}; the setting `matrices` is for stacked ones"
            )
    elif isinstance(matrices, str):
        if matrices not in (STACKED, FLATTENED):
            raise ValueError(
                f"{name}: matrices must be None, a number, sizes, 'stacked' or 'flattened', got "
                f"{matrices!r}"
            )
        least = 3 if matrices == STACKED else 2
        if len(shape) < least:
            raise ValueError(
                f"{name}: params must have {least} dimensions or more with matrices={matrices!r}, "
                f"got shape {shown}"
            )
    elif len(shape) != 2:
        raise ValueError(
            f"{name}: params must have 2 dimensions with matrices={matrices}, got shape {shown}"
        )
    elif _is_whole(matrices):
        if matrices < 1 or shape[0] % matrices:
            raise ValueError(
                f"{name}: matrices must divide a parameter's {shape[0]} rows, got {matrices}"
            )
    else:
        are_sizes = isinstance(matrices, Sequence) and all(map(_is_whole, matrices))
        if not are_sizes or min(matrices, default=0) < 0 or sum(matrices) != shape[0]:
            raise ValueError(
                f"{name}: matrices must be sizes that add up to a parameter's {shape[0]} rows, got "
                f"{matrices}"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def matrices_of(tensor: Tensor, matrices: Matrices) -> list[Tensor]:
    """Views of a tensor's matrices; a copy if a "flattened" one is not contiguous."""
    if matrices is None:
        return [tensor]
    if matrices == STACKED:
        found = [tensor]
        for _ in range(tensor.dim() - 2):
            found = [part for one in found for part in one.unbind()]
        return found
    if matrices == FLATTENED:
        return [tensor.flatten(1)]
    if isinstance(matrices, int):
        matrices = [tensor.shape[0] // matrices] * matrices
    return list(tensor.split(list(matrices)))


def joined(parts: Sequence[Tensor], shape: torch.Size, matrices: Matrices) -> Tensor:
    """The tensor of this shape with these matrices."""
    if matrices is None:
        return parts[0]
    if matrices == FLATTENED:
        return parts[0].reshape(shape)
    if matrices == STACKED:
        return torch.stack(list(parts)).view(shape)
    return torch.cat(list(parts))
