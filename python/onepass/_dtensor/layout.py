"""Layouts, the results of rules: which dimensions may be split, and how a part is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

Names = tuple[str | None, ...]  # of a tensor's dimensions; None: never split
Choice = tuple[str, ...]  # names that are split together; none: the whole on each process


@dataclass
class Layout:
    """How one call may be split.

    Attributes:
        inputs: the names of each tensor's dimensions, by argument; of one that is not in it, none.
        outputs: those of each result.
        choices: which names may be split.
        even: of a name, a number that the processes must divide: whole groups of it.
        summed: names that results are sums over; each process has a part of the sum.
        written: tensors that are changed in place, and so cannot be moved.
        overwritten: tensors over which the backward writes their gradients.
        localize: turns the other arguments into those of a part, in place.
        compute: a function that runs in place of the entry.
        finish: turns the results, DTensors, into those that the caller gets.
        special: names of which a part needs localize or compute; None: every part does, if there
            are any. Where no such name is split, and nothing has to be finished, the entry computes
            the parts.
    """

    inputs: Mapping[str, Names]
    outputs: Sequence[Names]
    choices: Sequence[Choice]
    even: Mapping[str, int] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    localize: Callable[[dict, Parts], None] | None = None
    compute: Callable | None = None
    finish: Callable | None = None
    special: frozenset[str] | None = None


@dataclass
class Parts:
    """The sizes of this process's part, by the names of the dimensions that are split."""

    sizes: dict[str, int]  # of the whole
    counts: dict[str, int] = field(default_factory=dict)  # how many parts there are
    begins: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[tuple[DeviceMesh, int]]] = field(default_factory=dict)

    def split(self, name: str, mesh: DeviceMesh, mesh_dim: int) -> None:
        """Along one dimension of the mesh more."""
        count, index = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        self.groups.setdefault(name, []).append((mesh, mesh_dim))
        length = self.lengths.get(name, self.sizes[name])
        begin = min(index * -(-length // count), length)
        end = min(begin + -(-length // count), length)
        self.counts[name] = self.count(name) * count
        self.begins[name] = self.begin(name) + begin
        self.lengths[name] = end - begin

    def count(self, name: str) -> int:
        return self.counts.get(name, 1)

    def begin(self, name: str) -> int:
        return self.begins.get(name, 0)
