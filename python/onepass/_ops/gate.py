"""The gate family's ops: fakes, autograd."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onepass._mapping import run_each
from onepass._memory_order import in_memory_order, like
from onepass._ops import double_backward, fake_checks, tracing
from onepass._ops.decomposition import FORMULAS, decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated, is_differentiated_again
from onepass._ops.dispatch_log import logged
from onepass._ops.placement import placed
from onepass.reference import gate as reference

_forward = torch.ops.onepass.gate_forward.default
_forward_check = torch.ops.onepass.gate_forward_check.default
_backward = torch.ops.onepass.gate_backward.default
_backward_check = torch.ops.onepass.gate_backward_check.default

for _check in (_forward_check, _backward_check):
    run_each(_check)

_NAMES = tuple(reference.ACTIVATIONS)
KINDS = {name: number for number, name in enumerate(_NAMES, 1)}  # of csrc/core/activation.h


@logged
@placed
def gated_activation(gate: Tensor, up: Tensor | None, kind: int, gate_last: bool) -> Tensor:
    """activation(gate) * up; without up, gate holds both."""
    compute = _traced if tracing.records() else _compute
    if gate.is_contiguous() and (up is None or up.is_contiguous()):
        return compute(gate, up, kind, gate_last)
    if up is None and gate.dim() and not gate.shape[-1] % 2 and gate.stride(-1) != 1:
        gate, up = gate.chunk(2, -1)[:: -1 if gate_last else 1]  # not neighbours in memory
        gate_last = False
    if up is None:
        return in_memory_order(lambda g: compute(g, None, kind, gate_last), gate)
    return in_memory_order(lambda g, u: compute(g, u, kind, gate_last), gate, up)


def _compute(gate, up, kind, gate_last):
    compute = _apply_gate if is_differentiated(gate, up) else _forward
    return compute(gate, up, kind, gate_last)


class _Gate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate, up, kind, gate_last):
        return _forward(gate, up, kind, gate_last)

    @staticmethod
    def formula(gate, up, kind, gate_last):
        return FORMULAS[_forward](gate, up, kind, gate_last)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, up, ctx.kind, ctx.gate_last = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx, doutput):
        # The first with create_graph=True.
        compute = _apply_backward if is_differentiated_again() else _backward
        gate, up = ctx.saved_tensors
        wants_gate, wants_up = ctx.needs_input_grad[:2]
        grad_mask = wants_gate + 2 * wants_up
        dgate, dup = compute(doutput, gate, up, ctx.kind, ctx.gate_last, grad_mask)
        if not wants_gate:
            dgate = None
        elif up is not None:
            dgate = like(dgate, doutput)
        return dgate, like(dup, doutput) if wants_up else None, None, None


class _GateBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(doutput, gate, up, kind, gate_last, grad_mask):
        return _backward(doutput, gate, up, kind, gate_last, grad_mask)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.set_materialize_grads(False)
        doutput, gate, up, ctx.kind, ctx.gate_last, _ = inputs
        ctx.save_for_backward(doutput, gate, up)

    @staticmethod
    def backward(ctx, *second):
        name = _NAMES[ctx.kind - 1]
        gradients = double_backward.vjp(
            functools.partial(
                reference.gated_activation_backward, activation=name, gate_last=ctx.gate_last
            ),
            ctx.saved_tensors,
            second,
        )
        return *gradients, None, None, None


_apply_gate = applied(_Gate)
_apply_backward = applied(_GateBackward)
_traced = tracing.operator("gate", _forward, _compute)


@torch.library.register_fake("onepass::gate_forward")
def _(gate, up, activation_kind, gate_last):
    offer(_forward)
    fake_checks.check(_forward_check, gate, up, activation_kind, gate_last)
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@torch.library.register_fake("onepass::gate_backward")
def _(doutput, gate, up, activation_kind, gate_last, grad_mask):
    fake_checks.check(_backward_check, doutput, gate, up, activation_kind, gate_last, grad_mask)
    wants_gate, wants_up = up is None or grad_mask & 1, up is not None and grad_mask & 2
    dup = gate if up is None else up
    return (
        gate.new_empty(gate.shape if wants_gate else (0,)),
        dup.new_empty(dup.shape if wants_up else (0,)),
    )


@decomposes(_forward)
def _(gate, up, activation_kind, gate_last):
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    activation = _NAMES[activation_kind - 1]
    return reference.gated_activation(*wide(gate, up), activation, gate_last).to(dtype)
