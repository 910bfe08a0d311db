"""Linear attention with a delta rule, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # tokens whose products with each other are in memory at a time
EPSILON = 1e-6


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """(output, final state), token by token: the definition, with a state of head_dim x head_dim
    numbers for each head. g has a number for each head, or for each channel of its keys.

    ``S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  output = scale S^T q``
    """
    return _of_sequences(_recurrent, q, k, v, g, beta, scale, initial_state, cu_seqlens, qk_l2norm)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same, chunk by chunk, by products of matrices (Yang et al. 2024). Within a chunk, u
    solves a triangular system.

    Exponents are sums of g over the tokens between two, each on its own: a difference of sums from
    the chunk's begin on would be inexact after a token that forgets everything.
    """
    return _of_sequences(_by_chunks, q, k, v, g, beta, scale, initial_state, cu_seqlens, qk_l2norm)


def _of_sequences(compute, q, k, v, g, beta, scale, state, cu_seqlens, qk_l2norm):
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    if 0 < q.shape[2] < v.shape[2]:  # each for as many heads
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    sequences = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if state is None:
        state = v.new_zeros((sequences, v.shape[2], q.shape[3], v.shape[3]))
    inputs = (scale * q, k, v, g, beta)
    if cu_seqlens is None:
        return compute(*inputs, state)
    lengths = cu_seqlens.diff().tolist()
    pieces = zip(*(t.split(lengths, 1) for t in inputs), state.split(1), strict=True)
    found = [compute(*piece) for piece in pieces]
    if not found:
        return torch.zeros_like(v), state
    return torch.cat([o for o, _ in found], 1), torch.cat([last for _, last in found])


def _recurrent(q, k, v, g, beta, state):
    decays = g.exp() if g.dim() == 4 else g.exp()[..., None]
    outputs = [v[:, :0]]
    for t in range(q.shape[1]):
        state = state * decays[:, t, ..., None]
        taken = torch.einsum("bhnp,bhn->bhp", state, k[:, t])
        u = beta[:, t, :, None] * (v[:, t] - taken)
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhnp,bhn->bhp", state, q[:, t])[:, None])
    return torch.cat(outputs, 1), state


def _by_chunks(q, k, v, g, beta, state):
    """Heads are in front: b (batch), h (head), t and s (tokens of a chunk), n (channel of a key),
    p (column of a value)."""
    of_pairs = "bhtsn" if g.dim() == 4 else "bhts"
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    outputs = [v[:, :, :0]]
    for begin in range(0, q.shape[2], CHUNK):
        of_q, of_k, of_v, of_g, of_beta = (
            x[:, :, begin : begin + CHUNK] for x in (q, k, v, g, beta)
        )
        tokens = of_g.shape[2]
        lower = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device).tril()
        if g.dim() == 4:
            lower = lower[..., None]
        # between[t, s]: the sum of g over tokens (s, t]
        shape = (*of_g.shape[:3], tokens, *of_g.shape[3:])
        between = of_g.unsqueeze(3).expand(shape).masked_fill(~_before(lower), 0).cumsum(2)
        decay = between.masked_fill(~lower, float("-inf")).exp().to(v.dtype)
        from_before = of_g.cumsum(2).exp().to(v.dtype)
        to_after = decay[:, :, -1]
        if g.dim() == 3:
            from_before, to_after = from_before[..., None], to_after[..., None]
        of_keys, of_queries = (
            torch.einsum(f"bhtn,bhsn,{of_pairs}->bhts", x, of_k, decay) for x in (of_k, of_q)
        )
        system = of_beta[..., None] * of_keys.tril(-1)
        r = of_v - (of_k * from_before) @ state
        u = _inverse(system) @ (of_beta[..., None] * r)
        outputs.append((of_q * from_before) @ state + of_queries @ u)
        state = from_before[:, :, -1, :, None] * state + (of_k * to_after).mT @ u
    return torch.cat(outputs, 2).transpose(1, 2), state


def _before(lower: Tensor) -> Tensor:
    """Without the diagonal."""
    return lower & ~lower.transpose(0, 1)


def _inverse(strict: Tensor) -> Tensor:
    """The inverse of the identity and a lower triangle: each round joins two blocks."""
    size = strict.shape[-1]
    inverse = torch.eye(size, dtype=strict.dtype, device=strict.device).expand(strict.shape)
    width = 1
    while width < size:
        block = torch.arange(size, device=strict.device) // width
        joined = (block[:, None] == block + 1) & (block % 2 == 0)
        inverse = inverse - inverse @ strict.masked_fill(~joined, 0) @ inverse
        width *= 2
    return inverse
