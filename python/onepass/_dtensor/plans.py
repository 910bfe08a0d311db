"""Cache of resolved calls on DTensors: the next such call chooses and compares nothing.

A plan is kept where every tensor lies right already and the entry itself computes the parts, so
that nothing but shapes, dtypes, placements and options was looked at. All of these are in its key.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from onepass._dtensor.writes import Writes, checked_again

MOST = 1024  # plans; then the cache starts anew
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LOCAL = frozenset((Tensor, torch.nn.Parameter))


@dataclass(slots=True)
class Call:
    """State that one call leaves for its backward.

    Attributes:
        handed: the gradients of its results; filled by the backward of `Plan.whole`.
        writes: to its tensors; None where these are not watched.
    """

    handed: list[DTensor]
    writes: Writes | None

    def double(self, result: Tensor) -> Tensor:
        """Alias for the DTensor of a result that has no gradient."""
        return result if self.writes is None else result.data


@dataclass(slots=True)
class Plan:
    """How to run a call.

    Attributes:
        gradients: names of the arguments that are DTensors.
        wholes: of each gradient by its name, and of each result by its number: the placements, and
            of each dimension the size of the whole, None where it is that of the part.
        written: those of `gradients` that the call writes.
        adjust: of `onepass._random.adjusted`, the call's seeds.
    """

    mesh: DeviceMesh
    gradients: list[str]
    wholes: Mapping[str | int, tuple[tuple[Placement, ...], tuple[int | None, ...]]]
    written: frozenset[str]
    adjust: Callable[[Tensor], Tensor]
    specs: dict[tuple, DTensorSpec] = field(default_factory=dict)

    def localize(self, given: dict[str, object]) -> Call:
        """Puts this process's parts in the place of DTensors, among an entry's options too."""
        holders = {n: given if n in given else given["options"] for n in self.gradients}
        tensors = {name: holder[name] for name, holder in holders.items()}
        is_recorded = torch.is_grad_enabled()
        recorded = [name for name, x in tensors.items() if is_recorded and x.requires_grad]
        call = Call([], Writes.of_call() if recorded else None)
        parts = {name: x._local_tensor for name, x in tensors.items()}
        for name, x in tensors.items():
            if call.writes is not None and name not in self.written:
                parts[name] = call.writes.double(x, parts[name])
        if recorded:
            plain = [parts[name] for name in recorded]
            wholes = (tensors[name] for name in recorded)
            attached = _Parts.apply(self, recorded, call, plain, *wholes)
            parts.update(zip(recorded, attached, strict=True))
        for name, part in parts.items():
            holders[name][name] = part
        return call

    def whole(self, number: int, result: Tensor, call: Call) -> DTensor:
        """The DTensor of a result."""
        spec = self.spec(number, result)
        if result.requires_grad:
            whole = _Whole.apply(result, spec, call)
        else:
            whole = DTensor(call.double(result), spec, requires_grad=False)
        if call.writes is not None:
            call.writes.watch(whole, result)
        return whole

    def spec(self, of: str | int, part: Tensor) -> DTensorSpec:
        """Specification of the gradient or result that has this part."""
        key = (of, part.shape, part.stride(), part.dtype)
        spec = self.specs.get(key)
        if spec is None:
            placements, sizes = self.wholes[of]
            shape = torch.Size(
                mine if of_whole is None else of_whole
                for of_whole, mine in zip(sizes, part.shape, strict=True)
            )
            meta = TensorMeta(shape, stride_of(shape, part), part.dtype)
            if len(self.specs) >= MOST:
                self.specs.clear()
            spec = self.specs[key] = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return spec


known: dict[tuple, Plan] = {}


def keep(key: tuple, plan: Plan) -> None:
    if len(known) >= MOST:
        known.clear()
    known[key] = plan


def key_of(function: Callable, given: Mapping[str, object]) -> tuple | None:
    """All that a plan depends on. None: a call that has no plan, as of other classes of tensors, or
    while it is compiled.

    A mesh is the very object: an equal one may have other process groups. A plan holds it, so that
    no other object gets its id.
    """
    if torch.compiler.is_compiling():
        return None
    key: list[object] = [function, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    return tuple(key) if _describe(given.values(), key) else None


def _describe(values, key: list) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            key.append(kind)  # 1, 1.0 and True are equal
            key.append(value)
        elif kind is DTensor:
            part, spec = value._local_tensor, value._spec
            if type(part) not in _LOCAL:  # on its way, or of a mode
                return False
            key += (
                id(spec.mesh),
                spec.placements,
                value.shape,
                value.stride(),
                value.dtype,
                value.requires_grad,
                part.shape,
                part.device,
            )
        elif kind in _LOCAL:
            key += (kind, value.shape, value.stride(), value.dtype, value.requires_grad)
            key.append(value.device)
        elif kind is dict:  # options
            key += (kind, *value)
            if not _describe(value.values(), key):
                return False
        elif kind is list or kind is tuple or kind is torch.Size:
            key += (kind, len(value))
            if not _describe(value, key):
                return False
        else:
            return False
    return True


def stride_of(shape: torch.Size, part: Tensor) -> tuple[int, ...]:
    """Strides of a global tensor, in the memory order of a part's dimensions."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (part.stride(dim), -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


class _Parts(torch.autograd.Function):
    """`DTensor.to_local(grad_placements=...)` of those that require gradients, with what is known
    of these.

    A gradient of a result that comes back as it was is the same DTensor, and so are equal gradients
    of two tensors: autograd adds to a `.grad` in place if nothing else holds it, and counts the
    holders of DTensors, not of their parts.
    """

    @staticmethod
    def forward(ctx, plan, names, call, parts, *tensors):
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.names, ctx.call = plan, names, call
        return tuple(
            part.view_as(part) if part is x._local_tensor else part  # a double is no input
            for part, x in zip(parts, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx, *gradients):
        found, wholes = [], list(ctx.call.handed)
        ctx.call.handed.clear()
        for name, gradient in zip(ctx.names, gradients, strict=True):
            if gradient is None:
                found.append(None)
                continue
            spec = ctx.plan.spec(name, gradient)
            if torch.is_grad_enabled() or type(gradient) is not Tensor:
                gradient = checked_again(gradient, ctx.call.writes)
                given = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
                found.append(DTensor.from_local(gradient, spec.mesh, spec.placements, **given))
                continue
            whole = next((x for x in wholes if _is_of(x, gradient, spec)), None)
            if whole is None:
                whole = DTensor(gradient, spec, requires_grad=False)
                wholes.append(whole)
            found.append(whole)
        return None, None, None, None, *found


def _is_of(whole: DTensor, part: Tensor, spec: DTensorSpec) -> bool:
    same = whole._local_tensor is part
    return same and whole.placements == spec.placements and whole.shape == spec.shape


class _Whole(torch.autograd.Function):
    """`DTensor.from_local`, with its specification."""

    @staticmethod
    def forward(ctx, part, spec, call):
        ctx.set_materialize_grads(False)
        ctx.placements = tuple(
            Replicate() if placement.is_partial() else placement for placement in spec.placements
        )
        ctx.call = call
        local = part.view_as(part) if call.writes is None else part.data
        return DTensor(local, spec, requires_grad=part.requires_grad)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.call.writes is not None:
            ctx.call.writes.check()
        if gradient is None:
            return None, None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        elif not torch.is_grad_enabled() and type(gradient._local_tensor) is Tensor:
            ctx.call.handed.append(gradient)
            return gradient._local_tensor, None, None
        return gradient.to_local(), None, None
