"""The layers of `torch.nn.Transformer` as modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import _stock
from onepass._policy.precision import precision_of
from onepass._refusals import is_number
from onepass.functional._internal import linear_where_it_gains
from onepass.nn._nested import is_packed, like_packed, rows_of
from onepass.nn._parts import is_method, runs_its_class
from onepass.nn.attention import MultiheadAttention
from onepass.nn.dropout import Dropout
from onepass.nn.linear import Linear
from onepass.nn.norm import LayerNorm

# The parts stay modules: hooks, adapters and sharding of a part, and parts that were replaced, work
# as in torch.
_PARTS = {
    torch.nn.MultiheadAttention: MultiheadAttention,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.Dropout: Dropout,
}


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` of onepass's attention, norms, dropout and products.

    If none of its parts is observed (by a hook, or a class of the user's own), the feed-forward
    block is two calls: ReLU, GELU or SiLU, dropout and the residual are computed with the products
    before them. Another activation is a separate call. If a part is observed, its whole block uses
    torch's products.

    In inference torch computes a whole layer in one call, without its modules; this one always
    calls them. `torch.nn.TransformerEncoder` then makes nested tensors from a padding mask: only
    their rows are computed, as one packed batch, and padding is returned as zeros.

    Examples:
        >>> layer = onepass.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
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
        given = src_mask, src_key_padding_mask
        if not all(mask is None or isinstance(mask, Tensor) for mask in given):
            return torch.nn.TransformerEncoderLayer.forward(self, src, *given, is_causal)
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
        return _with_feed_forward(layer, layer.norm2(x), x)
    x = layer.norm1(x + attend(x))
    return layer.norm2(_with_feed_forward(layer, x, x))


_ACTIVATIONS = ((F.relu, "relu"), (F.gelu, "gelu"), (F.silu, "silu"))
_MODULES = {torch.nn.ReLU: "relu", torch.nn.GELU: "gelu", torch.nn.SiLU: "silu"}
_FORWARDS = {cls: _stock.method(cls) for cls in (*_MODULES, torch.nn.Linear)}
_FF_BLOCK = _stock.method(torch.nn.TransformerEncoderLayer, "_ff_block")


def _name_of(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The epilogue of a product that computes it; None if it is no epilogue or is observed."""
    if not isinstance(activation, torch.nn.Module):
        return next((name for f, name in _ACTIVATIONS if f is activation), None)
    name = _MODULES.get(type(activation))
    if name is None or not _computes(activation, type(activation)):
        return None
    is_tanh = name == "gelu" and activation.approximate == "tanh"
    return "gelu_tanh" if is_tanh else name


def _with_feed_forward(layer: torch.nn.TransformerEncoderLayer, x: Tensor, to: Tensor) -> Tensor:
    """to + layer._ff_block(x)"""
    if is_method(layer._ff_block, _FF_BLOCK):
        # If they differ, the sum has another dtype or shape.
        residual = to if to.dtype is x.dtype and to.shape == x.shape else None
        output = _feed_forward(layer, x, layer.dropout2, residual)
        if output is not None:
            return to + output if residual is None else output
    return to + layer._ff_block(x)


def _feed_forward(
    layer: torch.nn.Module, x: Tensor, last: torch.nn.Module, residual: Tensor | None = None
) -> Tensor | None:
    """last(linear2(dropout(activation(linear1(x))))) in two calls, plus one for an activation that
    is no epilogue; None if the parts must be called separately."""
    first, dropout, second = layer.linear1, layer.dropout, layer.linear2
    # In a layer that swap changed, parts are ours if swap changed them too.
    swapped = "_onepass_original" in vars(type(layer))
    linear = (Linear,) if swapped else (Linear, torch.nn.Linear)
    if (
        type(x) is not Tensor
        or not all(_computes(part, *linear) for part in (first, second))
        or not all(_drops(part) for part in (dropout, last))
    ):
        return None
    activation, precision = _name_of(layer.activation), precision_of(first)
    if activation is None:
        x = dropout(layer.activation(linear_where_it_gains(x, first.weight, first.bias, precision)))
    else:
        x = linear_where_it_gains(
            x, first.weight, first.bias, precision, activation=activation, dropout_p=_p_of(dropout)
        )
    return linear_where_it_gains(
        x,
        second.weight,
        second.bias,
        precision_of(second),
        dropout_p=_p_of(last),
        residual=residual,
    )


def _computes(part: torch.nn.Module, *classes: type) -> bool:
    """Whether a part computes the same as one of the classes, and calling it does nothing else."""
    made_by_swap = "_onepass_original" in vars(type(part))
    is_one = isinstance(part, classes) if made_by_swap else type(part) in classes
    own = _FORWARDS.get(type(part))
    return is_one and (own is None or type(part).forward is own) and runs_its_class(part)


def _drops(part: torch.nn.Module) -> bool:
    """Whether it is a dropout that computes as above, with a probability."""
    return _computes(part, Dropout) and is_number(part.p) and 0.0 <= part.p <= 1.0


def _p_of(dropout: Dropout) -> float:
    return dropout.p if dropout.training else 0.0


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` of onepass's attention, norms, dropout and products.

    Examples:
        >>> layer = onepass.nn.TransformerDecoderLayer(64, 4, 256, batch_first=True)
        >>> layer(torch.randn(2, 10, 64), memory=torch.randn(2, 20, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _use_onepass(self)

    def _ff_block(self, x: Tensor) -> Tensor:
        output = _feed_forward(self, x, self.dropout3)
        return super()._ff_block(x) if output is None else output


def _use_onepass(layer: torch.nn.Module) -> None:
    """Replaces torch's modules, which the constructor has just initialized, by onepass's."""
    for part in layer.children():
        if type(part) in _PARTS:
            part.__class__ = _PARTS[type(part)]
