"""Selective scan: the state-space layer of Mamba."""

from __future__ import annotations

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import selective_scan as _selective_scan
from onepass.functional._integers import as_int32


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan of Mamba, each channel with a state of its own:

    ``step[t] = softplus(delta[t] + delta_bias)``
    ``h[t] = exp(step[t] A) h[t - 1] + step[t] u[t] B[t]``
    ``output[t] = (sum over the state of C[t] h[t], + D u[t]) * silu(z[t])``

    The state stays in registers. For the backward the forward saves a state every 128 tokens, from
    which the backward computes the others again: memory grows with the length alone. Computed in
    float32 (float64 for float64) and rounded once. On CUDA torch's operators run, on chunks of
    tokens.

    Gu, Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023.

    Args:
        u: (batch, channels, length); float32, bfloat16, float16 or float64; any strides.
        delta, z: of u's shape. delta is the size of a step, z a gate.
        A: (channels, state), real.
        B, C: (batch, state, length), or (batch, groups, state, length), each group for as many
            channels. These and all others may have other dtypes than u; float64 does not mix.
        D, delta_bias: (channels,).
        delta_softplus: takes the softplus of delta + delta_bias, which is linear above 20.
        initial_state: (batch, channels, state); zero by default.
        return_last_state: returns the state after the last token too.
        cu_seqlens: (sequences + 1,) integers, where sequences begin that are packed in a batch
            of 1, from 0 to length. Each starts with a state of its own: states are then
            (sequences, channels, state).

    Returns:
        Tensor of u's shape, dtype and memory order; with return_last_state also
            (batch, channels, state), in float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> u, delta = torch.randn(2, 64, 128), torch.rand(2, 64, 128)
        >>> A, B, C = -torch.rand(64, 16), torch.randn(2, 16, 128), torch.randn(2, 16, 128)
        >>> y = onepass.functional.selective_scan(u, delta, A, B, C, delta_softplus=True)
        >>> y.shape
        torch.Size([2, 64, 128])
    """
    try:
        if type(delta_softplus) is not bool or type(return_last_state) is not bool:
            raise TypeError  # which check_arguments names
        if cu_seqlens is not None:
            cu_seqlens = as_int32("selective_scan", "cu_seqlens", cu_seqlens)
        output, last_state = _selective_scan.selective_scan(
            u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus
        )
        return (output, last_state) if return_last_state else output
    except Exception:
        check_arguments(selective_scan, locals())
        raise


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """One token of a selective scan while decoding, for Mamba 1 and 2. `state` is updated in place:

    ``step = softplus(dt + dt_bias)``
    ``state = exp(step A) state + step x B``
    ``output = (sum over the state of C state, + D x) * silu(z)``

    The arguments are those of `selective_state_update` of mamba-ssm. Computed in float32 (float64
    for float64); the output comes from the state before that is rounded to its dtype. Where a
    gradient is wanted, and on CUDA, torch's operators run.

    Gu, Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023.

    Args:
        state: (batch, channels, state) or (batch, heads, channels, state), dense in the last
            dimension.
        x, dt, z: (batch, channels) or (batch, heads, channels). dt is the size of a step, z a gate.
        A: (channels, state) or (heads, channels, state), real. Expanded from a number for each
            head, as in Mamba 2, it is read once.
        B, C: (batch, state); with heads (batch, groups, state), each group for as many heads.
            Dtypes may differ from x's; float64 does not mix.
        D, dt_bias: (channels,) or (heads, channels).
        dt_softplus: takes the softplus of dt + dt_bias, which is linear above 20.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or the state shares memory with itself
            or with another argument; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> state, A = torch.zeros(2, 64, 16), -torch.rand(64, 16)
        >>> x, dt, B, C = (torch.rand(2, size) for size in (64, 64, 16, 16))
        >>> onepass.functional.selective_state_update(state, x, dt, A, B, C).shape
        torch.Size([2, 64])
    """
    try:
        if type(dt_softplus) is not bool:
            raise TypeError  # which check_arguments names
        return _selective_scan.selective_state_update(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus
        )
    except Exception:
        check_arguments(selective_state_update, locals())
        raise
