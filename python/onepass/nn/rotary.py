"""Rotary embedding as a module: the tables of cos and sin, and their application."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import functional


class RotaryEmbedding(torch.nn.Module):
    """Rotates query and key by angles ``position * base^(-2i / dim)`` for pair i of columns.

    Su, Lu, Pan, Murtadha, Wen, Liu: RoFormer, 2021. cos and sin of all positions are computed once,
    in float32, and stay float32 when the module is cast: in 16 bits the angles of late positions
    would have no correct digit. One module serves all layers of a model. No buffer is part of the
    state_dict, as in the models of transformers, whose name `inv_freq` has.

    Args:
        dim: how many of the first columns of a head are rotated; even. The others stay.
        base: of the angles' wavelengths ("rope_theta").
        max_position_embeddings: rows of the tables, 4 * dim bytes each.
        interleaved: pairs are columns (2i, 2i + 1); else (i, i + dim / 2).
        seq_first: query and key have shape (batch, tokens, heads, head_dim).
        inv_freq: shape (dim / 2,): the angles of position 1, instead of those of base, such as
            scaled ones (YaRN, Llama 3).
        device: of the buffers.

    Attributes:
        inv_freq: shape (dim / 2,), float32.
        cos, sin: shape (max_position_embeddings, dim / 2), float32.

    Raises:
        ValueError: dim is odd or not positive, or inv_freq has another shape.

    Examples:
        >>> rotary = onepass.nn.RotaryEmbedding(64, base=500000.0, max_position_embeddings=128)
        >>> query, key = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> query, key = rotary(query, key)
        >>> query.shape, key.shape
        (torch.Size([1, 8, 16, 64]), torch.Size([1, 2, 16, 64]))
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        max_position_embeddings: int = 2048,
        *,
        interleaved: bool = False,
        seq_first: bool = False,
        inv_freq: Tensor | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim must be even and at least 2, got {dim}")
        if inv_freq is not None and inv_freq.shape != (dim // 2,):
            shape = tuple(inv_freq.shape)
            raise ValueError(
                f"RotaryEmbedding: inv_freq must have shape ({dim // 2},), got {shape}"
            )
        self.dim, self.base = dim, float(base)
        self.max_position_embeddings = max_position_embeddings
        self.interleaved, self.seq_first = interleaved, seq_first
        self._given = None if inv_freq is None else inv_freq.detach().float()
        rows = (max_position_embeddings, dim // 2)
        for name, shape in (("inv_freq", rows[1:]), ("cos", rows), ("sin", rows)):
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Computes the buffers; a module made on "meta" needs this after `to_empty`."""
        of = {"dtype": torch.float32, "device": self.inv_freq.device}
        if self._given is not None:
            self.inv_freq.copy_(self._given)
        else:
            exponents = torch.arange(0, self.dim, 2, **of) / self.dim
            self.inv_freq.copy_(1.0 / self.base**exponents)
        angles = torch.outer(torch.arange(self.max_position_embeddings, **of), self.inv_freq)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(query, key) rotated.

        Args:
            query, key, positions, inplace: as in `onepass.functional.rotary_embedding`. Without
                positions token i has row i of the tables.

        Raises:
            RuntimeError: there are more tokens than rows, or as that function does.
        """
        cos, sin = self.cos, self.sin
        is_usual = isinstance(query, Tensor) and not query.is_nested  # or the function says so
        if positions is None and is_usual and query.dim() > 2:
            tokens = query.shape[-3 if self.seq_first else -2]
            if tokens > self.max_position_embeddings:
                raise RuntimeError(
                    "RotaryEmbedding: query must have at most max_position_embeddings tokens, "
                    f"{self.max_position_embeddings}, got {tokens}"
                )
            cos, sin = cos[:tokens], sin[:tokens]
        if is_usual and query.dtype is torch.float64:
            cos, sin = cos.double(), sin.double()
        return functional.rotary_embedding(
            query,
            key,
            cos,
            sin,
            interleaved=self.interleaved,
            positions=positions,
            rotary_dim=self.dim,
            seq_first=self.seq_first,
            inplace=inplace,
        )

    def _apply(self, fn, recurse: bool = True):
        held = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in held.items():  # moved, and never cast
            if self._buffers[name].dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self

    def extra_repr(self) -> str:
        options = [name for name in ("interleaved", "seq_first") if getattr(self, name)]
        base = f"base={self.base}" if self._given is None else "inv_freq given"
        rows = f"max_position_embeddings={self.max_position_embeddings}"
        return ", ".join([str(self.dim), base, rows, *(f"{name}=True" for name in options)])
