"""Cross entropy of logits: the loss in one read of them, its gradient in one read and one write;
and of a linear layer's output, without all logits in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments, require_result
from onepass._ops import linear_loss as _linear_loss
from onepass._ops import loss as _loss
from onepass._ops.differentiation import are_transforms_active
from onepass._policy.precision import HAS_PAIR_PRODUCTS, check_precision, rounds_factors
from onepass.functional.attention import _is_autocast
from onepass.functional.linear import _has_products, linear


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` with indices of classes, without a copy of the logits.

    The forward keeps two numbers for each row; the backward recomputes the exponentials. 16-bit
    logits are converted to float32 as they are read, and all sums have one order, so that results
    do not depend on the number of threads. Ignored rows are not read: their values, NaN too, reach
    neither the loss nor a gradient, and their gradient is 0.

    Szegedy et al., Rethinking the Inception architecture, 2015 (label smoothing); Chowdhery et al.,
    PaLM, 2022 (z_loss).

    Args:
        input: logits of shape (rows, classes) or (classes,); float32, bfloat16, float16 or
            float64. Other dimensions are to be flattened.
        target: indices of classes, int64 of shape (rows,) or (). On the CPU one that is neither a
            class nor ignore_index is an error; on CUDA its loss and gradient are NaN.
        weight: shape (classes,), the weights of the classes, or None.
        ignore_index: the target of rows that do not count.
        label_smoothing: from 0 to 1, the part of each target that all classes share.
        softcap: c > 0 turns a logit x into c tanh(x / c) first.
        z_loss: adds z_loss * lse^2, times the target's weight, to each row's loss, lse being its
            log-sum-exp.
        reduction: "mean", over the sum of the weights of rows that are not ignored (NaN where all
            are), "sum" or "none".
        inplace_backward: the backward writes the gradient over the logits, so that it needs no
            memory. They are destroyed: do not read them afterwards. If they were saved for another
            gradient, a second backward too, that raises; second derivatives are refused, and so
            are leaves that require a gradient, such as parameters, and their views. No effect under
            `torch.compile` and the transforms of `torch.func`.

    Returns:
        Tensor of shape (), or of target's with reduction "none"; in input's dtype (under autocast,
        float32 for 16-bit logits, as torch's).

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit, a target is no class, or the
            backward would write into a leaf; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: reduction is none of these.

    Examples:
        >>> logits = torch.randn(4, 1000, requires_grad=True)
        >>> target = torch.tensor([3, 999, -100, 0])  # the third row is ignored
        >>> loss = onepass.functional.cross_entropy(logits, target, z_loss=1e-4)
        >>> loss.backward()
        >>> bool(logits.grad[2].any())
        False
    """
    try:
        _check_reduction("cross_entropy", reduction)
        if type(inplace_backward) is not bool:
            raise TypeError  # which check_arguments names
        if inplace_backward and _is_overwritten(input):
            require_result("cross_entropy", "input", input)
        options = (ignore_index, label_smoothing, softcap, z_loss, _loss.REDUCTIONS[reduction])
        return _loss.cross_entropy(input, target, weight, *options, inplace_backward)
    except Exception:
        check_arguments(cross_entropy, locals())
        raise


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    precision: str | None = None,
) -> Tensor:
    """`cross_entropy` of ``input linear_weight^T + linear_bias`` without all logits in memory, as
    `torch.nn.functional.linear_cross_entropy`.

    Rows are computed in chunks. For each chunk the logits and the loss are computed and, if a
    gradient is needed, the gradient of the logits in the same memory, and its terms in the
    gradients of input, linear_weight and linear_bias; so the backward only scales those. Chunks
    depend on sizes and dtype alone, and sums have one order: on the CPU results do not depend on
    the number of threads. Gradients are summed up in float32 (float64 for float64) and rounded
    once: those of 16-bit weights take that memory until the backward. On CUDA the products are
    torch's.

    With reduction "none" the backward recomputes the logits. Second derivatives are those of
    the formula, and have all logits at once. Under `torch.compile` the gradients are scaled into
    memory of their own.

    Args:
        input: of shape (rows, in_features) or (in_features,); float32, bfloat16, float16 or
            float64. Other dimensions are to be flattened.
        linear_weight: (classes, in_features), in any of these dtypes (float64 with float64 alone).
        target: indices of classes, int64 of shape (rows,) or (), as in `cross_entropy`.
        linear_bias: (classes,), or None.
        ignore_index: as in `cross_entropy`; None: -100.
        weight, label_smoothing, softcap, z_loss, reduction: as in `cross_entropy`.
        precision: of float32 products on a CPU, as in `linear`: with "medium" the factors of the
            logits and of the gradients' products are rounded to bfloat16. "int8" is of linear
            layers alone, and None here. With a sharded vocabulary (DTensor) the products are
            torch's.

    Returns:
        Tensor of shape (), or of target's with reduction "none"; in input's dtype (under autocast,
        float32 for 16-bit products, as torch's).

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit, or a target is no class; the
            message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: reduction or precision is none of these.

    Examples:
        >>> hidden = torch.randn(4, 64, requires_grad=True)
        >>> layer, target = torch.nn.Linear(64, 1000), torch.tensor([3, 999, -100, 0])
        >>> loss = onepass.functional.linear_cross_entropy(
        ...     hidden, layer.weight, target, linear_bias=layer.bias
        ... )
        >>> loss.backward()
        >>> layer.weight.grad.shape
        torch.Size([1000, 64])
    """
    try:
        _check_reduction("linear_cross_entropy", reduction)
        check_precision("linear_cross_entropy", precision)
        ignored = -100 if ignore_index is None else ignore_index
        options = (ignored, label_smoothing, softcap, z_loss)
        layer = (input, linear_weight, linear_bias)
        if any(isinstance(t, Tensor) and _has_products(t) for t in layer):
            # A class of tensor with its own products: whole logits are computed.
            logits = linear(input, linear_weight, linear_bias, precision=precision)
            return _loss.cross_entropy(
                logits, target, weight, *options, _loss.REDUCTIONS[reduction], True
            )
        tensors = (input, linear_weight, target, linear_bias, weight)
        dtypes = _dtypes_of_autocast(input, linear_weight)
        return _linear_loss.linear_cross_entropy(
            *tensors, *options, _loss.REDUCTIONS[reduction], *dtypes,
            _rounds_logits(input, linear_weight, dtypes[0], precision),
        )  # fmt: skip
    except Exception:
        check_arguments(linear_cross_entropy, locals())
        raise


def _rounds_logits(
    input: Tensor, linear_weight: Tensor, cast: torch.dtype | None, precision: str | None = None
) -> bool:
    """Whether the products of `linear_cross_entropy` round their factors: both are float32 on a
    CPU, not cast by autocast, and `precision`, or torch's setting, says so."""
    are_wide = cast in (None, torch.float32) and input.dtype is linear_weight.dtype is torch.float32
    return are_wide and input.is_cpu and rounds_factors(precision)


def _is_overwritten(logits: Tensor) -> bool:
    """Whether a backward with inplace_backward writes into these."""
    return (
        torch.is_grad_enabled()
        and logits.requires_grad
        and not torch.compiler.is_compiling()
        and not are_transforms_active()
    )


def _check_reduction(op: str, reduction: str) -> None:
    if reduction not in _loss.REDUCTIONS:
        names = ", ".join(map(repr, _loss.REDUCTIONS))
        raise ValueError(f"{op}: reduction must be one of {names}, got {reduction!r}")


def _dtypes_of_autocast(input: Tensor, linear_weight: Tensor) -> tuple[torch.dtype | None, ...]:
    """Dtypes of input, of linear_weight and linear_bias, and of the loss; None: unchanged."""
    if not _is_autocast(input) or input.dtype is torch.float64 or not input.is_floating_point():
        return None, None, None
    dtype = torch.get_autocast_dtype(input.device.type)
    # The CPU's products read a weight in any dtype; pairs of bfloat16 are twice as fast.
    pairs = HAS_PAIR_PRODUCTS and dtype is torch.bfloat16
    casts = linear_weight.dtype is not torch.float64 and (pairs or not input.is_cpu)
    return dtype, dtype if casts else None, torch.float32
