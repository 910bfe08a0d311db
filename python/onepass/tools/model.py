"""The model of `compare`: a byte-level GPT of plain torch modules.

The GPT is pre-norm with learned positions, a GELU MLP of four times the width, and the output head
tied to the token embedding. The LayerNorm layout has biases, as GPT-2; ``rmsnorm=True`` gives the
Llama layout: nn.RMSNorm and no bias anywhere. Nothing in it refers to onepass: `onepass.swap`
must find everything itself, as in any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.tools.errors import BadInput

BYTES = 256  # the vocabulary: every file is text


@dataclass(frozen=True)
class Sizes:
    """Shape of a GPT and of its batches: batch sequences of block bytes."""

    layers: int = 6
    heads: int = 6
    width: int = 384
    block: int = 1024
    batch: int = 2

    def __post_init__(self):
        for name in ("layers", "heads", "width", "block", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise BadInput(f"--{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise BadInput(f"--width must be a multiple of --heads, got {self.width}, {self.heads}")

    def __str__(self):
        layers, heads = (
            f"{count} {name}{'' if count == 1 else 's'}"
            for count, name in ((self.layers, "layer"), (self.heads, "head"))
        )
        return f"{layers}, {heads}, width {self.width}, block {self.block}, batch {self.batch}"


class SelfAttention(nn.Module):
    def __init__(self, sizes: Sizes, dropout: float, bias: bool):
        super().__init__()
        self.heads, self.dropout = sizes.heads, dropout
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=bias)
        self.out = nn.Linear(sizes.width, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, dropout: float, norm: Callable[[int], nn.Module], bias: bool):
        super().__init__()
        width = sizes.width
        self.norm_attention = norm(width)
        self.attention = SelfAttention(sizes, dropout, bias)
        self.drop_attention = nn.Dropout(dropout)
        self.norm_mlp = norm(width)
        self.expand = nn.Linear(width, 4 * width, bias=bias)
        self.activation = nn.GELU()
        self.contract = nn.Linear(4 * width, width, bias=bias)
        self.drop_mlp = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        x = x + self.drop_attention(self.attention(self.norm_attention(x)))
        return x + self.drop_mlp(self.contract(self.activation(self.expand(self.norm_mlp(x)))))


class GPT(nn.Module):
    """Byte-level GPT; called with (tokens, targets), int64 (batch, seq), it returns the mean loss.

    The loss is the cross entropy in nats per byte, float32. A part of each sequence comes with its
    positions, int64 (seq,).
    """

    def __init__(self, sizes: Sizes, dropout: float = 0.0, rmsnorm: bool = False):
        super().__init__()
        norm = nn.RMSNorm if rmsnorm else nn.LayerNorm
        self.tokens = nn.Embedding(BYTES, sizes.width)
        self.positions = nn.Embedding(sizes.block, sizes.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(sizes, dropout, norm, bias=not rmsnorm) for _ in range(sizes.layers)
        )
        self.norm = norm(sizes.width)
        self.head = nn.Linear(sizes.width, BYTES, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # GPT-2: terms of the residual stream start smaller, by the number of adds.
                adds = 2 * sizes.layers if name.endswith(("out.weight", "contract.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / adds**0.5)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, seq, 256)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def reorder_features(self, generator: torch.Generator) -> None:
        """Renumbers the features of the residual stream and of every MLP, at random.

        It stays the same function with the same training run, but every sum over the width, in
        norms and in products, has another order: stock against stock with only rounding between
        them.
        """
        stream = torch.randperm(self.tokens.embedding_dim, generator=generator, device="cpu")
        for name, parameter in self.named_parameters():
            stem = name.rpartition(".")[0]
            rows = stem.endswith((".out", ".contract")) or "norm" in stem
            along = 0 if rows else 1  # the stream's dimension of this parameter
            if along < parameter.dim():
                parameter.copy_(parameter.index_select(along, stream.to(parameter.device)))
        for block in self.blocks:
            hidden = torch.randperm(block.expand.out_features, generator=generator, device="cpu")
            hidden = hidden.to(block.expand.weight.device)
            for parameter in block.expand.parameters():
                parameter.copy_(parameter[hidden])
            block.contract.weight.copy_(block.contract.weight[:, hidden])


def move(batch, device: torch.device):
    """The batch with every tensor in it on device."""
    return each_tensor(batch, lambda tensor: tensor.to(device))


def cast(batch, dtype: torch.dtype | None):
    """The batch with every floating-point tensor in it of dtype; None: unchanged."""
    if dtype is None:
        return batch
    return each_tensor(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


def each_tensor(batch, change: Callable[[Tensor], Tensor]):
    """The same nested mappings, lists and tuples, each tensor changed; mappings become dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: each_tensor(value, change) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        make = getattr(type(batch), "_make", type(batch))  # a named tuple's takes one iterable
        return make(each_tensor(value, change) for value in batch)
    return batch
