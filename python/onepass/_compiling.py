"""What torch's compiler cannot do yet with tensors that an operator writes."""

from __future__ import annotations

import torch
from torch import Tensor


def require_fixed_offsets(op: str, **tensors: Tensor) -> None:
    """Of fake tensors that are to be written: inductor has no code for where a view begins if that
    depends on a dynamic size, and writes to the beginning of what it is a view of
    (https://github.com/pytorch/pytorch/issues/198068).

    An input of the graph may begin anywhere, unless it shares its memory with another one.

    Raises:
        RuntimeError: it would be lost. Without `fullgraph=True` torch then runs the call in eager.
    """
    memories = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    shared = len(memories) < len(tensors)
    for name, tensor in tensors.items():
        offset = tensor.storage_offset()
        if not isinstance(offset, torch.SymInt) or offset.node.maybe_as_int() is not None:
            continue
        of_input = offset.node.expr.is_Symbol  # not computed from sizes
        if (of_input and not shared) or _keeps_offsets():
            continue
        raise RuntimeError(
            f"{op}: {name} must begin at an offset without dynamic sizes under torch.compile, "
            f"which would lose it: take views of a larger tensor outside, or make its sizes "
            f"static, got a view that begins at {offset}"
        )


def _keeps_offsets() -> bool:
    from torch._inductor.lowering import fallbacks, lowerings

    # What it has no code for it takes for an operator to be called, and notes both.
    offset_of = torch.ops.aten.sym_storage_offset.default
    return offset_of in lowerings and offset_of not in fallbacks
