"""The layers of `torch.nn.Transformer` as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.nn._nested import is_packed, like_packed, rows_of
from onepass.nn.attention import MultiheadAttention
from onepass.nn.dropout import Dropout
from onepass.nn.norm import LayerNorm

# The parts stay modules that are called one by one: hooks, adapters and sharding of a part, and
# parts that somebody replaced, work as in torch.
_PARTS = {
    torch.nn.MultiheadAttention: MultiheadAttention,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.Dropout: Dropout,
}


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` of onepass's attention, norms and dropout.

    In inference torch computes a whole layer in one call, past the modules in it; this one always
    calls them. Of the nested tensors that `torch.nn.TransformerEncoder` then makes of a padding
    mask, only the rows are computed, as one packed batch, and padding comes back as zeros.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _use_onepass(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        # The module may be of any class (see onepass.swapping): no method of this one is called.
        if not src.is_nested:

            def attend(x: Tensor) -> Tensor:
                return self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)

            return _layer(self, src, attend)

        if not is_packed(src) or src_mask is not None or src_key_padding_mask is not None:
            return torch.nn.TransformerEncoderLayer.forward(
                self, src, src_mask, src_key_padding_mask, is_causal
            )

        def attend_packed(rows: Tensor) -> Tensor:
            x = like_packed(src, rows)
            return self.dropout1(rows_of(self.self_attn(x, x, x, need_weights=False)[0]))

        return like_packed(src, _layer(self, rows_of(src), attend_packed))


def _layer(layer: torch.nn.TransformerEncoderLayer, x: Tensor, attend) -> Tensor:
    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + layer._ff_block(x))


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` of onepass's attention, norms and dropout."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _use_onepass(self)


def _use_onepass(layer: torch.nn.Module) -> None:
    """Makes onepass's modules of torch's, which the constructor has just made and initialized."""
    for part in layer.children():
        if type(part) in _PARTS:
            part.__class__ = _PARTS[type(part)]
