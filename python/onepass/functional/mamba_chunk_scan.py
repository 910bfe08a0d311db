"""The scan of Mamba 2, by chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import mamba_chunk_scan as _mamba_chunk_scan
from onepass.functional._integers import as_int32, whole_numbers

_OP = "mamba_chunk_scan"


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba 2, each head with a state of head_dim x state numbers:

    ``step[t] = softplus(dt[t] + dt_bias)``, between the limits
    ``h[t] = exp(step[t] A) h[t - 1] + step[t] x[t] B[t]^T``
    ``output[t] = (h[t] C[t] + D x[t]) * silu(z[t])``

    The arguments are those of `mamba_chunk_scan_combined` of mamba-ssm. Tokens go chunk by chunk,
    as products of small matrices; decays are exponentials of differences of sums. For the backward
    the forward saves the state before each chunk of 64 tokens. Computed in float32 (float64 for
    float64) and rounded once. On CUDA torch's operators run, on chunks of tokens.

    Dao, Gu, Transformers are SSMs: generalized models and efficient algorithms through structured
    state space duality, 2024.

    Args:
        x: (batch, length, heads, head_dim); float32, bfloat16, float16 or float64; any strides, a
            dense last dimension is read in place.
        dt: (batch, length, heads), the size of a step.
        A: (heads,), real.
        B, C: (batch, length, groups, state), each group for as many heads. These and all others may
            have other dtypes than x; float64 does not mix.
        chunk_size: a hint that changes nothing: the kernel has chunks of its own.
        D: (heads,) or (heads, head_dim).
        z: of x's shape, a gate.
        dt_bias: (heads,).
        dt_softplus: takes the softplus of dt + dt_bias, which is linear above 20.
        initial_states: (batch, heads, head_dim, state); zero by default.
        seq_idx: (batch, length) integers, which sequence a token belongs to: where the number
            changes, the state starts again from zero. States are those of a sample: initial_states
            belong to its first sequence, the final states to its last one.
        cu_seqlens: (sequences + 1,) integers, where sequences begin that are packed in a batch
            of 1, from 0 to length. Each starts with a state of its own: states are then
            (sequences, heads, head_dim, state).
        return_final_states: returns the states after the last token too.
        dt_limit: the least and the largest step; one outside is replaced, and has no gradient.

    Returns:
        Tensor of x's shape and dtype, contiguous; with return_final_states also
            (batch, heads, head_dim, state), in float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> x, dt, A = torch.randn(2, 100, 4, 16), torch.rand(2, 100, 4), -torch.arange(1.0, 5.0)
        >>> B, C = torch.randn(2, 100, 1, 32), torch.randn(2, 100, 1, 32)
        >>> y = onepass.functional.mamba_chunk_scan(x, dt, A, B, C, 256, dt_softplus=True)
        >>> y.shape
        torch.Size([2, 100, 4, 16])
    """
    try:
        if type(dt_softplus) is not bool or type(return_final_states) is not bool:
            raise TypeError  # which check_arguments names
        if chunk_size < 1:
            raise RuntimeError(f"{_OP}: chunk_size must be at least 1, got {chunk_size}")
        least, most = dt_limit
        if seq_idx is not None:
            if cu_seqlens is not None:
                raise RuntimeError(
                    f"{_OP}: seq_idx must be given without cu_seqlens, got both of them"
                )
            return _of_sequences(
                x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx,
                (dt_softplus, float(least), float(most)), return_final_states,
            )  # fmt: skip
        if cu_seqlens is not None:
            cu_seqlens = as_int32(_OP, "cu_seqlens", cu_seqlens)
        output, final_states = _mamba_chunk_scan.mamba_chunk_scan(
            x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens,
            dt_softplus, float(least), float(most),
        )  # fmt: skip
        return (output, final_states) if return_final_states else output
    except Exception:
        check_arguments(mamba_chunk_scan, locals())
        raise


def _of_sequences(
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, options, return_final_states
):
    """Samples of several sequences each, as one packed batch."""
    if whole_numbers(_OP, "seq_idx", seq_idx).shape != x.shape[:2]:
        shape, found = tuple(x.shape[:2]), tuple(seq_idx.shape)
        raise RuntimeError(f"{_OP}: seq_idx must have shape {shape}, got {found}")
    if 0 in x.shape:
        output, final_states = _mamba_chunk_scan.mamba_chunk_scan(
            x, dt, A, B, C, D, z, dt_bias, initial_states, None, *options
        )
        return (output, final_states) if return_final_states else output
    is_first = torch.ones_like(seq_idx, dtype=torch.bool)
    is_first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    begins = is_first.flatten().nonzero()[:, 0]
    ends = torch.cat([begins, begins.new_tensor([seq_idx.numel()])]).to(torch.int32)
    last = is_first.sum(1).cumsum(0) - 1  # the number of each sample's last sequence
    if initial_states is not None:
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        zeros = initial_states.new_zeros((len(begins), *initial_states.shape[1:]))
        initial_states = zeros.index_copy(0, first, initial_states)
    flat = (None if t is None else t.flatten(0, 1)[None] for t in (x, dt, B, C, z))
    x_, dt_, B_, C_, z_ = flat
    output, final_states = _mamba_chunk_scan.mamba_chunk_scan(
        x_, dt_, A, B_, C_, D, z_, dt_bias, initial_states, ends, *options
    )
    output = output.view(x.shape)
    return (output, final_states[last]) if return_final_states else output
