"""Operators on DTensors: each process computes its part, and nothing is gathered that need not be.

A rule (`onepass._dtensor.rules`) names the dimensions of a call's tensors. Along each dimension
of the mesh either one name is split, on all tensors that have it, or nothing is. The choice that
moves the fewest bytes is taken; tensors that have its placements already are not moved.

torch's own registration (`register_sharding`) was not enough: it never moves a tensor that an
operator takes by keyword, knows no list among results, and the backward of dropout has to have the
very placement of its forward.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from onepass._dtensor import plans
from onepass._dtensor.layout import Choice, Layout, Names, Parts
from onepass._dtensor.rules import RULES
from onepass._dtensor.writes import Checked, Doubled, Writes
from onepass._imported import is_async
from onepass._random import adjusted


def run(function: Callable, *args, **kwargs):
    """The call of a family's entry, some of whose tensors are DTensors, the first among them.

    Others are the same on all processes. Results are DTensors.

    Raises:
        RuntimeError: tensors are on different meshes, one that requires a gradient is no DTensor,
            or one that would be written would have to be moved.
    """
    op = function.__name__
    given = _given(function, args, kwargs)
    key = plans.key_of(function, given)
    plan = None if key is None else plans.known.get(key)
    if plan is not None:
        return _planned(plan, function, given)
    layout = RULES[op](given)
    tensors = _tensors(given)
    mesh = _mesh(op, tensors)
    parts = Parts(_sizes(op, layout, tensors))
    chosen = _chosen(op, layout, tensors, mesh, parts)
    if key is not None and _lies_right(layout, tensors, mesh, chosen):
        # As later calls: selective checkpointing counts operators, and finds them by number.
        plan = _plan(layout, tensors, mesh, chosen, parts)
        results = _planned(plan, function, given)
        plans.keep(key, plan)  # only now: a call that is refused has none
        return results
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    writes = Writes.of_call() if is_recorded else None
    for name, tensor in tensors.items():
        names = layout.inputs.get(name, ())
        local = _local(tensor, names, mesh, chosen)
        is_written = name in layout.written or name in layout.overwritten
        if writes is not None and local is not tensor and not is_written:
            double = writes.double(tensor, local)
            local = Doubled.apply(local, [double], writes) if local.requires_grad else double
        if name in layout.overwritten and tensor.requires_grad and torch.is_grad_enabled():
            local = _Overwritten.apply(local, tensor)
        _assign(given, name, local)
    if layout.localize is not None and any(chosen):
        layout.localize(given, parts)
    with adjusted(functools.partial(_of_part, mesh, chosen)):
        results = _called(layout.compute or function, function, given)
    to_whole = functools.partial(
        _wrapped, mesh=mesh, chosen=chosen, summed=layout.summed, parts=parts, writes=writes
    )
    wrapped = [
        result if result is None else to_whole(result, names)
        for result, names in zip(_listed(results), layout.outputs, strict=True)
    ]
    if layout.finish is not None:
        return layout.finish(*wrapped)
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0] if wrapped else None


def _planned(plan: plans.Plan, function: Callable, given: dict[str, object]):
    """The call of an entry whose plan is known."""
    call = plan.localize(given)
    with adjusted(plan.adjust):
        results = _called(function, function, given)
    if isinstance(results, tuple):
        return tuple(x if x is None else plan.whole(i, x, call) for i, x in enumerate(results))
    return None if results is None else plan.whole(0, results, call)


def _lies_right(
    layout: Layout, tensors: Mapping[str, Tensor], mesh: DeviceMesh, chosen: list[Choice]
) -> bool:
    """Whether the entry itself computes parts as they lie."""
    if layout.finish is not None or layout.overwritten:
        return False
    if layout.special is None and (layout.localize is not None or layout.compute is not None):
        return False
    if any(name in (layout.special or ()) for choice in chosen for name in choice):
        return False
    if mesh.get_coordinate() is None:
        return False
    for name, tensor in tensors.items():
        wanted = tuple(_placement(layout.inputs.get(name, ()), choice) for choice in chosen)
        if isinstance(tensor, DTensor):
            if tensor.device_mesh is not mesh or tensor.placements != wanted:
                return False
        elif not all(placement.is_replicate() for placement in wanted):
            return False
    return True


def _plan(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    mesh: DeviceMesh,
    chosen: list[Choice],
    parts: Parts,
) -> plans.Plan:
    wholes: dict[str | int, tuple] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            placements = _gradients(layout.inputs.get(name, ()), chosen)
            wholes[name] = tuple(placements), tuple(tensor.shape)
    gradients = list(wholes)
    for number, names in enumerate(layout.outputs):
        sizes = tuple(None if name is None else parts.sizes.get(name) for name in names)
        wholes[number] = tuple(_of_result(names, chosen, layout.summed)), sizes
    adjust = functools.partial(_of_part, mesh, chosen)
    return plans.Plan(mesh, gradients, wholes, layout.written, adjust)


def same_on_all(drawn: Tensor, like: DTensor) -> DTensor:
    """The numbers that the first process of like's mesh has drawn, whole on each."""
    mesh = like.device_mesh
    return distribute_tensor(drawn, mesh, [Replicate()] * mesh.ndim)


_NEEDED = inspect.Parameter.empty


def _given(function: Callable, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments by name, as `inspect.Signature.bind` gives them, which takes ten times as long.
    `options` are a dict of their own."""
    positional, defaults = function.parameters
    given = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
    is_missing = any(value is _NEEDED for value in given.values())
    is_twice = any(name in kwargs for name in positional[: len(args)])
    if is_missing or is_twice or len(args) > len(positional) or len(given) > len(defaults):
        inspect.signature(function).bind(*args, **kwargs)  # says what is wrong
    if "options" in given:
        given["options"] = dict(given["options"])
    return given


def _called(compute: Callable, function: Callable, given: dict[str, object]):
    """compute, which has the parameters of function."""
    positional, _ = function.parameters
    keywords = {name: value for name, value in given.items() if name not in positional}
    return compute(*(given[name] for name in positional), **keywords)


def _listed(results) -> Sequence[Tensor | None]:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def _tensors(given: Mapping[str, object]) -> dict[str, Tensor]:
    """Tensors by name, those among an entry's options too."""
    everything = {**given, **given.get("options", {})}
    return {name: value for name, value in everything.items() if isinstance(value, Tensor)}


def _assign(given: dict, name: str, tensor: Tensor) -> None:
    (given if name in given else given["options"])[name] = tensor


def _mesh(op: str, tensors: Mapping[str, Tensor]) -> DeviceMesh:
    mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != mesh:
                raise RuntimeError(
                    f"{op}: {name} must be on the mesh {mesh}, got {tensor.device_mesh}"
                )
        elif tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{op}: {name} must be a DTensor beside others to get a gradient, got a "
                f"{type(tensor).__name__}"
            )
    return mesh


def _sizes(op: str, layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Global size of each named dimension; parts alone could not show that tensors disagree."""
    sizes: dict[str, int] = {}
    for name, names in layout.inputs.items():
        if name not in tensors:
            continue
        for dim, (label, size) in enumerate(zip(names, tensors[name].shape, strict=False)):
            if label is not None and sizes.setdefault(label, size) != size:
                raise RuntimeError(
                    f"{op}: {name} must have size {sizes[label]} in dimension {dim}, got {size}"
                )
    return sizes


# ---- the choice ----------------------------------------------------------------------------------


def _chosen(
    op: str, layout: Layout, tensors: Mapping[str, Tensor], mesh: DeviceMesh, parts: Parts
) -> list[Choice]:
    """Choice for each dimension of the mesh; `parts` are made by it."""
    chosen = []
    for mesh_dim in range(mesh.ndim):
        count = mesh.size(mesh_dim)
        open_choices = [
            choice
            for choice in ((), *layout.choices)
            if all(_fits(name, layout, parts, count) for name in choice)
        ]
        costs = []
        for choice in open_choices:
            costs.append(_cost(layout, tensors, mesh, mesh_dim, choice))
            if not costs[-1]:  # no other is better
                break
        least = min(costs)
        if least == math.inf:
            names = " and ".join(sorted(layout.written))
            raise RuntimeError(
                f"{op}: {names} must be placed alike, by whole heads or sequences, to be written, "
                f"got {', '.join(_placements(tensors[n], mesh) for n in sorted(layout.written))}"
            )
        choice = open_choices[costs.index(least)]
        for name in choice:
            parts.split(name, mesh, mesh_dim)
        chosen.append(choice)
    return chosen


def _placements(tensor: Tensor, mesh: DeviceMesh) -> str:
    return str(tensor.placements if isinstance(tensor, DTensor) else (Replicate(),) * mesh.ndim)


def _fits(name: str, layout: Layout, parts: Parts, count: int) -> bool:
    if name not in parts.sizes:
        return False
    return layout.even.get(name, 0) % (parts.count(name) * count) == 0


def _cost(
    layout: Layout, tensors: Mapping[str, Tensor], mesh: DeviceMesh, mesh_dim: int, choice: Choice
) -> float:
    """Bytes that a process receives, for its choice along one dimension of the mesh."""
    cost, count = 0.0, mesh.size(mesh_dim)
    for name, tensor in tensors.items():
        now = tensor.placements[mesh_dim] if isinstance(tensor, DTensor) else Replicate()
        then = _placement(layout.inputs.get(name, ()), choice)
        if now == then:
            continue
        if name in layout.written:
            return math.inf
        whole = tensor.numel() * tensor.element_size() * (count - 1) / count
        cost += 1e-3  # of two that move no bytes, the one that leaves tensors where they are
        if now.is_replicate():  # its gradient is gathered
            cost += whole / 2 if tensor.requires_grad else 0.0
        elif now.is_partial():
            cost += whole if then.is_shard() else 2 * whole
        else:  # torch exchanges shards on a CPU by a gather
            exchanged = mesh.device_type != "cpu" and then.is_shard()
            cost += whole / count if exchanged else whole
    return cost


def _placement(names: Names, choice: Choice) -> Placement:
    for dim, name in enumerate(names):
        if name in choice:
            return Shard(dim)
    return Replicate()


# ---- to parts and back ---------------------------------------------------------------------------


def _local(tensor: Tensor, names: Names, mesh: DeviceMesh, chosen: list[Choice]) -> Tensor:
    """This process's part; its gradient is a part of a sum where others compute with it too."""
    wanted = [_placement(names, choice) for choice in chosen]
    if not isinstance(tensor, DTensor):
        if all(placement.is_replicate() for placement in wanted):
            return tensor
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if list(tensor.placements) != wanted:
        tensor = tensor.redistribute(mesh, wanted)
    local = tensor.to_local(grad_placements=_gradients(names, chosen))
    return _Waited.apply(local) if is_async(local) else local


def _gradients(names: Names, chosen: list[Choice]) -> list[Placement]:
    """Placements of a part's gradient."""
    wanted = [_placement(names, choice) for choice in chosen]
    return [
        Partial() if choice and placement.is_replicate() else placement
        for choice, placement in zip(chosen, wanted, strict=True)
    ]


def _of_result(names: Names, chosen: list[Choice], summed: frozenset[str]) -> list[Placement]:
    placements = []
    for choice in chosen:
        placement = _placement(names, choice)
        if placement.is_replicate() and not summed.isdisjoint(choice):
            placement = Partial()
        placements.append(placement)
    return placements


class _Waited(torch.autograd.Function):
    """The result of a collective on its way; its own `wait` would lose the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.wait().detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Overwritten(torch.autograd.Function):
    """This process's part of a tensor over which the backward writes. Autograd counts a DTensor's
    writes apart from those of its part, and is told of this one."""

    @staticmethod
    def forward(ctx, local, tensor):
        ctx.save_for_backward(tensor)
        return local.detach()

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.graph.increment_version(ctx.saved_tensors)
        return gradient, None


def _wrapped(
    result: Tensor,
    names: Names,
    mesh: DeviceMesh,
    chosen: list[Choice],
    summed: frozenset[str],
    parts: Parts,
    writes: Writes | None,
) -> DTensor:
    local = result if writes is None else Checked.apply(result, writes)
    shape = torch.Size(
        size if name is None else parts.sizes.get(name, size)
        for name, size in zip(names, result.shape, strict=True)
    )
    whole = DTensor.from_local(
        local,
        mesh,
        _of_result(names, chosen, summed),
        run_check=False,
        shape=shape,
        stride=plans.stride_of(shape, result),
    )
    if writes is not None:
        writes.watch(whole, result)
    return whole


def _of_part(mesh: DeviceMesh, chosen: list[Choice], seed: Tensor) -> Tensor:
    """One seed for all that compute the same, and a stream of its own for each part."""
    part = 0
    for mesh_dim, choice in enumerate(chosen):
        if choice:
            part = part * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
        elif mesh.size(mesh_dim) > 1:
            group = mesh.get_group(mesh_dim)
            if torch.compiler.is_compiling():
                # Its `src` is a place in the group, not a rank of all processes.
                seed = collectives.wait_tensor(collectives.broadcast(seed, 0, group))
            else:
                dist.broadcast(seed, group=group, group_src=0)
    return seed + torch.tensor([0, part], device=seed.device) if part else seed
