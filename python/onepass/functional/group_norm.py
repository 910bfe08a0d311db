"""Group norm, with or without an activation after it."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import group_norm as _group_norm


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """`torch.nn.functional.group_norm`, and an activation of its result in the same pass.

    ``activation((x - mean) / sqrt(var + eps) * weight + bias)``, mean and variance of each group of
    channels of a sample. Only input and the statistics are kept for the backward, which recomputes
    the activation. Input is read in place if channels come first, dense, or last, and the output
    has the same order; other layouts are copied once. Computed in float32 (float64 for float64) and
    rounded once. Unlike torch's, it takes groups of a single element.

    Wu and He, Group normalization, 2018.

    Args:
        input: (batch, channels, ...); float32, bfloat16, float16 or float64.
        num_groups: divides the channels.
        weight, bias: (channels,), in input's dtype, or another of the first three beside those.
        eps: added to the variance.
        activation: None or "silu".

    Returns:
        Tensor of input's shape and dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: activation is none of these.

    Examples:
        >>> x, weight, bias = torch.randn(2, 32, 8, 8), torch.ones(32), torch.zeros(32)
        >>> y = onepass.functional.group_norm(x, 8, weight, bias, activation="silu")
        >>> y.shape
        torch.Size([2, 32, 8, 8])
    """
    try:
        kind = _kind_of(activation, "group_norm")
        return _group_norm.group_norm(input, num_groups, weight, bias, eps, kind)
    except Exception:
        check_arguments(group_norm, locals())
        raise


def _kind_of(activation: str | None, op: str) -> int:
    """The number of an activation in the operators.

    Raises:
        ValueError: there is no such activation.
    """
    if activation not in _group_norm.KINDS:
        raise ValueError(f"{op}: activation must be None or 'silu', got {activation!r}")
    return _group_norm.KINDS[activation]
