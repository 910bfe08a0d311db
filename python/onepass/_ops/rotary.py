"""The rotary family's operators, and the memory order of results."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient, refuse_inplace, require_writable
from onepass._compiling import require_fixed_offsets
from onepass._mapping import refuse_mapped
from onepass._negative import refuse_where_written
from onepass._ops import tracing
from onepass._ops.attention_layout import empty_rows, is_bshd
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of, second_derivative
from onepass._ops.differentiation import (
    applied,
    are_transforms_active,
    constant,
    is_differentiated,
    is_differentiated_again,
)
from onepass._ops.dispatch_log import logged
from onepass._ops.norm import default_eps
from onepass._ops.operator import Raw
from onepass._ops.placement import placed
from onepass.reference import rotary as reference

# Bits of rotary_backward's grad_mask.
_QUERY, _KEY, _QUERY_WEIGHT, _KEY_WEIGHT = 1, 2, 4, 8


@logged
@placed
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
    norms = _settled_norms(query, query_weight, key_weight, eps, weight_offset)
    rotary_dim = _settled_dim(cos, rotary_dim)
    orders = is_bshd(query), key is not None and is_bshd(key)
    arguments = (query, key, cos, sin, positions, rotary_dim, interleaved, False, *orders, *norms)
    compute = _traced if tracing.records() else _compute
    results = compute(*arguments)
    return results[0], None if key is None else results[1]


@logged
@placed
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
    if tracing.records() or (differentiated and not _is_eager()):
        # Modes that record calls then see torch's own copy_.
        rotated = rotary(query, key, *tables, *norms)
        for x, output in zip((query, key), rotated, strict=True):
            if x is not None:
                x.copy_(output)
        return
    if not differentiated:
        _inplace(query, key, *tables, *norms)
        if not torch.compiler.is_compiling():  # a compiler does it by itself
            _count_change(query, key)
        return
    # Everything that can fail runs before anything is written.
    _inplace_check(query, key, *tables, *norms)
    wanted = [x is not None and x.requires_grad for x in (query, key)]
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            refuse_gradient("rotary_embedding", name)
    for name, x, is_wanted in zip(("query", "key"), (query, key), wanted, strict=True):
        if is_wanted:
            require_writable("rotary_embedding", name, x)
    with torch.no_grad():
        _inplace(query, key, *tables)
    for x, is_wanted in zip((query, key), wanted, strict=True):
        if is_wanted:
            _mark_rotated(x, *tables)
        else:
            _count_change(x)


def _settled_dim(cos: Tensor, rotary_dim: int | None) -> int:
    if rotary_dim is not None:
        return rotary_dim
    return cos.shape[-1] if cos.dim() else 0


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


def _is_eager() -> bool:
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level < 0


def _count_change(*tensors: Tensor | None) -> None:
    for x in tensors:
        if x is not None and not x.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(x)


def _compute(
    query, key, cos, sin, positions, rotary_dim, interleaved, transposed, query_bshd, key_bshd,
    query_weight=None, key_weight=None, eps=None, weight_offset=0.0,  # torch omits default ones
):  # fmt: skip
    plain = (positions, rotary_dim, interleaved, transposed, query_bshd, key_bshd)
    norms = (query_weight, key_weight, eps, weight_offset)
    if not is_differentiated(query, key, cos, sin, query_weight, key_weight):
        return _forward(query, key, cos, sin, *plain, *norms)
    if query_weight is None and key_weight is None and eps is None and weight_offset == 0.0:
        return _differentiable(query, key, cos, sin, *plain)
    constants = (rotary_dim, interleaved, query_bshd, key_bshd, eps, weight_offset)
    return _normed(query, key, query_weight, key_weight, cos, sin, positions, constants)


def _mark_constant(ctx, outputs, needed) -> None:
    """Tells autograd of outputs that depend on nothing that is trained."""
    constant = [output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed]
    if constant:
        ctx.mark_non_differentiable(*constant)


class _Rotary(torch.autograd.Function):
    """A rotation is linear: its backward is the transposed rotation, and so on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, cos, sin, *options):
        return _forward(query, key, cos, sin, *options)

    @staticmethod
    def formula(query, key, cos, sin, *options):
        return _operator.definition(query, key, cos, sin, *options)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        _, _, cos, sin, positions, *ctx.options = inputs
        for name, needed in zip(("cos", "sin"), ctx.needs_input_grad[2:4], strict=True):
            if needed:
                refuse_gradient("rotary_embedding", name)
        _mark_constant(ctx, outputs, ctx.needs_input_grad[:2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def backward(ctx, dquery, dkey):
        cos, sin, positions = ctx.saved_tensors
        rotary_dim, interleaved, transposed, *orders = ctx.options
        needed = ctx.needs_input_grad[:2]
        # Gradients that are given and wanted; the first takes the place of the query.
        given = [
            (gradient, order)
            for gradient, order, need in zip((dquery, dkey), orders, needed, strict=True)
            if need and gradient is not None
        ]
        gradients = [None, None]
        if given:
            first, second = (*given, (None, False))[:2]
            # create_graph=True
            compute = _differentiable if is_differentiated_again() else _forward
            options = (rotary_dim, interleaved, not transposed, first[1], second[1])
            found = iter(compute(first[0], second[0], cos, sin, positions, *options))
            gradients = [
                next(found) if need and gradient is not None else None
                for gradient, need in zip((dquery, dkey), needed, strict=True)
            ]
        return (*gradients, *(None,) * (len(ctx.needs_input_grad) - 2))


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
        # create_graph=True
        compute = _differentiable if is_differentiated_again() else _forward
        options = (*ctx.options, True, is_bshd(dx), False)
        cos, sin, positions = ctx.saved_tensors
        return compute(dx, None, cos, sin, positions, *options)[0], *(None,) * 5


def _normed_arguments(query, key, query_weight, key_weight, cos, sin, positions, constants):
    """The arguments in the operator's order."""
    rotary_dim, interleaved, *orders, eps, weight_offset = constants
    options = (positions, rotary_dim, interleaved, False, *orders)
    return query, key, cos, sin, *options, query_weight, key_weight, eps, weight_offset


class _NormedRotary(torch.autograd.Function):
    """A rotation of query and key after the norm of one, or of both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, query_weight, key_weight, cos, sin, positions, constants):
        return _forward(
            *_normed_arguments(query, key, query_weight, key_weight, cos, sin, positions, constants)
        )

    @staticmethod
    def formula(*arguments):
        return _operator.definition(*_normed_arguments(*arguments))

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        query, key, query_weight, key_weight, cos, sin, positions, ctx.constants = inputs
        for name, needed in zip(("cos", "sin"), ctx.needs_input_grad[4:6], strict=True):
            if needed:
                refuse_gradient("rotary_embedding", name)
        of_query, of_key, of_query_weight, of_key_weight = ctx.needs_input_grad[:4]
        _mark_constant(ctx, outputs, (of_query or of_query_weight, of_key or of_key_weight))
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
        rotary_dim, interleaved, query_bshd, key_bshd, eps, weight_offset = ctx.constants
        needs = ctx.needs_input_grad
        # Gradients that are given and wanted; the first takes the place of the query.
        given = [
            (number, gradient, x, weight, order)
            for number, gradient, x, weight, order in (
                (0, dquery, query, query_weight, query_bshd),
                (1, dkey, key, key_weight, key_bshd),
            )
            if gradient is not None and (needs[number] or needs[2 + number])
        ]
        gradients = [None] * len(needs)
        if not given:
            return tuple(gradients)
        first, second = (*given, (None, None, None, None, False))[:2]
        mask = 0
        for (number, *_), bits in zip(
            given, ((_QUERY, _QUERY_WEIGHT), (_KEY, _KEY_WEIGHT)), strict=False
        ):
            mask |= (bits[0] if needs[number] else 0) | (bits[1] if needs[2 + number] else 0)
        arguments = (first[1], second[1], first[2], second[2], *tables, rotary_dim, interleaved)
        arguments += (first[4], second[4], first[3], second[3], eps, weight_offset, mask)
        # create_graph=True
        compute = _differentiable_backward if is_differentiated_again() else _backward
        found = compute(*arguments)
        for place, (number, *_) in enumerate(given):
            gradients[number] = found[place] if needs[number] else None
            gradients[2 + number] = found[2 + place] if needs[2 + number] else None
        return tuple(gradients)


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


_operator = Raw("rotary_forward", _outputs, _definition)
_operator_backward = Raw("rotary_backward", _gradients)
_operator_inplace = Raw("rotary_forward_inplace", _inplace_outputs)
_forward, _backward, _inplace = _operator.op, _operator_backward.op, _operator_inplace.op
_inplace_check = _operator_inplace.check
refuse_mapped(_inplace)
refuse_where_written(_inplace)

_differentiable = applied(_Rotary)
_mark_rotated = applied(_RotaryInplace)
_normed = applied(_NormedRotary)
_differentiable_backward = second_derivative(_operator_backward, _derivative)
_traced = tracing.operator("rotary", _forward, _compute)
