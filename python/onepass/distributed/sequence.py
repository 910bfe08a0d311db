"""The positions of a sequence on each process; sharding and gathering a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

LAYOUTS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Rows [begin, end) of a shard, which are at positions from `position` on."""

    position: int
    begin: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)

    def covers(self, rows: int) -> bool:
        return self.end - self.begin == rows

    def of(self, tensor: Tensor) -> Tensor:
        """The chunk's rows of (batch, heads, rows, ...)."""
        return tensor[:, :, self.rows]


def chunks(rank: int, size: int, rows: int, layout: str) -> list[Chunk]:
    """The chunks of a process's shard of a sequence of size * rows.

    Of 2 * size pieces a zigzag shard has one from the front and one from the end, so that all
    processes have equal work for causal attention.
    """
    if layout == "contiguous" or size == 1:
        return [Chunk(rank * rows, 0, rows)]
    half = rows // 2
    return [Chunk(rank * half, 0, half), Chunk((2 * size - 1 - rank) * half, half, rows)]


def place(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, size); without a process group this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError(f"{op}: group must hold this process, got one that does not")
    return rank, dist.get_world_size(group)


def shard_sequence(
    tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None, *, layout: str = "zigzag"
) -> Tensor:
    """This process's part of a sequence that each process has whole: tokens, labels, positions.

    Args:
        tensor: any tensor, the same on all processes.
        dim: its dimension of positions, which is divided evenly.
        group: the processes; None is torch's default group, or this process alone.
        layout: "contiguous": process r has the r-th of `size` pieces. "zigzag": of 2 * size pieces
            it has the r-th from the front and the r-th from the end, one after the other.

    Returns:
        A new tensor, contiguous. It has a gradient if `tensor` has one, that of this part alone.

    Raises:
        RuntimeError: the dimension's size does not divide; the message names the argument.
        ValueError: layout is unknown.
        IndexError: there is no such dimension.

    Examples:
        >>> from onepass.distributed import shard_sequence
        >>> tokens = torch.arange(8)[None]
        >>> mine = shard_sequence(tokens, 1)  # all of them, where there is one process
        >>> positions = shard_sequence(torch.arange(8), 0)
    """
    op = "shard_sequence"
    (rank, size), length = place(op, group), tensor.shape[dim]
    rows, rest = divmod(length, size)
    if rest:
        raise RuntimeError(
            f"{op}: tensor must have a size that {size} divides in dimension {dim}, got {length}"
        )
    check_layout(op, "tensor", layout, rows, size)
    parts = [
        tensor.narrow(dim, chunk.position, chunk.end - chunk.begin)
        for chunk in chunks(rank, size, rows, layout)
    ]
    return torch.cat(parts, dim)


def gather_sequence(
    tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None, *, layout: str = "zigzag"
) -> Tensor:
    """The whole sequence, on each process, from the parts that they hold: undoes `shard_sequence`.

    Args:
        tensor: this process's part, of the same shape and dtype on all.
        dim: its dimension of positions.
        group: the processes; None is torch's default group, or this process alone.
        layout: as in `shard_sequence`.

    Returns:
        A new tensor, without a gradient, as of `torch.distributed.all_gather`.

    Raises:
        RuntimeError: the dimension's size is odd with "zigzag"; the message names the argument.
        ValueError: layout is unknown.
        IndexError: there is no such dimension.

    Examples:
        >>> from onepass.distributed import gather_sequence, shard_sequence
        >>> x = torch.randn(2, 8)
        >>> bool((gather_sequence(shard_sequence(x, 1), 1) == x).all())
        True
    """
    op = "gather_sequence"
    (_, size), rows = place(op, group), tensor.shape[dim]
    check_layout(op, "tensor", layout, rows, size)
    mine = tensor.detach().contiguous()
    parts = [mine]
    if size > 1:
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group)
    shape = list(tensor.shape)
    shape[dim] = rows * size
    whole = mine.new_empty(shape)
    for rank, part in enumerate(parts):
        for chunk in chunks(rank, size, rows, layout):
            count = chunk.end - chunk.begin
            whole.narrow(dim, chunk.position, count).copy_(part.narrow(dim, chunk.begin, count))
    return whole


def check_layout(op: str, name: str, layout: str, rows: int, size: int) -> None:
    """Checks the layout for `rows` positions on each of `size` processes."""
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout must be 'zigzag' or 'contiguous', got {layout!r}")
    if layout == "zigzag" and rows % 2 and size > 1:
        raise RuntimeError(
            f"{op}: {name} must have an even number of positions on each process for "
            f"layout='zigzag', got {rows}"
        )
