"""The norm family's operator. One differentiable entry, `norm`."""

from __future__ import annotations

import enum
import functools

import torch
from torch import Tensor

from onepass._ops import tracing
from onepass._ops.autograd import Alike, Partial, differentiable
from onepass._ops.decomposition import wide
from onepass._ops.derivatives import gradients_of
from onepass._ops.differentiation import constant
from onepass._ops.entry import drawing_entry
from onepass._random import draw_seed
from onepass.reference import norm as reference
from onepass.reference.dropout import dropped


class NormKind(enum.IntEnum):
    """The statistic that normalises a row; the numbers of csrc/ops/norm.h."""

    LAYER = 0
    RMS = 1


# The epsilon of rms_norm(eps=None): torch takes the epsilon of the dtype it computes in.
_DEFAULT_EPS = torch.finfo(torch.float32).eps
_DEFAULT_EPS_FLOAT64 = torch.finfo(torch.float64).eps


def default_eps(input: Tensor) -> float:
    """The eps of rms_norm if none is given."""
    return _DEFAULT_EPS_FLOAT64 if input.dtype is torch.float64 else _DEFAULT_EPS


def norm_options(
    input: Tensor,
    normalized_shape,
    kind: NormKind,
    eps: float | None,
    out_dtype: torch.dtype | None = None,
) -> tuple[tuple[int, ...], float | None, torch.dtype | None]:
    """(normalized_shape, eps, out_dtype) as the operators take them."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    if eps is None and kind == NormKind.RMS:
        eps = default_eps(input)
    if torch.compiler.is_compiling():
        eps = constant(eps)
    elif tracing.is_tracing():
        normalized_shape = tracing.numbers(normalized_shape)
    if out_dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda"):
        # Dynamo traces the function that a cache wraps, and warns of each.
        of = _autocast_dtype if torch.compiler.is_compiling() else _known_autocast_dtype
        out_dtype = of(input.dtype, kind)
    return normalized_shape, eps, out_dtype


@drawing_entry
def norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape,
    *,
    kind: NormKind,
    eps: float | None,
    weight_offset: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output, residual_out) of layer norm (or RMS norm), residual_out None without a residual.

    `out_dtype` is the output's dtype, input's by default; the other arguments are those of
    `onepass.functional`, with dropout_p 0 where dropout is off.
    """
    normalized_shape, eps, out_dtype = norm_options(input, normalized_shape, kind, eps, out_dtype)
    if torch.compiler.is_compiling():
        weight_offset = constant(weight_offset)
    seed = draw_seed(input.device) if dropout_p > 0.0 else None
    output, residual_out, _, _ = _norm.run(
        input, residual, weight, bias, seed, normalized_shape, kind, eps, weight_offset, dropout_p,
        out_dtype, residual_dtype, False,
    )  # fmt: skip
    return output, residual_out if residual is not None else None


def outputs(input, residual, normalized_shape, kind, out_dtype, residual_dtype, save_statistics):
    """(output, residual_out, mean, rstd) without values; empty where there is none."""
    stream = input if residual is None else residual
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    rows = input.shape[: input.dim() - len(normalized_shape)]

    def made(is_there, shape, dtype):
        return input.new_empty(shape if is_there else (0,), dtype=dtype)

    return (
        made(True, input.shape, out_dtype or input.dtype),
        made(residual is not None, input.shape, residual_dtype or stream.dtype),
        made(save_statistics and kind != NormKind.RMS, rows, accumulator),
        made(save_statistics, rows, accumulator),
    )


def _definition(
    input, residual, weight, bias, seed, normalized_shape, kind, eps,
    weight_offset, dropout_p, out_dtype, residual_dtype, save_statistics,
):  # fmt: skip
    residual_out = input.new_empty(0)
    if residual is not None:
        branch = dropped(*wide(input), dropout_p, seed) if dropout_p else input
        residual_out = (residual + branch).to(residual_dtype or residual.dtype)
    x, weight, bias = wide(input if residual is None else residual_out, weight, bias)
    y = _normalized(x, weight, bias, normalized_shape, kind, eps, weight_offset)
    mean = rstd = x.new_empty(0)
    if save_statistics:
        mean, rstd = reference.statistics(x, normalized_shape, eps, kind=kind)
    return y.to(out_dtype or input.dtype), residual_out, mean, rstd


def _gradients(x, weight, bias, normalized_shape, input_dtype, residual_dtype, grad_mask):
    def like(bit, shape, dtype):
        return x.new_empty(shape if grad_mask & bit else (0,), dtype=dtype)

    return (
        like(1, x.shape, input_dtype or x.dtype),
        like(2, x.shape, residual_dtype or x.dtype),
        *(
            x.new_empty(0) if tensor is None else like(bit, normalized_shape, tensor.dtype)
            for bit, tensor in ((4, weight), (8, bias))
        ),
    )


def _derivative(
    doutput, dresidual_out, x, weight, bias, *,
    seed, normalized_shape, kind, eps, weight_offset, dropout_p,
):  # fmt: skip
    dx, dweight, dbias = dresidual_out, None, None
    if doutput is not None:
        y = _normalized(x, weight, bias, normalized_shape, kind, eps, weight_offset)
        dx, dweight, dbias = gradients_of([y], [x, weight, bias], [doutput])
        dx = dx if dresidual_out is None else dx + dresidual_out
    return dropped(dx, dropout_p, seed), dx, dweight, dbias


_norm = differentiable(
    "norm",
    outputs,
    _definition,
    _gradients,
    unless=("seed",),
    derivative=_derivative,
    partial={"residual_out": Partial(of=("input", "residual"), needs="residual")},
    alike=Alike("input", "residual", unless=("seed",)),
    derived={
        "x": lambda input, residual, residual_out: input if residual is None else residual_out
    },
)


def _normalized(x, weight, bias, normalized_shape, kind, eps, weight_offset) -> Tensor:
    if kind == NormKind.RMS:
        return reference.rms_norm(x, normalized_shape, weight, eps, weight_offset=weight_offset)
    return reference.layer_norm(x, normalized_shape, weight, bias, eps)


def _autocast_dtype(dtype: torch.dtype, kind: NormKind) -> torch.dtype:
    """The dtype that torch's own norm returns under CUDA's autocast, found by calling it."""
    rms = kind == NormKind.RMS
    function = torch.nn.functional.rms_norm if rms else torch.nn.functional.layer_norm
    with torch.no_grad(), torch.autocast("cuda", enabled=True):
        return function(torch.zeros(1, 8, dtype=dtype, device="cuda"), (8,)).dtype


_known_autocast_dtype = functools.cache(_autocast_dtype)
