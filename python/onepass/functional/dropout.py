"""Dropout without a stored mask, alone or fused with the residual add after it."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
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
        Tensor of input's shape and dtype.

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
        if (not training or p == 0.0) and isinstance(input, Tensor):
            return input
        output = _dropout.dropout(input, p)
        return input.copy_(output) if inplace else output
    except Exception:
        check_arguments(dropout, locals())
        raise


def add_dropout(
    input: Tensor, residual: Tensor | None, p: float = 0.5, training: bool = True
) -> Tensor:
    """``residual + dropout(input)`` in one pass over memory.

    Args:
        input: the branch, any shape; float32, bfloat16, float16 or float64.
        residual: the stream, input's shape; its dtype may be wider. None adds nothing.
        p, training: as in `dropout`.

    Returns:
        Tensor of residual's shape and dtype (input's, where there is none).

    Raises:
        RuntimeError: residual differs from input in shape or device.
        TypeError: an argument is of a wrong type.
        ValueError: p is outside [0, 1].

    Examples:
        >>> branch, stream = torch.randn(4, 512).bfloat16(), torch.randn(4, 512)
        >>> stream = onepass.functional.add_dropout(branch, stream, p=0.1)
        >>> stream.dtype
        torch.float32
    """
    try:
        _check_p("add_dropout", "p", p)
        if type(training) is not bool:
            raise TypeError
        if residual is None:
            return dropout(input, p, training)
        return _dropout.add_dropout(input, residual, p if training else 0.0)
    except Exception:
        check_arguments(add_dropout, locals())
        raise


def _check_p(op: str, name: str, p: float) -> None:
    """ValueError unless p is a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: {name} must lie between 0 and 1, got {p}")
