"""The rotary family's operators, and the memory order of results."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient, refuse_inplace, require_writable
from onepass._compiling import require_fixed_offsets
from onepass._memory_order import empty_rows, is_bshd
from onepass._ops import tracing
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of, second_derivative
from onepass._ops.differentiation import (
    applied,
    are_transforms_active,
    constant,
    count_change,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.entry import entry
from onepass._ops.norm import default_eps
from onepass._ops.operator import Operator, Raw
from onepass.reference import rotary as reference

_QUERY, _KEY, _QUERY_WEIGHT, _KEY_WEIGHT = 1, 2, 4, 8  # bits of rotary_backward's grad_mask


@entry
def rotary(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary_dim: int | None,
    interleaved: bool,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """query and key, (batch, heads, tokens, head_dim), rotated, each in its own memory order. One
    with a weight is rotated after the RMS norm of its rows."""
    norms = _settled_norms(query, query_weight, key_weight, eps, weight_offset) or _NO_NORMS
    rotary_dim = _settled_dim(cos, rotary_dim)
    orders = is_bshd(query), key is not None and is_bshd(key)
    query_out, key_out = _rotary.run(
        query, key, cos, sin, positions, rotary_dim, interleaved, False, *orders, *norms
    )
    return query_out, None if key is None else key_out


@entry
def rotary_inplace(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary_dim: int | None,
    interleaved: bool,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
) -> None:
    """The same in place: query and key become the results."""
    weights = (query_weight, key_weight)
    norms = _settled_norms(query, *weights, eps, weight_offset)
    tables = (cos, sin, positions, _settled_dim(cos, rotary_dim), interleaved)
    differentiated = is_differentiated(query, key, cos, sin, *weights)
    if differentiated:
        if are_transforms_active():
            refuse_inplace("rotary_embedding", "inside a transform of torch.func")
        has_norms = query_weight is not None or key_weight is not None
        if has_norms and torch.is_grad_enabled():
            # The backward of a norm reads the original rows.
            refuse_inplace("rotary_embedding", "with a weight where a gradient is required")
    if tracing.records() or (
        differentiated
        and (torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level >= 0)
    ):
        # Modes that record calls then see torch's own copy_.
        rotated = rotary(query, key, *tables, *norms)
        for x, output in zip((query, key), rotated, strict=True):
            if x is not None:
                x.copy_(output)
        return
    if not differentiated:
        _inplace.op(query, key, *tables, *norms)
        count_change(query, key)
        return
    # Everything that can fail runs before anything is written.
    _inplace.check(query, key, *tables, *norms)
    wanted = [x is not None and x.requires_grad for x in (query, key)]
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            refuse_gradient("rotary_embedding", name)
    for name, x, is_wanted in zip(("query", "key"), (query, key), wanted, strict=True):
        if is_wanted:
            require_writable("rotary_embedding", name, x)
    with torch.no_grad():
        _inplace.op(query, key, *tables)
    for x, is_wanted in zip((query, key), wanted, strict=True):
        if is_wanted:
            _mark_rotated(x, *tables)
        else:
            count_change(x)


_NO_NORMS = (None, None, None, 0.0)


def _settled_dim(cos: Tensor, rotary_dim: int | None) -> int:
    if rotary_dim is None:
        rotary_dim = cos.shape[-1] if cos.dim() else 0
    return rotary_dim


def _settled_norms(query, query_weight, key_weight, eps, weight_offset) -> tuple:
    """The last options of the operators; empty if all are defaults."""
    has_norms = query_weight is not None or key_weight is not None
    if not has_norms and eps is None and weight_offset == 0.0:
        return ()
    if has_norms and eps is None:
        eps = default_eps(query)
    if torch.compiler.is_compiling():
        eps = None if eps is None else constant(eps)
        weight_offset = constant(weight_offset)
    return query_weight, key_weight, eps, weight_offset


_ABSENT = (None, None, None, None, False)  # a place, gradient, rows, weight, order


class _Rotary(torch.autograd.Function):
    """Without norms a rotation is linear: its backward is the transposed rotation, and so on. The
    first gradient of two takes the place of the query, whichever is given and wanted."""

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        query, key, cos, sin, positions, query_weight, key_weight, ctx.constants = inputs
        needs = ctx.needs_input_grad
        for name, needed in zip(("cos", "sin"), needs[2:4], strict=True):
            if needed:
                refuse_gradient("rotary_embedding", name)
        # Outputs that depend on nothing that is trained.
        constant = [outputs[x] for x in range(2) if not (needs[x] or needs[_WEIGHTS + x])]
        if constant:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            None if query_weight is None else query,
            None if key_weight is None else key,
            query_weight,
            key_weight,
            cos,
            sin,
            positions,
        )

    @staticmethod
    def backward(ctx, dquery, dkey):
        query, key, query_weight, key_weight, *tables = ctx.saved_tensors
        *options, transposed, query_bshd, key_bshd, eps, weight_offset = (*tables, *ctx.constants)
        needs = ctx.needs_input_grad
        gradients = [None] * len(needs)
        given = [
            (place, d, x, weight, order)
            for place, d, x, weight, order in (
                (0, dquery, query, query_weight, query_bshd),
                (1, dkey, key, key_weight, key_bshd),
            )
            if d is not None and (needs[place] or needs[_WEIGHTS + place])
        ]
        if not given:
            return tuple(gradients)
        (_, d, x, weight, order), (_, d2, x2, weight2, order2) = (*given, _ABSENT)[:2]
        if query_weight is None and key_weight is None:
            found = _turned(d, d2, *options, not transposed, order, order2)
        else:
            mask = 0
            for bit, (place, *_) in enumerate(given):
                mask |= _QUERY << bit if needs[place] else 0
                mask |= _QUERY_WEIGHT << bit if needs[_WEIGHTS + place] else 0
            # create_graph=True
            compute = _differentiable_backward if is_differentiated_again() else _backward.op
            arguments = (d, d2, x, x2, *options, order, order2, weight, weight2)
            found = compute(*arguments, eps, weight_offset, mask)
        for at, (place, *_) in enumerate(given):
            gradients[place] = found[at] if needs[place] else None
            if needs[_WEIGHTS + place]:
                gradients[_WEIGHTS + place] = found[2 + at]
        return tuple(gradients)


def _turned(query, key, cos, sin, positions, *constants):
    """The rotation of gradients, in a backward."""
    if is_differentiated_again():  # create_graph=True
        return _rotary.apply(query, key, cos, sin, positions, None, None, (*constants, None, 0.0))
    return _rotary.forward.op(query, key, cos, sin, positions, *constants)


class _RotaryInplace(torch.autograd.Function):
    """Tells autograd of rows that were rotated in place: one tensor at a time, because torch allows
    a function that modifies a view only one result."""

    @staticmethod
    def forward(x, cos, sin, positions, rotary_dim, interleaved):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, cos, sin, positions, *ctx.options = inputs
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def backward(ctx, dx):
        options = (*ctx.options, True, is_bshd(dx), False)
        return _turned(dx, None, *ctx.saved_tensors, *options)[0], *(None,) * 5


def _outputs(query, key, query_bshd, key_bshd):
    return (
        empty_rows(query, query.shape, query.dtype, query_bshd),
        query.new_empty(0) if key is None else empty_rows(key, key.shape, key.dtype, key_bshd),
    )


def _definition(
    query, key, cos, sin, positions, rotary_dim, interleaved, transposed,
    query_weight, key_weight, eps, weight_offset,
):  # fmt: skip
    if transposed:
        return NotImplemented
    wide_query, wide_key, *tables, query_weight, key_weight = wide(
        query, key, cos, sin, query_weight, key_weight
    )
    rotated = reference.rotary_embedding(
        wide_query, wide_key, *tables, interleaved=interleaved, positions=positions,
        rotary_dim=rotary_dim, query_weight=query_weight, key_weight=key_weight, eps=eps,
        weight_offset=weight_offset,
    )  # fmt: skip
    return (
        rotated[0].to(query.dtype),
        query.new_empty(0) if key is None else rotated[1].to(key.dtype),
    )


def _inplace_outputs(query, key):
    rows = {"query": query} if key is None else {"query": query, "key": key}
    require_fixed_offsets("rotary_embedding", **rows)


def _gradients(dquery_out, dkey_out, query_bshd, key_bshd, query_weight, key_weight, grad_mask):
    def rows(d, bshd, bit):
        wanted = d is not None and grad_mask & bit
        return empty_rows(d, d.shape, d.dtype, bshd) if wanted else dquery_out.new_empty(0)

    def weight_gradient(weight, bit):
        like = dquery_out if weight is None else weight
        return like.new_empty(weight.shape if weight is not None and grad_mask & bit else 0)

    return (
        rows(dquery_out, query_bshd, _QUERY),
        rows(dkey_out, key_bshd, _KEY),
        weight_gradient(query_weight, _QUERY_WEIGHT),
        weight_gradient(key_weight, _KEY_WEIGHT),
    )


def _derivative(
    dquery_out, dkey_out, query, key, query_weight, key_weight, *,
    cos, sin, positions, rotary_dim, interleaved, eps, weight_offset,
):  # fmt: skip
    upstream = [d for d in (dquery_out, dkey_out) if d is not None]
    # Without a norm the rows are not needed, and were not saved.
    rows = [
        torch.zeros_like(d, requires_grad=True) if x is None else x
        for d, x in zip((dquery_out, dkey_out), (query, key), strict=True)
        if d is not None
    ]
    outputs = reference.rotary_embedding(
        *(*rows, None)[:2], cos, sin, interleaved=interleaved, positions=positions,
        rotary_dim=rotary_dim, query_weight=query_weight, key_weight=key_weight, eps=eps,
        weight_offset=weight_offset,
    )  # fmt: skip
    outputs = [y.to(d.dtype) for y, d in zip(outputs, upstream, strict=False)]
    *drows, dquery_weight, dkey_weight = gradients_of(
        outputs, [*rows, query_weight, key_weight], upstream
    )
    return *(*drows, None)[:2], dquery_weight, dkey_weight


_rotary = Operator(
    "rotary",
    Raw("rotary_forward", _outputs, _definition),
    _Rotary,
    ("query", "key", "cos", "sin", "query_weight", "key_weight"),
)
_WEIGHTS = _rotary.forward.tensors.index("query_weight")  # key's is the next
_backward = Raw("rotary_backward", _gradients)
_inplace = Raw("rotary_forward_inplace", _inplace_outputs)
_mark_rotated = applied(_RotaryInplace)
_differentiable_backward = second_derivative(
    _backward, _backward.arguments, _backward.results, _derivative
)
