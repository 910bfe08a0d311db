"""What an optimizer asks of torch.distributed: one seed for all ranks, one norm for all shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass._ops import optimizer as _ops
from onepass.optim.flat_state import DTensor


def broadcast_int(value: int) -> int:
    """Rank 0's value on every rank; the value itself in a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, of which some are DTensors.

    Local norms are reduced over the mesh dimensions that a gradient is sharded on, one call for all
    gradients that share them; replicated ones count once.
    """
    kinds: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        if DTensor is None or not isinstance(gradient, DTensor):
            kinds.setdefault((), []).append(gradient)
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.redistribute(
                placements=[
                    torch.distributed.tensor.Replicate() if p.is_partial() else p
                    for p in gradient.placements
                ]
            )
        sharded = tuple(d for d, p in enumerate(gradient.placements) if p.is_shard())
        key = (gradient.device_mesh, sharded)
        kinds.setdefault(key, []).append(gradient._local_tensor)
    squares = []
    for key, members in kinds.items():
        square = _ops.gradient_norm(members).square()
        if key:
            mesh, sharded = key
            for dimension in sharded:
                torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
