"""The rotary family's op: fake, autograd, and the memory order of results."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient
from onepass._mapping import run_each
from onepass._ops import fake_checks, tracing
from onepass._ops.attention_layout import empty_rows, is_bshd
from onepass._ops.decomposition import decomposes, offer, wide
from onepass._ops.differentiation import applied, is_differentiated
from onepass._ops.dispatch_log import logged
from onepass.reference import rotary as reference

_forward = torch.ops.onepass.rotary_forward.default
_forward_check = torch.ops.onepass.rotary_forward_check.default

run_each(_forward_check)


@logged
def rotary(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary_dim: int | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None]:
    """query and key, (batch, heads, tokens, head_dim), rotated, each in its order in memory."""
    if rotary_dim is None:
        rotary_dim = cos.shape[-1] if cos.dim() else 0
    orders = is_bshd(query), key is not None and is_bshd(key)
    compute = _traced if tracing.records() else _compute
    results = compute(query, key, cos, sin, positions, rotary_dim, interleaved, False, *orders)
    return results[0], None if key is None else results[1]


def _compute(query, key, cos, sin, *options):
    compute = _differentiable if is_differentiated(query, key, cos, sin) else _forward
    return compute(query, key, cos, sin, *options)


class _Rotary(torch.autograd.Function):
    """A rotation is linear: its backward is the transposed one of the gradients, and so on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, cos, sin, *options):
        return _forward(query, key, cos, sin, *options)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        _, _, cos, sin, positions, *ctx.options = inputs
        for name, needed in zip(("cos", "sin"), ctx.needs_input_grad[2:4], strict=True):
            if needed:
                refuse_gradient("rotary_embedding", name)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def backward(ctx, dquery, dkey):
        cos, sin, positions = ctx.saved_tensors
        rotary_dim, interleaved, transposed, *orders = ctx.options
        needed = ctx.needs_input_grad[:2]
        # Those that there are, the first of them in the place of the query.
        given = [
            (gradient, order)
            for gradient, order, need in zip((dquery, dkey), orders, needed, strict=True)
            if need and gradient is not None
        ]
        gradients = [None, None]
        if given:
            first, second = (*given, (None, False))[:2]
            # create_graph=True
            compute = _differentiable if torch.is_grad_enabled() else _forward
            options = (rotary_dim, interleaved, not transposed, first[1], second[1])
            found = iter(compute(first[0], second[0], cos, sin, positions, *options))
            gradients = [
                next(found) if need and gradient is not None else None
                for gradient, need in zip((dquery, dkey), needed, strict=True)
            ]
        return (*gradients, *(None,) * (len(ctx.needs_input_grad) - 2))


_differentiable = applied(_Rotary)


_traced = tracing.operator("rotary", _forward, _compute)


@torch.library.register_fake("onepass::rotary_forward")
def _(query, key, *options):
    offer(_forward)
    fake_checks.check(_forward_check, query, key, *options)
    query_bshd, key_bshd = options[-2:]
    return (
        empty_rows(query, query.shape, query.dtype, query_bshd),
        query.new_empty(0) if key is None else empty_rows(key, key.shape, key.dtype, key_bshd),
    )


@decomposes(_forward)
def _(query, key, cos, sin, positions, rotary_dim, interleaved, transposed, *_orders):
    if transposed:
        return NotImplemented
    options = {"interleaved": interleaved, "positions": positions, "rotary_dim": rotary_dim}
    rotated = reference.rotary_embedding(*wide(query, key, cos, sin), **options)
    return (
        rotated[0].to(query.dtype),
        query.new_empty(0) if key is None else rotated[1].to(key.dtype),
    )
