"""The gate family's operator."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._memory_order import in_memory_order, like
from onepass._ops.autograd import differentiable
from onepass._ops.decomposition import wide
from onepass._ops.entry import entry
from onepass.reference import gate as reference

_NAMES = tuple(reference.ACTIVATIONS)
KINDS = {name: number for number, name in enumerate(_NAMES, 1)}  # of csrc/core/activation.h


@entry
def gated_activation(gate: Tensor, up: Tensor | None, kind: int, gate_last: bool) -> Tensor:
    """activation(gate) * up; without up, gate holds both."""
    compute = _gate.run
    if gate.is_contiguous() and (up is None or up.is_contiguous()):
        return compute(gate, up, kind, gate_last)
    if up is None and gate.dim() and not gate.shape[-1] % 2 and gate.stride(-1) != 1:
        gate, up = gate.chunk(2, -1)[:: -1 if gate_last else 1]  # not neighbours in memory
        gate_last = False
    if up is None:
        return in_memory_order(lambda g: compute(g, None, kind, gate_last), gate)
    return in_memory_order(lambda g, u: compute(g, u, kind, gate_last), gate, up)


def _outputs(gate, up):
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _definition(gate, up, activation_kind, gate_last):
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    activation = _NAMES[activation_kind - 1]
    return reference.gated_activation(*wide(gate, up), activation, gate_last).to(dtype)


def _gradients(gate, up, grad_mask):
    wants_gate, wants_up = up is None or grad_mask & 1, up is not None and grad_mask & 2
    dup = gate if up is None else up
    return (
        gate.new_empty(gate.shape if wants_gate else (0,)),
        dup.new_empty(dup.shape if wants_up else (0,)),
    )


_gate = differentiable(
    "gate",
    _outputs,
    _definition,
    _gradients,
    finished={
        "gate": lambda dgate, doutput, up: dgate if up is None else like(dgate, doutput),
        "up": lambda dup, doutput: like(dup, doutput),
    },
)
