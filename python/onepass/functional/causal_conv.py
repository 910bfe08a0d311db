"""Causal convolution of each channel alone, as in state-space and linear-attention layers."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import causal_conv as _causal_conv
from onepass.functional._integers import whole_numbers
from onepass.functional.attention import _autocast

ACTIVATIONS = (None, "silu")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each channel's causal convolution, with silu after it, in one pass over memory, and its
    backward in another:

    ``activation(bias[c] + sum over k of weight[c, k] * x[b, c, t - (width - 1) + k])``

    In front of x stand the initial state and zeros. x is read in place where channels or tokens
    are dense, such as a part of a projection. The backward recomputes the sum, so only x is kept.
    Computed in float32 (float64 for float64) and rounded once. On CUDA torch's convolution runs.

    Gu, Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023.

    Args:
        x: (batch, channels, length); float32, bfloat16, float16 or float64.
        weight: (channels, width), width 2 to 8.
        bias: (channels,).
        activation: None or "silu".
        initial_state: (batch, channels, width - 1) in x's dtype, what stands before x.
        return_final_state: returns what stands before the next call's x too.
        seq_idx: (batch, length) integers, the number of each position's sequence; positions of
            other sequences count as zero.
        cu_seqlens: (sequences + 1,) integers, where sequences begin that are packed in a batch
            of 1, from 0 to length; instead of seq_idx.

    Returns:
        Tensor of x's shape, dtype and memory order; with return_final_state also
            (batch, channels, width - 1), the last inputs.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: activation is neither; two of initial_state, seq_idx and cu_seqlens are given,
            or return_final_state with packed sequences.

    Examples:
        >>> projected = torch.randn(1, 128, 2 * 64)
        >>> x = projected.transpose(1, 2)[:, :64]  # read in place
        >>> weight, bias = torch.randn(64, 4), torch.randn(64)
        >>> y = onepass.functional.causal_conv1d(x, weight, bias, activation="silu")
        >>> y.shape
        torch.Size([1, 64, 128])
    """
    try:
        _check_activation("causal_conv1d", activation)
        if type(return_final_state) is not bool:
            raise TypeError  # which check_arguments names
        if seq_idx is not None or cu_seqlens is not None:
            _check_packed(x, initial_state, return_final_state, seq_idx, cu_seqlens)
        sequence = seq_idx
        if cu_seqlens is not None:
            positions = torch.arange(x.shape[-1], device=x.device)
            sequence = torch.searchsorted(cu_seqlens[1:], positions, right=True)[None]
        if sequence is not None:
            sequence = sequence.to(torch.int32)
        operands = _autocast(x, weight, bias, initial_state)
        output = _causal_conv.causal_conv1d(*operands, sequence, activation == "silu")
        if not return_final_state:
            return output
        return output, _final_state(x, weight.shape[-1] - 1, initial_state)
    except Exception:
        check_arguments(causal_conv1d, locals())
        raise


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The causal convolution of the next tokens while decoding. `conv_state` holds the inputs
    before them, and is updated in place: it then ends with x.

    The arguments are those of `causal_conv1d_update` of the package causal-conv1d. Where a gradient
    is wanted, and on CUDA, torch's operators run.

    Args:
        x: (batch, channels) for one token, or (batch, channels, tokens); float32, bfloat16,
            float16 or float64.
        conv_state: (batch, channels, at least width - 1) in x's dtype.
        weight: (channels, width), width 2 to 8.
        bias: (channels,).
        activation: None or "silu".

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or conv_state shares memory with
            itself or with another argument; the message names the argument.
        TypeError: an argument is of a wrong type.
        ValueError: activation is neither.

    Examples:
        >>> weight, conv_state = torch.randn(64, 4), torch.zeros(2, 64, 4)
        >>> x = torch.randn(2, 64)
        >>> y = onepass.functional.causal_conv1d_update(x, conv_state, weight, activation="silu")
        >>> torch.equal(conv_state[..., -1], x)
        True
    """
    try:
        _check_activation("causal_conv1d_update", activation)
        return _causal_conv.causal_conv1d_update(x, conv_state, weight, bias, activation == "silu")
    except Exception:
        check_arguments(causal_conv1d_update, locals())
        raise


def _check_activation(op: str, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None or 'silu', got {activation!r}")


def _final_state(x: Tensor, before: int, initial_state: Tensor | None) -> Tensor:
    """The last inputs, a tensor of their own."""
    if x.shape[-1] >= before:
        return x[..., x.shape[-1] - before :].clone(memory_format=torch.contiguous_format)
    if initial_state is None:
        initial_state = x.new_zeros((*x.shape[:-1], before))
    return torch.cat((initial_state[..., x.shape[-1] :], x), -1)


def _check_packed(x, initial_state, return_final_state, seq_idx, cu_seqlens) -> None:
    """
    Raises:
        RuntimeError: the numbers are not whole, or cu_seqlens are given for several samples.
        ValueError: they exclude each other.
    """
    given, numbers = ("cu_seqlens", cu_seqlens) if seq_idx is None else ("seq_idx", seq_idx)
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("causal_conv1d: cu_seqlens must be None beside seq_idx, got both")
    if initial_state is not None:
        raise ValueError(f"causal_conv1d: initial_state must be None beside {given}, got one")
    if return_final_state:
        raise ValueError(
            f"causal_conv1d: return_final_state must be False beside {given}, got True"
        )
    whole_numbers("causal_conv1d", given, numbers)
    if cu_seqlens is not None and x.dim() == 3 and x.shape[0] != 1:
        raise RuntimeError(
            f"causal_conv1d: x must have a batch of 1 beside cu_seqlens, got {x.shape[0]}"
        )
