"""The optimizers' part in torch.distributed: gradients placed like their parameters, one seed for
all ranks, one norm for all shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onepass._imported import is_dtensor
from onepass._ops import optimizer as _ops
from onepass.optim.checks import refuse_freed, refuse_mixed, refuse_sparse
from onepass.optim.flat_state import awaited, local, parted


def broadcast_int(value: int) -> int:
    """Rank 0's value on every rank; the value itself in a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


def parts_like(
    name: str, params: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(gradients, this rank's parts of the parameters, its parts of the gradients).

    Each gradient is in its parameter's placement: itself, or redistributed as torch would.

    Raises:
        RuntimeError: one of the two is a DTensor and the other is not, or the gradient of a partial
            parameter is not.
        NotImplementedError: they are on different meshes.
    """
    distributed = refuse_mixed(name, params, gradients)
    # With comprehensions and private attributes of torch: this is the whole extra cost of a step of
    # small shards over one of whole tensors.
    placed = [
        gradient
        if not is_one or _are_placed_alike(gradient._spec, param._spec)
        else gradient.redistribute(param.device_mesh, param.placements)
        for is_one, param, gradient in zip(distributed, params, gradients, strict=True)
    ]
    parts, parts_of_gradients = (
        [
            tensor._local_tensor if is_one else tensor
            for is_one, tensor in zip(distributed, tensors, strict=True)
        ]
        for tensors in (params, placed)
    )
    return (
        placed,
        [part if type(part) is Tensor else awaited(part) for part in parts],
        [part if type(part) is Tensor else awaited(part) for part in parts_of_gradients],
    )


def _are_placed_alike(one, other) -> bool:
    """Whether two DTensors' specs have the same placement; dtype and strides may differ."""
    return one is other or (one.placements == other.placements and one.mesh == other.mesh)


def state_like(param: Tensor, value: Tensor) -> Tensor:
    """A state in its parameter's placement; each rank takes its part of a whole state."""
    if not is_dtensor(value) and not is_dtensor(param):
        return value
    if is_dtensor(value) and is_dtensor(param) and value.placements == param.placements:
        return value
    dtype = value.dtype
    if dtype is torch.int16:  # not supported by collectives
        value = value.int()
    if not is_dtensor(param):
        value = value.full_tensor()
    elif is_dtensor(value):
        value = value.redistribute(param.device_mesh, param.placements)
    else:
        value = torch.distributed.tensor.distribute_tensor(
            value, param.device_mesh, param.placements, src_data_rank=None
        )
    return value.to(dtype)


def local_norm(name: str, gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together; none is a DTensor."""
    try:
        return _ops.gradient_norm(gradients)
    except RuntimeError:  # gaps between the elements, or no dense tensors at all
        refuse_sparse(name, gradients)
        refuse_freed(name, "gradients", gradients)
        return _ops.gradient_norm([gradient.contiguous() for gradient in gradients])


def total_norm(name: str, gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together; some are DTensors.

    Local norms are reduced over the mesh dimensions that a gradient is sharded on, one call for all
    gradients that share them; replicated ones count once.
    """
    kinds: dict[tuple, list[Tensor]] = {}
    for gradient in gradients:
        if not is_dtensor(gradient):
            kinds.setdefault((), []).append(gradient)
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.redistribute(
                placements=[
                    torch.distributed.tensor.Replicate() if p.is_partial() else p
                    for p in gradient.placements
                ]
            )
        key = (gradient.device_mesh, parted(gradient))
        kinds.setdefault(key, []).append(local(gradient))
    squares = []
    for key, members in kinds.items():
        square = local_norm(name, members).square()
        if key:
            mesh, sharded = key
            for dimension in sharded:
                torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def agreed(found_inf: Tensor, params: Iterable[Tensor]) -> Tensor:
    """The largest found_inf of all ranks that share parameters: they step together or not at all.

    torch's GradScaler reduces over the ranks among which the first gradient is sharded.
    """
    found_inf = found_inf.clone()
    for mesh in dict.fromkeys(p.device_mesh for p in params if is_dtensor(p)):
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(
                found_inf, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dimension)
            )
    return found_inf
