"""flash_attn.layers.rotary: rotary embedding, by `onepass.functional.rotary_embedding`.

Pairs of dimensions (x, y) at position t become (x cos - y sin, x sin + y cos), the angle being
t / base^(2i / dim) for pair i (Su, Lu, Pan, Murtadha, Wen, Liu: RoFormer, 2021). Computed in
float32 (float64 for float64) and rounded once. A pair is (i, i + rotary_dim / 2), or with
`interleaved` (2i, 2i + 1); dimensions from rotary_dim on stay as they are. cos and sin get no
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.functional import rotary_embedding

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """x rotated, as `apply_rotary_emb`; with conjugate by the opposite angles.

    Examples:
        >>> from onepass.integrations.flash_attn.layers.rotary import apply_rotary
        >>> x, angle = torch.randn(1, 6, 2, 64), torch.randn(6, 32)
        >>> there = apply_rotary(x, angle.cos(), angle.sin())
        >>> back = apply_rotary(there, angle.cos(), angle.sin(), conjugate=True)
        >>> torch.allclose(back, x, atol=1e-5)
        True
    """
    op = "apply_rotary_emb"
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        raise RuntimeError(f"{op}: x must have {dims} dimensions, got shape {tuple(x.shape)}")
    sin = -sin if conjugate else sin
    return _rotated(op, x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, inplace)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim dimensions of x.

    Args:
        x: shape (batch, seq, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: shape (positions, rotary_dim / 2).
        interleaved: the dimensions of a pair, see above.
        inplace: writes the result into x.
        seqlen_offsets: the position of a sequence's first row; one number, or an integer tensor of
            shape (batch,).
        cu_seqlens: shape (batch + 1,), int32: where each sequence begins, the total last.
        max_seqlen: accepted and without effect.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        RuntimeError: a shape does not fit, or there is a position without a row in cos.

    Examples:
        >>> from onepass.integrations.flash_attn.layers.rotary import apply_rotary_emb
        >>> x, angle = torch.randn(1, 6, 2, 64), torch.randn(6, 32)
        >>> apply_rotary_emb(x, angle.cos(), angle.sin()).shape
        torch.Size([1, 6, 2, 64])
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb  # its name before 2.0


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates query and key in qkv, in place, and returns it.

    Args:
        qkv: shape (batch, seq, 3, heads, head_dim), or (batch, seq, heads, head_dim) of the heads
            of query, key and value one after the other, of which num_heads_q are query's.
        cos, sin, interleaved, seqlen_offsets: as in `apply_rotary_emb`.
        cos_k, sin_k: for the key, if they differ.

    Raises:
        RuntimeError: a shape does not fit.
        ValueError: num_heads_q is needed and missing.

    Examples:
        >>> from onepass.integrations.flash_attn.layers.rotary import apply_rotary_emb_qkv_
        >>> qkv, angle = torch.randn(1, 6, 3, 2, 64), torch.randn(6, 32)
        >>> apply_rotary_emb_qkv_(qkv, angle.cos(), angle.sin()) is qkv
        True
    """
    op = "apply_rotary_emb_qkv_"
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        query, key = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() != 4:
        raise RuntimeError(
            f"{op}: qkv must have shape (batch, seq, 3, heads, head_dim) or (batch, seq, heads, "
            f"head_dim), got {tuple(qkv.shape)}"
        )
    elif num_heads_q is None:
        raise ValueError(f"{op}: num_heads_q must be given where qkv has 4 dimensions, got None")
    else:
        num_heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if num_heads_k < 1 or odd:
            raise RuntimeError(
                f"{op}: qkv must have {num_heads_q} heads and twice those of the key, "
                f"got {qkv.shape[2]}"
            )
        query = qkv[:, :, :num_heads_q]
        key = qkv[:, :, num_heads_q : num_heads_q + num_heads_k]
    of_key = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for x, tables in ((query, (cos, sin)), (key, of_key)):
        _check(op, x, *tables, seqlen_offsets)  # of both, before one is written
    for x, tables in ((query, (cos, sin)), (key, of_key)):
        _rotated(op, x, *tables, interleaved, seqlen_offsets, inplace=True)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates the key in kv, (batch, seq, 2, heads, head_dim), in place, and returns it.

    Examples:
        >>> from onepass.integrations.flash_attn.layers.rotary import apply_rotary_emb_kv_
        >>> kv, angle = torch.randn(1, 6, 2, 2, 64), torch.randn(6, 32)
        >>> apply_rotary_emb_kv_(kv, angle.cos(), angle.sin()) is kv
        True
    """
    op = "apply_rotary_emb_kv_"
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise RuntimeError(
            f"{op}: kv must have shape (batch, seq, 2, heads, head_dim), got {tuple(kv.shape)}"
        )
    _rotated(op, kv[:, :, 0], cos, sin, interleaved, seqlen_offsets, inplace=True)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables of cos and sin that grow with the sequences.

    Args:
        dim: dimensions that are rotated.
        base: of the angles' wavelengths.
        interleaved: as in `apply_rotary_emb`.
        scale_base: of xPos, which makes scores decay with distance (Sun et al., 2022); None is
            without it.
        pos_idx_in_fp32: False computes angles in the dtype of `inv_freq`, as a module that was
            cast would.
        device: of the buffers.

    Examples:
        >>> from onepass.integrations.flash_attn.layers.rotary import RotaryEmbedding
        >>> rotary = RotaryEmbedding(64)
        >>> rotary(torch.randn(1, 6, 3, 2, 64)).shape
        torch.Size([1, 6, 3, 2, 64])
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else (self._dimensions(device) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None
        self._cos_k_cached = self._sin_k_cached = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates query and key in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with kv the query alone, of shape (batch, seq,
                heads, head_dim).
            kv: shape (batch, seq, 2, heads, head_dim).
            seqlen_offset: as `seqlen_offsets` there; a tensor needs max_seqlen, the longest
                sequence with its offset.

        Returns:
            qkv, or with kv the pair of both.
        """
        if max_seqlen is None and isinstance(seqlen_offset, Tensor):
            if self._cos_cached is None:
                raise ValueError(
                    "RotaryEmbedding: max_seqlen must be given with a tensor of offsets, got None"
                )
        else:
            longest = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
            self._update_cos_sin_cache(longest, device=qkv.device, dtype=qkv.dtype)
        of_query, of_key = (self._cos_cached, self._sin_cached), (None, None)
        if self.scale is not None:
            of_key = (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, *of_query, *of_key, self.interleaved, seqlen_offset, num_heads_q
            )
        of_key = of_query if self.scale is None else of_key
        query = apply_rotary_emb(
            qkv, *of_query, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        return query, apply_rotary_emb_kv_(kv, *of_key, self.interleaved, seqlen_offset)

    def _dimensions(self, device) -> Tensor:
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)

    def _compute_inv_freq(self, device=None) -> Tensor:
        return self.base ** (-self._dimensions(device) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None) -> None:
        """Makes tables for that many positions unless they exist; called by subclasses."""
        held = self._cos_cached
        if (
            held is not None
            and seqlen <= self._seq_len_cached
            and (held.device, held.dtype) == (device, dtype)
            and not (self.training and held.is_inference())
        ):
            return
        inv_freq = self.inv_freq
        if self.pos_idx_in_fp32 and inv_freq.dtype is not torch.float32:
            inv_freq = self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=inv_freq.dtype)
        angle = position[:, None] * inv_freq.to(device)
        cos, sin = angle.cos(), angle.sin()
        self._seq_len_cached = seqlen
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        exponent = (position.float() - seqlen // 2) / self.scale_base
        scale = self.scale.to(device, torch.float32) ** exponent[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)


def _rotated(
    op: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """x of shape (batch, seq, heads, head_dim), or (total, heads, head_dim) with cu_seqlens."""
    _check(op, x, cos, sin, offsets, cu_seqlens)
    positions = None
    if cu_seqlens is None and not isinstance(offsets, Tensor):
        cos, sin = (table[offsets : offsets + x.shape[1]] for table in (cos, sin))
    else:
        positions = _positions(x, offsets, cu_seqlens)
    if (x.dtype is torch.float64) != (cos.dtype is torch.float64):
        cos, sin = (table.to(torch.promote_types(x.dtype, torch.float32)) for table in (cos, sin))
    is_written = inplace and x.stride(-1) == 1  # else rotated apart, and copied
    rotated, _ = rotary_embedding(
        x,
        None,
        cos.detach(),
        sin.detach(),
        interleaved=interleaved,
        positions=positions,
        rotary_dim=2 * cos.shape[1],
        seq_first=True,
        inplace=is_written,
    )
    return x.copy_(rotated) if inplace and not is_written else rotated


def _check(op: str, x: Tensor, cos: Tensor, sin: Tensor, offsets, cu_seqlens=None) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise RuntimeError(
            f"{op}: cos and sin must have shape (positions, at most {x.shape[-1] // 2}), "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cu_seqlens is None and not isinstance(offsets, Tensor):
        last = offsets + x.shape[1]
        if offsets < 0 or last > cos.shape[0]:
            raise RuntimeError(
                f"{op}: cos must have a row for every position, {offsets} to {last - 1}, "
                f"got {cos.shape[0]}"
            )


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each row: (batch, seq), or (total,) with cu_seqlens."""
    if cu_seqlens is None:
        return torch.arange(x.shape[1], device=x.device) + offsets[:, None]
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(row, cu_seqlens[1:].long(), right=True)
    offset = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    return row - cu_seqlens[sequence] + offset
