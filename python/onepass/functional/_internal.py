"""Functions for onepass's own modules and integrations: not part of the public interface."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from onepass._ops import linear_loss, loss
from onepass._ops.attention import attention
from onepass._ops.differentiation import are_transforms_active
from onepass._policy import device_attention, products, small_calls
from onepass._policy.precision import HAS_PAIR_PRODUCTS
from onepass._refusals import is_number, or_torchs
from onepass.functional._attention_options import given, rounds, score_options
from onepass.functional.attention import _autocast, _is_autocast
from onepass.functional.linear import _composed, linear
from onepass.functional.loss import _rounds_logits


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
    keeps_order: bool = True,
    precision: str | None = None,
    **terms: float | Tensor,
) -> Tensor:
    """Attention with a float and a boolean mask at once.

    All are four-dimensional; bias (added to the scores) and mask (True attends) broadcast to
    (batch, heads, seq_q, seq_k), but for the last dimension. `keeps_order`: the output has query's
    order of heads and seq_q in memory; else it is contiguous. The rest is as in
    `scaled_dot_product_attention`; arguments are not checked for their types.
    """
    if (
        bias is None
        and mask is None
        and dropout_p == 0.0
        and not terms
        and device_attention.is_torchs(query, key, value)
    ):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    query, key, value = _autocast(query, key, value)
    options = score_options(query, scale, (-1, 0 if is_causal else -1), **terms)
    options |= given(bias=bias, mask=mask)
    if rounds(query, precision):
        options["round_factors"] = True
    if not keeps_order:
        options.pop("out_bshd", None)
    if dropout_p != 0.0:
        options["dropout_p"] = dropout_p
    return attention(query, key, value, options)[0]


def linear_where_it_gains(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    precision: str | None = None,
    **epilogue: object,
) -> Tensor:
    """`linear` with its options, or `F.linear` and a pass for each option if that is as fast."""
    if linear_gains(input, weight, bias, precision):
        ours = linear if precision is None else functools.partial(linear, precision=precision)
        return or_torchs(ours, _torchs, input, weight, bias, **epilogue)
    return _torchs(input, weight, bias, **epilogue)


def _torchs(input: Tensor, weight: Tensor, bias: Tensor | None, **epilogue: object) -> Tensor:
    output = F.linear(input, weight, bias)
    return _composed(output, **epilogue) if epilogue else output


def fits(dtype: torch.dtype, query: Tensor) -> bool:
    """Whether torch multiplies tensors of a dtype and of query's, as they are or by autocast."""
    cast = _is_autocast(query) and dtype.is_floating_point and dtype is not torch.float64
    return dtype is query.dtype or cast


def is_mask(mask: Tensor | None, query: Tensor) -> bool:
    """Whether torch takes a mask of this dtype beside query."""
    return mask is None or (
        isinstance(mask, Tensor)
        and (mask.dtype in (torch.bool, torch.float32) or fits(mask.dtype, query))
    )


def linear_gains(
    input: Tensor, weight: Tensor, bias: Tensor | None, precision: str | None = None
) -> bool:
    """Whether `linear` takes less time than `F.linear`: by dtype, precision, CPU and size.

    Not under torch.func, where torch maps a product to one product and ours to a loop, nor in
    forward mode, where ours is torch's too.
    """
    return (
        weight is not None
        and weight.dim() == 2
        and not small_calls.linear_is_small(input, weight, precision)
        and _is_usual(input, weight, bias)
        and products.gains(input, weight, precision)
        and forward_ad._current_level < 0
        and not are_transforms_active()
    )


def cross_entropy_gains(
    input: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float = 0.0
) -> bool:
    """Whether `cross_entropy` computes the same as `F.cross_entropy` here, in less time.

    Not for probabilities, nor for logits of more than two dimensions, nor for arguments that ours
    refuses: torch computes them or raises its own error. Not under torch.func and in forward mode,
    as with `linear`.
    """
    return (
        input.dim() in (1, 2)
        and isinstance(target, Tensor)
        and target.dtype is torch.int64
        and target.shape == input.shape[:-1]
        and is_number(label_smoothing)
        and 0.0 <= label_smoothing <= 1.0
        and input.dtype in _DTYPES
        and input.layout is torch.strided
        and (weight is None or (weight.dtype is input.dtype and not weight.requires_grad))
        and not small_calls.loss_is_small(input)
        and forward_ad._current_level < 0
        and not are_transforms_active()
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cross_entropy_in_float32(
    input: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """`cross_entropy` of 16-bit or float32 logits, as a float32 scalar."""
    if not torch.compiler.is_compiling() and has_torch_function((input, target)):
        arguments = (input, target, ignore_index, reduction)
        return handle_torch_function(cross_entropy_in_float32, (input, target), *arguments)
    return loss.cross_entropy(
        input,
        target,
        None,
        ignore_index,
        0.0,
        0.0,
        0.0,
        loss.REDUCTIONS[reduction],
        out_dtype=torch.float32,
    )


def linear_cross_entropy_in_float32(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    precision: str | None = None,
) -> Tensor:
    """`linear_cross_entropy` with products in dtype, as a float32 scalar."""
    tensors = (input, linear_weight, target, linear_bias)
    options = (ignore_index, softcap, reduction, dtype, precision)
    if not torch.compiler.is_compiling() and has_torch_function(tensors):
        ours = linear_cross_entropy_in_float32
        return handle_torch_function(ours, tensors, *tensors, *options)
    # The CPU's products read a weight in any dtype; pairs of bfloat16 are twice as fast.
    casts = dtype is torch.bfloat16 and HAS_PAIR_PRODUCTS or not input.is_cpu
    return linear_loss.linear_cross_entropy(
        *tensors,
        None,
        ignore_index,
        0.0,
        softcap,
        0.0,
        loss.REDUCTIONS[reduction],
        dtype,
        dtype if casts else None,
        torch.float32,
        _rounds_logits(input, linear_weight, dtype, precision),
    )


def _is_usual(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both functions take these: F.linear also takes sparse tensors and a bias that
    broadcasts, and refuses some that onepass's would take."""
    dtype = weight.dtype
    return (
        input.layout is weight.layout is torch.strided
        and (bias is None or (bias.shape == weight.shape[:1] and bias.layout is torch.strided))
        and (
            torch.is_autocast_enabled("cpu")
            or (input.dtype is dtype and (bias is None or bias.dtype is dtype))
        )
    )
