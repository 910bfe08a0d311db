"""The norm family's modulated operator. One differentiable entry, `modulated_norm`.

A norm after a residual add with a scaled branch uses the same ops, with a single group."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import refuse_gradient
from onepass._ops.autograd import Alike, Partial, differentiable
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of
from onepass._ops.differentiation import constant
from onepass._ops.entry import drawing_entry, entry
from onepass._ops.norm import NormKind, norm_options, outputs
from onepass._random import draw_seed
from onepass.reference import norm as reference
from onepass.reference.dropout import dropped, scaled


@entry
def modulated_norm(
    input: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """(output, residual_out) of a modulated norm; residual_out is empty without a residual.

    The arguments are those of `onepass.functional`.
    """
    return _run((input, scale, shift, residual, gate, None, None), normalized_shape, kind, eps)


@drawing_entry
def scaled_add_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, residual_out) of a norm after a residual add whose branch is scaled.

    The arguments are those of `onepass._ops.norm.norm`, and the scales.
    """
    if row_scale is not None and row_scale.requires_grad:
        refuse_gradient("add_rms_norm" if kind == NormKind.RMS else "add_layer_norm", "row_scale")
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    tensors = (input, weight, bias, residual, column_scale, row_scale, seed)
    options = (weight_offset, dropout_p, residual_dtype, True)
    return _run(tensors, normalized_shape, kind, eps, options)


def _run(tensors, normalized_shape, kind, eps, options=(1.0, 0.0, None, False)):
    """`tensors` are in the operator's order; `options` are its last arguments, from weight_offset
    on, by default their defaults."""
    normalized_shape, eps, out_dtype = norm_options(tensors[0], normalized_shape, kind, eps)
    if torch.compiler.is_compiling():
        options = (constant(options[0]), *options[1:])
    return _modulated_norm.run(
        *tensors[:5], normalized_shape, kind, eps, out_dtype, False, *tensors[5:], *options
    )[:2]


def _definition(
    input, scale, shift, residual, gate, normalized_shape, kind, eps, out_dtype, save_statistics,
    row_scale, seed, weight_offset, dropout_p, residual_dtype,
):  # fmt: skip
    x, residual_out = input, input.new_empty(0)
    if residual is not None:
        branch, above, gate = wide(input, residual, gate)
        branch = dropped(branch, dropout_p, seed)
        residual_out = x = reference.gated_add(branch, above, gate, normalized_shape, row_scale).to(
            residual_dtype or residual.dtype
        )
    x, scale, shift = wide(x, scale, shift)
    y = reference.modulated(x, normalized_shape, scale, shift, eps, kind=kind, offset=weight_offset)
    mean = rstd = x.new_empty(0)
    if save_statistics:
        mean, rstd = reference.statistics(x, normalized_shape, eps, kind=kind)
    return y.to(out_dtype or input.dtype), residual_out, mean, rstd


def _gradients(x, scale, shift, branch, gate, input_dtype, residual_dtype, grad_mask, shared):
    other = x if shared else scale

    def like(bit, of, dtype=None):
        dtype = dtype or (other if of is None else of).dtype
        wanted = grad_mask & bit and of is not None
        return x.new_empty(of.shape if wanted else (0,), dtype=dtype)

    return (
        like(1, x, input_dtype if branch is None else branch.dtype),
        like(2, x, residual_dtype),
        like(4, scale),
        like(8, shift),
        like(16, gate),
    )


def _derivative(
    doutput, dresidual_out, x, scale, shift, branch, gate, *,
    row_scale, seed, normalized_shape, kind, eps, weight_offset, dropout_p,
):  # fmt: skip
    dx, dscale, dshift = dresidual_out, None, None
    if doutput is not None:
        y = reference.modulated(
            x, normalized_shape, scale, shift, eps, kind=kind, offset=weight_offset
        )
        dx, dscale, dshift = gradients_of([y], [x, scale, shift], [doutput])
        dx = dx if dresidual_out is None else dx + dresidual_out
    dbranch = scaled(dropped(dx, dropout_p, seed), row_scale=row_scale)
    if gate is None:
        return dbranch, dx, dscale, dshift, None
    each = reference.for_rows(gate, x, normalized_shape)
    dgate = (dbranch * branch).sum_to_size(each.shape)
    return dbranch * each, dx, dscale, dshift, dgate.reshape(gate.shape)


_modulated_norm = differentiable(
    "modulated_norm",
    outputs,
    _definition,
    _gradients,
    unless=("seed",),
    derivative=_derivative,
    partial={"residual_out": Partial(of=("input", "residual", "gate"), needs="residual")},
    alike=Alike("input", "residual", unless=("gate", "row_scale", "seed")),
    derived={
        "x": lambda input, residual, residual_out: input if residual is None else residual_out,
        "branch": lambda input, gate: None if gate is None else input,
    },
)
