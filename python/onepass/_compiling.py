"""What torch's compiler cannot do yet with tensors that an operator writes."""

from __future__ import annotations

import torch
from torch import Tensor


def require_fixed_offset(op: str, name: str, tensor: Tensor) -> None:
    """Of a fake tensor that is to be written: inductor has no code for where a view begins if that
    depends on a dynamic size, and writes to the beginning of what it is a view of
    (https://github.com/pytorch/pytorch/issues/198068).

    Raises:
        RuntimeError: it would be lost. Without `fullgraph=True` torch then runs the call in eager.
    """
    offset = tensor.storage_offset()
    if not isinstance(offset, torch.SymInt) or offset.node.maybe_as_int() is not None:
        return
    if offset.node.expr.is_Symbol:  # not computed from sizes: of an input of the graph
        return
    from torch._inductor.lowering import lowerings

    if torch.ops.aten.sym_storage_offset.default not in lowerings:
        raise RuntimeError(
            f"{op}: {name} must begin at an offset without dynamic sizes under torch.compile, which "
            f"would lose it: take views of a larger tensor outside, or make its sizes static, got a "
            f"view that begins at {offset}"
        )
