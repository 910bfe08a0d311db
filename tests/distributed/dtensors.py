"""Parameters and gradients in every placement, on meshes of one and two dimensions."""

import functools
import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

# A square tensor, whose shards by rows and by columns have the same shape; shards of unequal sizes,
# and empty ones; one whose halves and quarters are large enough for 8-bit states.
SHAPES = ((4, 4), (5, 3), (1, 6), (256, 64))
OF_PARAMETERS = (Replicate(), Shard(0), Shard(1))
OF_GRADIENTS = (*OF_PARAMETERS, Partial())


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of all processes."""
    return init_device_mesh("cpu", shape)


def pairs(dimensions: int) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """(parameter's, gradient's) placements, in all combinations."""
    return list(
        itertools.product(
            itertools.product(OF_PARAMETERS, repeat=dimensions),
            itertools.product(OF_GRADIENTS, repeat=dimensions),
        )
    )


def sixteenths(shape, seed: int, most: int = 16) -> torch.Tensor:
    """Multiples of 1/16, which 16 bits hold and any order sums exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator) / 16


def spread(value: torch.Tensor, mesh: DeviceMesh, placements) -> DTensor:
    """Distributes a tensor of which every rank has the whole, without communication.

    If it is partial, every rank holds another part of the sum; all parts are multiples of 1/16, so
    that sums in any order are exact.
    """
    parts, coordinate = value, mesh.get_coordinate()
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            size, rank = mesh.size(dimension), coordinate[dimension]
            noise = sixteenths(value.shape, dimension, most=8)
            parts = parts - (size - 1) * noise if rank == 0 else noise
    # Where two dimensions are partial, the second one's parts are made of the first one's.
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(parts, mesh, whole, src_data_rank=None).to_local()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def placed_as(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A gradient of an output, placed as that is; whole where it is partial."""
    if not isinstance(output, DTensor):
        return value
    whole = [Replicate() if p.is_partial() else p for p in output.placements]
    return spread(value, output.device_mesh, whole)


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()
