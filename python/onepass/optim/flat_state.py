"""Optimizer states in a few large buffers, each parameter's entry a view into them.

An operator call costs 0.1 us and more for every tensor argument (CONTRIBUTING.md, Gotchas). So
parameters and buffers are passed once, with a table of the places of each parameter's states
(csrc/ops/optimizer_table.h), and a step passes the gradients alone. An entry is a tensor with a
storage of its own size that lies in a buffer, so `torch.save`, `deepcopy` and `state_dict` see one
ordinary tensor per entry. Code that replaces an entry gives it a separate buffer. So does code that
exchanges the memory of one (`share_memory_`, ``entry.data = ...``): the operator is passed the
entries beside their buffers, compares their addresses in every step (7 ns each), and refuses a step
whose table is out of date.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepass._imported import is_async, is_dtensor
from onepass.optim import codes
from onepass.optim.contract import LAYOUT, StepTable

# Buffers end at this many elements, so that no single allocation is out of proportion.
CHUNK_ELEMENTS = 1 << 26
# Entries begin at multiples of 64 bytes in every dtype.
ALIGNMENT = 64

# Remembered sets of parameters with gradients: enough to hold all of them several times, for
# experts that take turns, or for steps one by one in backward.
MAX_STEP_TABLES = 16

EMA = "ema"  # the key of the average of a parameter
EMA_STEPS = "ema_steps"  # of a group: steps that its averages are of
SCALE = "_scale"  # appended to the key of a moment in codes: the key of its scales

# The numbers of the parameters with gradients: a range if all have one, which is quicker as a key.
Numbers = range | tuple[int, ...]


def is_signed(moment: str) -> bool:
    """Whether a moment has negative values, since 8-bit codes depend on that."""
    return moment in ("exp_avg", "momentum_buffer")


def local(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's part of a DTensor, waited for."""
    if not is_dtensor(tensor):
        return tensor
    return awaited(tensor._local_tensor)


def awaited(tensor: Tensor) -> Tensor:
    """The tensor itself, or the result of a collective that may still be running."""
    return tensor.trigger_wait() if is_async(tensor) else tensor


def placed_like(tensor: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a DTensor if `tensor` is one, with its shape and placement."""
    if local(tensor) is tensor:
        return part
    return type(tensor).from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def parted(tensor: Tensor) -> tuple[int, ...]:
    """The mesh dimensions along which ranks hold different elements of a DTensor."""
    return tuple(d for d, p in enumerate(tensor.placements) if not p.is_replicate())


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements are consecutive in memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    within = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != within:
                return False
            within *= size
    return True


def strides_of(param: Tensor) -> tuple[int, ...]:
    """The strides of a state: the parameter's, or row-major ones if the parameter has gaps."""
    if is_dense(param):
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()


def laid_like(param: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in its parameter's memory order, without the negative bit: itself, or a copy."""
    if gradient.shape != param.shape:
        return gradient
    if gradient.stride() == param.stride() and not gradient.is_neg():
        return gradient
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)


def layouts_of(params: Iterable[Tensor]) -> list[tuple]:
    """The facts that determine the layout of states."""
    return [
        (
            p.shape,
            local(p).shape,
            local(p).stride(),
            p.dtype,
            p.device,
            (p.device_mesh, p.placements) if is_dtensor(p) else None,
        )
        for p in params
    ]


def noise_number(number: int, param: Tensor) -> int:
    """The number of a parameter's stream of noise: shards of one differ, replicas do not."""
    if not is_dtensor(param):
        return number
    shard, size = 0, 1
    mesh = param.device_mesh
    for dimension in parted(param):
        shard += size * mesh.get_local_rank(dimension)
        size *= mesh.size(dimension)
    return number + (shard << 20)


def are_same(ones: Collection, others: Collection) -> bool:
    """Whether two collections hold the same objects."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


@dataclass(frozen=True)
class Place:
    """The place of an entry in a buffer."""

    entry: Tensor
    buffer: Tensor
    offset: int

    def is_there(self) -> bool:
        """Whether the entry still has its memory (not after `share_memory_`, `entry.data =
        ...`)."""
        begin = self.buffer.data_ptr() + self.offset * self.buffer.element_size()
        return local(self.entry).numel() == 0 or local(self.entry).data_ptr() == begin


@dataclass
class Request:
    """An entry to make."""

    param: Tensor
    key: str
    dtype: torch.dtype

    def numel(self) -> int:
        if self.key == "step":
            return 1
        numel = local(self.param).numel()
        return numel // codes.BLOCK if self.key.endswith(SCALE) else numel


class Places:
    """The entries in buffers."""

    def __init__(self) -> None:
        self._by_id: dict[int, Place] = {}

    def copy(self) -> Places:
        """An independent copy."""
        places = Places()
        places._by_id = dict(self._by_id)
        return places

    def of(self, entry: Tensor) -> Place:
        """The place of an entry: in a buffer, or in itself if it was made elsewhere."""
        place = self._by_id.get(id(entry))
        if place is not None and place.entry is entry and place.is_there():
            return place
        return Place(entry, local(entry), 0)

    def keep_only(self, entries: Iterable[Tensor]) -> None:
        """Forgets all others, so that their memory can be freed."""
        self._by_id = {id(e): self._by_id[id(e)] for e in entries if id(e) in self._by_id}

    def make(self, requests: Sequence[Request]) -> list[Tensor]:
        """New entries, zero, one for each request."""
        entries: dict[int, Tensor] = {}
        kinds: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            device = local(request.param).device
            kinds.setdefault((request.dtype, device, request.key), []).append(i)
        for (dtype, device, _), members in kinds.items():
            for chunk in _chunks(members, requests):
                sizes = [padded(requests[i].numel()) for i in chunk]
                buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
                offset = 0
                for i, size in zip(chunk, sizes, strict=True):
                    entries[i] = self._view(requests[i], buffer, offset)
                    offset += size
        return [entries[i] for i in range(len(requests))]

    def _view(self, request: Request, buffer: Tensor, offset: int) -> Tensor:
        param, numel = local(request.param), request.numel()
        part = buffer[offset : offset + numel]
        if request.key == "step":
            part = part.view(())
        elif not request.key.endswith(SCALE):
            part = part.as_strided(param.shape, strides_of(param), buffer.storage_offset() + offset)
        # Through DLPack the view gets a storage that covers it alone and keeps the buffer alive.
        with _current(part.device):
            entry = torch.from_dlpack(part) if numel else torch.empty_like(part)
        if entry.dim() and not request.key.endswith(SCALE):
            entry = placed_like(request.param, entry)
        self._by_id[id(entry)] = Place(entry, buffer, offset)
        return entry


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a CUDA device torch's current one: DLPack exports from no other."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def padded(numel: int) -> int:
    return max(1, math.ceil(numel / ALIGNMENT)) * ALIGNMENT


def _chunks(members: list[int], requests: Sequence[Request]) -> Iterable[list[int]]:
    chunk: list[int] = []
    total = 0
    for i in members:
        size = padded(requests[i].numel())
        if chunk and total + size > CHUNK_ELEMENTS:
            yield chunk
            chunk, total = [], 0
        chunk.append(i)
        total += size
    if chunk:
        yield chunk


@dataclass
class Table:
    """The parts of the parameters' states that steps need, valid until one is replaced."""

    params: list[Tensor]  # of all groups
    watched: list[object]  # of the groups and optimizer.state, by onepass._C.contents
    has_state: list[bool]  # per parameter
    kinds: list[tuple[str, ...]]  # the moments of each group, and its averages
    layout: Tensor  # (parameters, columns) int64
    buffers: list[Tensor]
    entries: list[list[Tensor]]  # per parameter, those that lie in the buffers
    addresses: list[int]  # of all entries
    layouts: list[tuple]  # of params
    masters: dict[Tensor, dict]  # parameters with a master, and their entries of the state
    are_sharded: bool
    device: torch.device
    local_params: list[Tensor] = field(default_factory=list)  # where there are DTensors
    versions: list[int] = field(default_factory=list)  # of the parameters with a master
    pointers: list[int] = field(default_factory=list)
    # For the parameters that had gradients in the last steps, by their numbers.
    step_tables: dict[Numbers, StepTable] = field(default_factory=dict)

    def step_table(
        self, numbers: Numbers, params: list[Tensor], watched: Numbers
    ) -> StepTable | None:
        """The operator's arguments for these of the parameters; None if one has gaps. A step raises
        if a state of those that are watched has other memory."""
        key = numbers if watched is numbers else (*numbers, watched)
        table = self.step_tables.get(key)
        if table is None and all(map(is_dense, params)):
            held = sum(map(len, self.step_tables)) + len(numbers)
            if held > MAX_STEP_TABLES * len(self.params):
                self.step_tables.clear()
            layout = self.layout[list(numbers)]
            states = [*self.buffers, *(entry for i in watched for entry in self.entries[i])]
            table = self.step_tables[key] = StepTable(params, states, layout)
        return table

    def fits(self, numbers: Numbers, params: list[Tensor]) -> bool:
        """Whether it has the states of these parameters, in their present layouts."""
        has_states = all(map(self.has_state.__getitem__, numbers))
        return has_states and [self.layouts[i] for i in numbers] == layouts_of(params)

    def states_stayed(self) -> bool:
        """Whether all states have the memory that they had when this table was made."""
        return addresses_of(self.entries) == self.addresses


def addresses_of(entries: Iterable[Iterable[Tensor]]) -> list[int]:
    return [entry.data_ptr() for of_one in entries for entry in of_one]


def layout_row(
    number: int,
    group: int,
    states: dict[int, Tensor],
    places: Places,
    buffers: dict[int, tuple[int, Tensor]],
) -> list[int]:
    """A row of a table's layout.

    Args:
        states: of the parameter, by their columns.
        buffers: by id, with their numbers; those that are new are added.
    """
    row = [number, group, *[-1] * (LAYOUT["columns"] - 2)]
    for column, entry in states.items():
        place = places.of(entry)
        row[column], _ = buffers.setdefault(id(place.buffer), (len(buffers), place.buffer))
        row[column + 1] = place.offset
    return row
