"""Modules that hold weights and call F.linear, in all the ways that occur in practice."""

import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import linear as project


class Base(nn.Module):
    """A weight and a bias without the call, which each class below makes in its own way."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)
        self.bias = nn.Parameter(torch.randn(width))


class Plain(Base):
    def forward(self, x, scale: float = 1.0):
        return F.linear(x, self.weight, self.bias) * scale


class Alias(Base):
    def forward(self, x):
        return project(x, self.weight, self.bias)


class LongName(Base):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Builtin(Base):
    def forward(self, x):
        return torch._C._nn.linear(x, self.weight, self.bias)


class ImportedInside(Base):
    def forward(self, x):
        from torch.nn.functional import gelu, linear  # noqa: F401

        return linear(x, self.weight, self.bias)


class ModuleImportedInside(Base):
    def forward(self, x):
        import torch.nn.functional as functional

        return functional.linear(x, self.weight, self.bias)


class Method(Base):
    def linear(self, x):
        return F.linear(x, self.weight, self.bias)

    def forward(self, x):
        return self.linear(x)


def helper(x, weight, bias):
    return [F.linear(x, weight, b) for b in (bias,)][0]


class Helper(Base):
    def forward(self, x):
        return helper(x, self.weight, self.bias)


def enclosing(functional, project):
    class InAClosure(Base):
        def forward(self, x):
            def inner(x):
                return functional.linear(x, self.weight, self.bias)

            return inner(x)

    class AliasInAClosure(Base):
        def forward(self, x):
            return project(x, self.weight, self.bias)

    return InAClosure, AliasInAClosure


InAClosure, AliasInAClosure = enclosing(F, F.linear)
for cls in (InAClosure, AliasInAClosure):
    cls.__qualname__ = cls.__name__  # to be found when pickled


class OnTheInstance(Base):
    def __init__(self):
        super().__init__()
        self.product = functools.partial(F.linear)

    def forward(self, x):
        return self.product(x, self.weight, bias=self.bias)


class InADefault(Base):
    def forward(self, x, project=F.linear):
        return project(x, self.weight, self.bias)


class ByKeyword(Base):
    def forward(self, x):
        return F.linear(bias=self.bias, weight=self.weight, input=x)


class Inherited(Plain):
    """Inherits forward."""


class CallsSuper(Plain):
    def forward(self, x):
        return super().forward(x) + 1.0


class OfTorch(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)

    def forward(self, x):
        return super().forward(x) * 2.0


class LowRank(nn.Linear):
    """As the layers of loralib, which subclass torch's."""

    def __init__(self):
        super().__init__(16, 16)
        self.down = nn.Parameter(torch.randn(2, 16))
        self.up = nn.Parameter(torch.randn(16, 2))
        self.weight.requires_grad_(False)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.down.T @ self.up.T


FOUND = [
    Plain, Alias, LongName, Builtin, ImportedInside, ModuleImportedInside, Method, Helper,
    InAClosure, AliasInAClosure, OnTheInstance, InADefault, ByKeyword, Inherited, CallsSuper,
    OfTorch, LowRank,
]  # fmt: skip


class NameAlone(Base):
    """Calls a submodule of that name, and another function of F."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Identity()

    def forward(self, x):
        return F.relu(self.linear(x)) @ self.weight


class NoWeight(nn.Module):
    """Its weight belongs to another module."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        return F.linear(x, self.project.weight)


NOT_FOUND = [NameAlone, NoWeight]


class CheckpointsInside(Base):
    def core(self, x):
        return F.linear(x, self.weight, self.bias)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.core, x, use_reentrant=False)


class Experts(nn.Module):
    """As in mixtures of experts: all weights are in one tensor, tokens go to some experts."""

    def __init__(self, experts: int = 3, width: int = 16):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, width))
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)

    def forward(self, x):
        chosen, out = F.linear(x, self.gate).argmax(-1), torch.zeros_like(x)
        for expert in range(len(self.up)):
            rows = torch.where(chosen == expert)
            y = F.linear(F.silu(F.linear(x[rows], self.up[expert])), self.down[expert])
            out.index_put_(rows, y)
        return out


class TiedHead(nn.Module):
    """A language model whose last product is with the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())

    def forward(self, ids):
        return F.linear(self.body(self.embedding(ids)), self.embedding.weight)


class OwnAttention(nn.Module):
    """Calls both: its projections are parameters."""

    def __init__(self):
        super().__init__()
        self.into = nn.Parameter(torch.randn(48, 16) / 4)
        self.out = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        q, k, v = F.linear(x, self.into).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.linear(y.transpose(1, 2).flatten(2), self.out)
