"""Linear attention with a delta rule, with a decay for each head or for each channel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from onepass._arguments import check_arguments
from onepass._ops import delta_rule as _delta_rule
from onepass.functional._integers import as_int32

_OP = "delta_rule"


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a gated delta rule, each head with a state of its keys' times its
    values' numbers:

    ``S[t] = exp(g[t]) S[t - 1] + k[t] u[t]^T``
    ``u[t] = beta[t] (v[t] - exp(g[t]) S[t - 1]^T k[t])``
    ``output[t] = scale S[t]^T q[t]``

    The arguments are those of `chunk_gated_delta_rule` of flash-linear-attention. Tokens go chunk
    by chunk, as products of small matrices and a triangular system of equations. For the backward
    the forward saves the state before each chunk of 64 tokens. Computed in float32 (float64 for
    float64) and rounded once. On CUDA torch's operators run, on chunks of tokens.

    Yang, Wang, Zhang, Shen, Kim, Parallelizing linear transformers with the delta rule over
    sequence length, 2024; Yang, Kautz, Hatamizadeh, Gated delta networks, 2024.

    Args:
        q, k: (batch, length, heads, head_dim); float32, bfloat16, float16 or float64; any strides,
            a dense last dimension is read in place.
        v: (batch, length, heads, head_dim), with a multiple of q's heads, each of which serves as
            many neighbouring ones, and with a head_dim of its own.
        g: (batch, length, heads), the logarithm of the decay; at most 0, and -Inf forgets all.
        beta: (batch, length, heads), how much of a value is written, usually between 0 and 1. These
            and all others may have other dtypes than q; float64 does not mix.
        scale: a factor of the output; by default 1 / sqrt(head_dim of q).
        initial_state: (batch, heads, head_dim of q, head_dim of v); zero by default.
        output_final_state: returns the state after the last token too.
        use_qk_l2norm_in_kernel: divides q and k by sqrt(sum of their squares + 1e-6).
        cu_seqlens: (sequences + 1,) integers, where sequences begin that are packed in a batch
            of 1, from 0 to length. Each starts with a state of its own: states are then
            (sequences, heads, head_dim of q, head_dim of v).
        chunk_size: a hint that changes nothing: the kernel has chunks of its own.

    Returns:
        A Tensor of v's shape and dtype, contiguous, and None; with output_final_state the state, in
            float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> q, k, v = (torch.randn(2, 100, 4, 16) for _ in "qkv")
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
        >>> output, state = onepass.functional.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> output.shape, state.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 16, 16]))
    """
    try:
        return _by_chunks(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            cu_seqlens, chunk_size, False,
        )  # fmt: skip
    except Exception:
        check_arguments(chunk_gated_delta_rule, locals())
        raise


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: as `chunk_gated_delta_rule`, with a decay for each channel of the keys:

    ``S[t] = diag(exp(g[t])) S[t - 1] + k[t] u[t]^T``
    ``u[t] = beta[t] (v[t] - (diag(exp(g[t])) S[t - 1])^T k[t])``
    ``output[t] = scale S[t]^T q[t]``

    Decays between tokens are products over blocks of 16 tokens, never quotients: nothing overflows,
    however strong they are.

    Kimi team, Kimi Linear: an expressive, efficient attention architecture, 2025.

    Args:
        q, k: (batch, length, heads, head_dim); float32, bfloat16, float16 or float64; any strides,
            a dense last dimension is read in place.
        v: (batch, length, heads, head_dim), with a multiple of q's heads, each of which serves as
            many neighbouring ones, and with a head_dim of its own.
        g: (batch, length, heads, head_dim of q), the logarithm of the decay; at most 0, and -Inf
            forgets all.
        beta: (batch, length, heads), how much of a value is written, usually between 0 and 1. These
            and all others may have other dtypes than q; float64 does not mix.
        scale: a factor of the output; by default 1 / sqrt(head_dim of q).
        initial_state: (batch, heads, head_dim of q, head_dim of v); zero by default.
        output_final_state: returns the state after the last token too.
        use_qk_l2norm_in_kernel: divides q and k by sqrt(sum of their squares + 1e-6).
        cu_seqlens: (sequences + 1,) integers, where sequences begin that are packed in a batch
            of 1, from 0 to length. Each starts with a state of its own.
        chunk_size: a hint that changes nothing: the kernel has chunks of its own.

    Returns:
        A Tensor of v's shape and dtype, contiguous, and None; with output_final_state the state, in
            float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> q, k, v = (torch.randn(2, 100, 4, 16) for _ in "qkv")
        >>> g, beta = -torch.rand(2, 100, 4, 16), torch.rand(2, 100, 4)
        >>> output, state = onepass.functional.chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True
        ... )
        >>> output.shape, state
        (torch.Size([2, 100, 4, 16]), None)
    """
    try:
        return _by_chunks(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            cu_seqlens, chunk_size, True,
        )  # fmt: skip
    except Exception:
        check_arguments(chunk_kda, locals())
        raise


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same as `chunk_gated_delta_rule`, for few tokens, such as those of decoding: token by
    token, the state read and written once. Where a gradient is wanted, and in compiled programs,
    the other one runs; `delta_rule_update` is for these too.

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens: as there.
        initial_state, output_final_state: as there. The initial state is not changed;
            `delta_rule_update` changes it.

    Returns:
        A Tensor of v's shape and dtype, contiguous, and None; with output_final_state the state, in
            float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> q, k, v = (torch.randn(2, 3, 4, 16) for _ in "qkv")
        >>> g, beta = -torch.rand(2, 3, 4), torch.rand(2, 3, 4)
        >>> output, state = onepass.functional.fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True
        ... )
        >>> output.shape, state
        (torch.Size([2, 3, 4, 16]), None)
    """
    try:
        return _call(
            _delta_rule.recurrent_delta_rule, q, k, v, g, beta, scale, initial_state,
            output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, False,
        )  # fmt: skip
    except Exception:
        check_arguments(fused_recurrent_gated_delta_rule, locals())
        raise


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same as `chunk_kda`, for few tokens, as `fused_recurrent_gated_delta_rule`.

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens: as there.
        initial_state, output_final_state: as there.

    Returns:
        A Tensor of v's shape and dtype, contiguous, and None; with output_final_state the state, in
            float32 (float64 for float64).

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> q, k, v = (torch.randn(2, 3, 4, 16) for _ in "qkv")
        >>> g, beta = -torch.rand(2, 3, 4, 16), torch.rand(2, 3, 4)
        >>> output, state = onepass.functional.fused_recurrent_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True
        ... )
        >>> output.shape, state
        (torch.Size([2, 3, 4, 16]), None)
    """
    try:
        return _call(
            _delta_rule.recurrent_delta_rule, q, k, v, g, beta, scale, initial_state,
            output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, True,
        )  # fmt: skip
    except Exception:
        check_arguments(fused_recurrent_kda, locals())
        raise


def delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The next tokens of a delta rule while decoding, with the state updated in place.

    It is read once and written once, however many tokens there are. Computed in float32 (float64
    for float64); a token's output comes from the state before that is rounded to its dtype. Where a
    gradient is wanted, and on CUDA, the operator that goes by chunks runs.

    Args:
        state: (batch, heads, head_dim of q, head_dim of v), dense in the last dimension; with
            cu_seqlens (sequences, ...).
        q, k, v, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens: as for `chunk_gated_delta_rule`.
        g: (batch, length, heads), or with a decay for each channel, as for `chunk_kda`.

    Returns:
        Tensor of v's shape and dtype, contiguous.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or the state shares memory with itself
            or with another argument; the message names the argument.
        TypeError: an argument is of a wrong type.

    Examples:
        >>> state, (q, k, v) = torch.zeros(2, 4, 16, 16), (torch.rand(2, 1, 4, 16) for _ in "qkv")
        >>> g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
        >>> onepass.functional.delta_rule_update(
        ...     state, q, k, v, g, beta, use_qk_l2norm_in_kernel=True
        ... ).shape
        torch.Size([2, 1, 4, 16])
    """
    try:
        if type(use_qk_l2norm_in_kernel) is not bool:
            raise TypeError  # which check_arguments names
        if cu_seqlens is not None:
            cu_seqlens = as_int32("delta_rule_update", "cu_seqlens", cu_seqlens)
        scale = _scale_of(q) if scale is None else float(scale)
        return _delta_rule.delta_rule_update(
            state, q, k, v, g, beta, cu_seqlens, scale, use_qk_l2norm_in_kernel, g.dim() == 4
        )
    except Exception:
        check_arguments(delta_rule_update, locals())
        raise


def _by_chunks(
    q, k, v, g, beta, scale, initial_state, output_final_state, qk_l2norm, cu_seqlens, chunk_size,
    g_has_channels,
):  # fmt: skip
    if chunk_size < 1:
        raise RuntimeError(f"{_OP}: chunk_size must be at least 1, got {chunk_size}")
    return _call(
        _delta_rule.delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state,
        qk_l2norm, cu_seqlens, g_has_channels,
    )  # fmt: skip


def _call(
    operator: Callable, q, k, v, g, beta, scale, initial_state, output_final_state, qk_l2norm,
    cu_seqlens, g_has_channels,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if type(output_final_state) is not bool or type(qk_l2norm) is not bool:
        raise TypeError  # which check_arguments names
    if cu_seqlens is not None:
        cu_seqlens = as_int32(_OP, "cu_seqlens", cu_seqlens)
    scale = _scale_of(q) if scale is None else float(scale)
    output, final_state = operator(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, g_has_channels
    )
    return output, final_state if output_final_state else None


def _scale_of(q: Tensor) -> float:
    return max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0
