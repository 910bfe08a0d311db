"""Modules that call F.scaled_dot_product_attention, in ways that occur in practice.

More ways, which are read by the same code, are those of foreign_linear.
"""

import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint as recompute


class Base(nn.Module):
    """Attention without the call itself, which each class below makes in its own way."""

    def __init__(self, width: int = 16, heads: int = 2, p: float = 0.0):
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def join(self, y):
        return self.out(y.transpose(1, 2).flatten(2))


class Plain(Base):
    def forward(self, x, is_causal: bool = True):
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(*self.split(x), dropout_p=p, is_causal=is_causal)
        return self.join(y)


class Alias(Base):
    def forward(self, x):
        return self.join(sdpa(*self.split(x)))


def helper(q, k, v):
    return deeper(q, k, v)


def deeper(*qkv):
    return [F.scaled_dot_product_attention(*some) for some in (qkv,)][0]


class Helper(Base):
    def forward(self, x):
        return self.join(helper(*self.split(x)))


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(Base):
    """By a decorator of torch and by one that copies the names."""

    @torch.autocast("cpu", enabled=False)
    @wrapped
    def forward(self, x):
        return self.join(F.scaled_dot_product_attention(*self.split(x)))


class Processor:
    def __call__(self, q, k, v):
        return self.attend(q, k, v)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class WithProcessor(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.processor = Processor()

    def forward(self, x):
        return self.join(self.processor(*self.split(x)))


class ByKeyword(Base):
    def forward(self, x):
        q, k, v = self.split(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(value=v, key=k, query=q, attn_mask=mask, scale=0.3)
        return self.join(y)


class CheckpointsInside(Base):
    def core(self, x):
        return self.join(F.scaled_dot_product_attention(*self.split(x)))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.core, x, use_reentrant=False)


class CheckpointsByAlias(Base):
    def forward(self, x):
        def core(x):
            return self.join(F.scaled_dot_product_attention(*self.split(x)))

        return recompute(core, x, use_reentrant=False)


class CheckpointsByAttribute(CheckpointsInside):
    def __init__(self):
        super().__init__()
        self.run = functools.partial(recompute, use_reentrant=False)

    def forward(self, x):
        return self.run(self.core, x)


class Unflattened(Base):
    """Splits heads as diffusers does; Dynamo cannot trace the method under another mode."""

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x):
        return self.join(F.scaled_dot_product_attention(*self.split(x)))


FOUND = [
    Unflattened, Plain, Alias, Helper, Decorated, WithProcessor, ByKeyword,
]  # fmt: skip


class QuietMultihead(nn.MultiheadAttention):
    """A subclass that inherits forward."""


class SelfAttention(nn.Module):
    """Torch's module, called without its weights."""

    def __init__(self):
        super().__init__()
        self.attention = QuietMultihead(16, 2)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class BesideTorchs(Helper):
    """Calls the function and holds torch's module, which is called below its redirection."""

    def __init__(self):
        super().__init__()
        self.other = nn.MultiheadAttention(16, 2)

    def forward(self, x):
        return self.other(x, x, x, need_weights=False)[0] + super().forward(x)


CHECKPOINTING = [CheckpointsInside, CheckpointsByAlias, CheckpointsByAttribute]
