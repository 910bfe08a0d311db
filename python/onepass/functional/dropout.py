"""Dropout without a stored mask, alone or fused with the residual add after it."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._imported import is_dtensor
from onepass._ops import dropout as _dropout


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes elements with probability p and scales the others, as `torch.nn.functional.dropout`.

    The fate of an element follows from a seed, drawn from torch's generator of input's device, and
    the element's index (Philox4x32-10: Salmon, Moraes, Dror, Shaw, SC 2011), so the backward
    regenerates it and no mask is stored. The probability is quantised to 1/65536, and kept elements
    are divided by the quantised keep probability.

    Args:
        input: any shape; float32, bfloat16, float16 or float64.
        p: probability of dropping an element; 0 draws nothing from the generator.
        training: False returns input unchanged, as torch does.
        inplace: writes the result into input.

    Returns:
        Tensor of input's shape, dtype and memory order.

    Raises:
        RuntimeError: a dtype does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: p is outside [0, 1].

    Examples:
        >>> y = onepass.functional.dropout(torch.ones(1000), p=0.5)
        >>> sorted(set(y.tolist()))
        [0.0, 2.0]
    """
    try:
        _check_p("dropout", "p", p)
        if type(training) is not bool:
            raise TypeError  # which check_arguments names
        if isinstance(input, Tensor) and (not training or p == 0.0 or _is_empty(input)):
            return input
        output = _dropout.dropout(input, p)
        return input.copy_(output) if inplace else output
    except Exception:
        check_arguments(dropout, locals())
        raise


def _is_empty(input: Tensor) -> bool:
    # Compiled graphs may hold sizes that are known only when they run.
    return not torch.compiler.is_compiling() and input.numel() == 0


def add_dropout(
    input: Tensor,
    residual: Tensor | None,
    p: float = 0.5,
    training: bool = True,
    *,
    column_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """``residual + row_scale * column_scale * dropout(input)`` in one pass over memory.

    The end of a branch of a residual network, with LayerScale (Touvron et al.: Going deeper with
    Image Transformers, 2021) and DropPath (Huang et al.: Deep Networks with Stochastic Depth, 2016)
    where the model has them. One backward pass gives the gradients of input and column_scale; that
    of column_scale is summed over the rows in a fixed order.

    Args:
        input: the branch, any shape; float32, bfloat16, float16 or float64.
        residual: the stream, input's shape; its dtype may be wider. None adds nothing.
        p, training: as in `dropout`.
        column_scale: LayerScale's gamma, shape (cols,) of input's last dimension; any of float32,
            bfloat16, float16, or float64 when input is float64. None is 1.
        row_scale: a factor for each index of the first dimension, shape (batch,), float32 (float64
            when input is float64), as `drop_path_scale` draws it; it gets no gradient. A sample
            whose factor is 0 is not read: its values, NaN included, have no effect. None is 1.

    Returns:
        Tensor of residual's shape and dtype (input's, where there is none).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
            row_scale requires a gradient.
        TypeError: an argument is of a wrong type.
        ValueError: p is outside [0, 1].

    Examples:
        >>> branch, stream = torch.randn(4, 512).bfloat16(), torch.randn(4, 512)
        >>> stream = onepass.functional.add_dropout(branch, stream, p=0.1)
        >>> stream.dtype
        torch.float32
        >>> gamma = torch.full((512,), 1e-5)
        >>> kept = onepass.functional.drop_path_scale(branch, 0.2)
        >>> onepass.functional.add_dropout(
        ...     branch, stream, p=0.0, column_scale=gamma, row_scale=kept
        ... ).shape
        torch.Size([4, 512])
    """
    try:
        _check_p("add_dropout", "p", p)
        if type(training) is not bool:
            raise TypeError
        active = p if training else 0.0
        if not (column_scale is None and row_scale is None):
            return _dropout.add_scaled(input, residual, active, column_scale, row_scale)
        if residual is None:
            return dropout(input, p, training)
        return _dropout.add_dropout(input, residual, active)
    except Exception:
        check_arguments(add_dropout, locals())
        raise


def drop_path_scale(
    input: Tensor, drop_prob: float = 0.0, training: bool = True, scale_by_keep: bool = True
) -> Tensor | None:
    """DropPath's factor of each sample: the ``row_scale`` of `add_dropout` and `add_layer_norm`.

    0 with probability drop_prob, else 1 / (1 - drop_prob), or 1 without scale_by_keep: timm's
    DropPath. The factors follow from a seed, drawn from torch's generator of input's device, and
    the sample's index, by `dropout`'s Philox stream: the same on the CPU and on CUDA for one seed.
    drop_prob is quantised as `dropout`'s p is.

    Args:
        input: the branch, shape (batch, *).
        drop_prob: probability of dropping a sample; 0 draws nothing.
        training: False drops nothing.
        scale_by_keep: whether kept samples are divided by the chance of it.

    Returns:
        Tensor of shape (batch,), float32 (float64 when input is float64); None where nothing is
        dropped.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: drop_prob is outside [0, 1].

    Examples:
        >>> scale = onepass.functional.drop_path_scale(torch.ones(1000, 8), 0.5)
        >>> sorted(set(scale.tolist()))
        [0.0, 2.0]
    """
    try:
        _check_p("drop_path_scale", "drop_prob", drop_prob)
        if type(training) is not bool or type(scale_by_keep) is not bool:
            raise TypeError
        if not training or drop_prob == 0.0:
            return None
        dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
        samples = input.shape[0] if input.dim() > 1 else 1
        scale = _dropout.row_scale(samples, drop_prob, dtype, input.device, scale_by_keep)
        if is_dtensor(input):
            from onepass._dtensor.tensors import same_on_all

            scale = same_on_all(scale, input)
        return scale if input.dim() > 1 else scale.reshape(())
    except Exception:
        check_arguments(drop_path_scale, locals())
        raise


def _check_p(op: str, name: str, p: float) -> None:
    """ValueError unless p is a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: {name} must lie between 0 and 1, got {p}")
