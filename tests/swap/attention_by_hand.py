"""Modules that compute attention by hand, in the ways that people write it.

More of them, in models of transformers, are those of tests/integrations/test_attention_by_hand.py.
"""

import copy
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

import onepass
from onepass import numerics

WIDTH, HEADS, TOKENS = 16, 2, 12
HEAD_DIM = WIDTH // HEADS


class Base(nn.Module):
    """Projections; each class below writes its own `attend` of (batch, heads, tokens, dim)."""

    def __init__(self, p: float = 0.0, width: int = WIDTH, inner: int = WIDTH):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(p)
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril()[None, None])

    def split(self, x):
        batch, tokens, _ = x.shape
        return self.qkv(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x):
        y = self.attend(*self.split(x))
        return self.out(y.transpose(1, 2).flatten(2))


def by_hand(attend: Callable) -> type[Base]:
    """The class with this `attend`, a function without `self`."""
    return type(attend.__name__, (Base,), {"attend": staticmethod(attend)})


class Shortest(Base):
    def attend(self, q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


class NanoGPT(Base):
    def attend(self, q, k, v):
        tokens = q.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.causal[:, :, :tokens, :tokens] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.drop(att) @ v


class OldGPT2(Base):
    """With the softmax module of CodeGen, made in the call, and Perceiver's sizes of the scores."""

    def attend(self, q, k, v):
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights = weights / torch.full([], v.size(-1) ** 0.5, dtype=weights.dtype)
        least = weights.new_full((), torch.finfo(weights.dtype).min)
        tokens = q.shape[-2]
        causal = self.causal[..., :tokens, :tokens].expand_as(weights)
        weights = torch.where(causal, weights.to(weights.dtype), least)
        weights = weights + torch.zeros_like(weights)
        weights = weights + self.causal[0, 0, 0, :tokens].type_as(weights)
        weights = nn.Softmax(dim=-1)(weights).type(v.dtype)
        return torch.matmul(self.drop(weights), v)


class T5(Base):
    def __init__(self, p: float = 0.0):
        super().__init__(p)
        self.relative = nn.Embedding(2 * TOKENS, HEADS)

    def attend(self, q, k, v):
        tokens = torch.arange(q.shape[2])
        bias = self.relative(tokens[:, None] - tokens + TOKENS).permute(2, 0, 1).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        weights = nn.functional.dropout(weights, p=self.drop.p, training=self.training)
        return torch.matmul(weights, v)


class SoftmaxModule(Base):
    def __init__(self, p: float = 0.0):
        super().__init__(p)
        self.softmax = nn.Softmax(dim=-1)

    def attend(self, q, k, v):
        return torch.matmul(self.drop(self.softmax(torch.matmul(q, k.mT) * 0.3)), v)


def einsum_of_tokens_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", [q, k]).div(2.0).softmax(dim=3)
    return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


def one_key_head(q, k, v):
    sim = einsum("b h i d, b j d -> b h i j", q, k[:, 0])
    return einsum("b h i j, b j d -> b h i d", sim.softmax(-1), v[:, 0])


class Swin(Base):
    """The batch holds two windows of each image."""

    def __init__(self, p: float = 0.0):
        super().__init__(p)
        self.relative = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def attend(self, q, k, v):
        windows, tokens = 2, q.shape[2]
        attn = (q * 0.35) @ k.transpose(-2, -1)
        attn = attn + self.relative.unsqueeze(0)
        mask = torch.zeros(windows, tokens, tokens, dtype=attn.dtype)
        mask[1, : tokens // 2, tokens // 2 :] = -100.0
        attn = attn.view(-1, windows, HEADS, tokens, tokens) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, HEADS, tokens, tokens)
        return self.drop(F.softmax(attn, -1)) @ v


class Gemma2(Base):
    def attend(self, q, k, v):
        weights = torch.matmul(q, k.transpose(2, 3)) * 0.5
        weights = torch.tanh(weights / 3.0) * 3.0
        tokens = q.shape[2]
        future = ~self.causal[..., :tokens, :tokens]
        weights = weights + future.to(q.dtype) * torch.finfo(q.dtype).min
        weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)


class Padded(Base):
    def attend(self, q, k, v):
        scores = (q @ k.mT).mul_(0.3)
        tokens = q.shape[2]
        padding = torch.zeros(len(q), 1, 1, tokens, dtype=torch.bool)
        padding[:, ..., -3:] = True
        scores = scores.masked_fill(padding, -10000.0)
        scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -10000.0)
        return scores.softmax(-1) @ v


class Alibi(Base):
    def attend(self, q, k, v):
        tokens = torch.arange(q.shape[2])
        slopes = (torch.tensor([[1.0], [0.5]]) @ torch.tensor([[0.5]])).view(HEADS, 1, 1)
        scores = 0.5 * (q @ k.mT) - slopes * (tokens[:, None] - tokens).abs()
        return scores.softmax(-1) @ v


def frames(q, k, v):
    """Five dimensions: the tokens are cut into frames."""
    q, k, v = (x.unflatten(2, (3, -1)).transpose(1, 2) for x in (q, k, v))
    y = (q @ k.mT * 0.3).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2, 3)


def attention(query, key, value, mask=None, dropout=None):
    """The Annotated Transformer's function."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class Annotated(Base):
    def attend(self, q, k, v):
        tokens = q.shape[2]
        y, self.attn = attention(q, k, v, self.causal[..., :tokens, :tokens], self.drop)
        return y


class TwoBranches(Base):
    """nanoGPT's usual shape: torch's attention where there is one."""

    flash = True

    def attend(self, q, k, v):
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        tokens = q.shape[2]
        att = (q @ k.mT) * q.shape[-1] ** -0.5
        att = att.masked_fill(self.causal[..., :tokens, :tokens] == 0, -math.inf)
        return att.softmax(-1) @ v


def only_a_scale(q, k, v):
    """baddbmm without its first argument."""
    batch, heads, tokens, dim = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    nothing = torch.empty(len(q), tokens, tokens, dtype=q.dtype)
    scores = torch.baddbmm(nothing, q, k.mT, beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v).view(batch, heads, tokens, dim)


class ValuesFirst(Base):
    """Diffusion autoencoders' and timm's of channels first: values by turned probabilities."""

    def attend(self, q, k, v):
        batch, heads, tokens, dim = q.shape
        k, v = (x.transpose(2, 3).reshape(-1, dim, tokens) for x in (k, v))
        weights = F.softmax(torch.bmm(q.reshape(-1, tokens, dim), k) * 0.35, dim=2)
        y = torch.bmm(v, self.drop(weights).permute(0, 2, 1))
        return y.view(batch, heads, dim, tokens).transpose(2, 3)


class Partial(Base):
    """x-transformers': a partial function, and copies for whoever asks; one temperature for all
    heads, after a scale."""

    def __init__(self, p: float = 0.0):
        super().__init__(p)
        self.normalise = functools.partial(F.softmax, dtype=torch.float32)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def attend(self, q, k, v):
        scores = q @ k.mT * 0.5 / self.temperature.exp() + 0
        self.kept = [scores.clone()]
        attn = self.drop(self.normalise(scores + 1.0, dim=-1)).type(v.dtype)
        self.kept.append(attn.clone())
        return attn @ v


TAKEN = [
    Shortest, NanoGPT, OldGPT2, T5, SoftmaxModule, Swin, Gemma2, Padded, Alibi, Annotated,
    ValuesFirst, Partial,
    *map(by_hand, (einsum_of_tokens_first, one_key_head, frames, only_a_scale)),
]  # fmt: skip


# ---- left alone ----------------------------------------------------------------------------------


class Read(Base):
    def attend(self, q, k, v):
        att = (q @ k.mT).softmax(-1)
        self.largest = att.max()
        return att @ v


class ReadBranch(Read):
    flash = False

    def attend(self, q, k, v):
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v)
        return super().attend(q, k, v)


def top_keys(q, k, v):
    scores = q @ k.mT * 0.3
    least = scores.topk(4, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf).softmax(-1) @ v


class TalkingHeads(Base):
    def __init__(self, p: float = 0.0):
        super().__init__(p)
        self.talk = nn.Conv2d(HEADS, HEADS, 1)

    def attend(self, q, k, v):
        return self.talk(q @ k.mT * 0.3).softmax(-1) @ v


def head_gate(q, k, v):
    gate = torch.linspace(0.5, 1.0, HEADS, dtype=q.dtype)
    return einsum("h,bhij->bhij", gate, q @ k.mT * 0.3).softmax(-1) @ v


def renormalised(q, k, v):
    weights = (q @ k.mT * 0.3).softmax(-1)
    return weights / weights.sum(-2, keepdim=True) @ v


def without_keys(q, k, v):
    blocked = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    blocked[3] = True
    return (q @ k.mT * 0.3).masked_fill(blocked, -1e9).softmax(-1) @ v


class Small(Base):
    def attend(self, q, k, v):
        blocked = ~self.causal[..., : q.shape[2], : q.shape[2]]
        return (q @ k.mT * 0.3).masked_fill(blocked, -5.0).softmax(-1) @ v


def by_turned_probabilities(q, k, v):
    weights = (q @ k.mT * 0.3).softmax(-1).mT
    return weights @ v + (weights * 2.0) @ v


def written(q, k, v):
    """Writes into a view of its scores."""
    scores = q @ k.mT * 0.3
    scores.view(-1, *scores.shape[2:]).add_(1.0)
    scores[..., 0] = -1.0
    return scores.softmax(-1) @ v


def row_temperature(q, k, v):
    """One that keys have, too."""
    return (q @ k.mT * k[..., :1].mT).softmax(-1) @ v


def over_queries(q, k, v):
    return (q @ k.mT * 0.3).softmax(-2) @ v


def turned_scores(q, k, v):
    return (k @ q.mT * 0.3).mT.softmax(-1) @ v


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


OF_ONE_CALL = [by_hand(without_keys), by_hand(linear_attention)]  # the next may be taken
LEFT = [
    Read, TalkingHeads, Small, *OF_ONE_CALL,
    *map(by_hand, (top_keys, head_gate, row_temperature, over_queries, renormalised, turned_scores,
                   by_turned_probabilities, written)),
]  # fmt: skip


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        return 2 * scores

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@torch.jit.script
def capped(scores: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(scores / limit)


@torch.jit.script
def doubled(scores: Tensor) -> Tensor:
    return scores.mul_(2.0)


class Unfollowed(Base):
    """Hands its scores to code that torch's functions do not see."""

    way = ""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.randn(1, 1, 1))

    def attend(self, q, k, v):
        scores = q @ k.mT * 0.3
        if self.way in ("added", "with dropout"):
            scores += self.bias
        if self.way == "with dropout":
            return capped(F.dropout(scores.softmax(-1), 0.5), 5.0) @ v
        if self.way == "twice":
            scores = scores.sin() + capped(scores, 5.0) + Doubled.apply(scores)
        elif self.way == "writes":
            doubled(scores)
            scores = scores + scores.sin()
        else:
            scores = capped(scores, 5.0) if self.way == "script" else Doubled.apply(scores)
        return scores.softmax(-1) @ v


UNFOLLOWED = ["script", "function", "added", "twice", "with dropout", "writes"]


# ---- checks --------------------------------------------------------------------------------------


def swapped(cls, **options):
    """(stock, swapped), with equal parameters."""
    stock = cls(**options)
    ours = copy.deepcopy(stock)
    report = onepass.swap(ours, kinds=("attention",))
    assert [entry["name"] for entry in report.swapped] == [""], report
    return stock, ours


def tokens(batch: int = 4, dtype=torch.float32):
    return torch.randn(batch, TOKENS, WIDTH, dtype=dtype)


def outcome(module, x, **autocast) -> dict[str, torch.Tensor]:
    """Output and gradients for the same upstream gradient."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        y = module(x)
    named = dict(module.named_parameters())
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [x, *named.values()], upstream, allow_unused=True)
    names = ["dx", *(f"d {name}" for name in named)]
    found = {"output": y.detach(), **dict(zip(names, gradients, strict=True))}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_same(stock, ours, inputs, **autocast):
    """Draws are judged together."""
    double = copy.deepcopy(stock).double()
    refs = [outcome(double, x.double()) for x in inputs]
    bases = [outcome(stock, x, **autocast) for x in inputs]
    found = [outcome(ours, x, **autocast) for x in inputs]
    for name in refs[0]:
        ref, base, mine = ([tensors[name] for tensors in side] for side in (refs, bases, found))
        assert mine[0].dtype is base[0].dtype, name
        assert mine[0].stride() == base[0].stride(), name
        numerics.assert_close(mine, ref, base, name)
