"""Models that the tests name by --model, also for other processes."""

import sys
from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        parts = dict(norm=nn.RMSNorm(16), project=nn.Linear(16, 4), drop=nn.Dropout(0.2))
        super().__init__(OrderedDict(parts))


class WithLoss(Net):
    def forward(self, x, target):
        return SimpleNamespace(loss=(super().forward(x) - target).square().mean())


class Zero(Net):
    def forward(self, x):
        return 0.0 * super().forward(x).sum()


class Float32Inside(Net):
    def forward(self, x):
        return super().forward(x) + x.float() @ self.project.weight.t()


class Large(nn.Module):
    """Takes 64 MiB, and prints."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        print("a word")
        return (x * self.weight).sum()


def fixed():
    return Net(), torch.randn(8, 16)


def by_step():
    def batch(step):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        return {"x": x, "target": torch.zeros(8, 4)}

    return WithLoss(), batch


def zero():
    return Zero(), torch.randn(8, 16)


def half():
    return Net().half(), torch.randn(8, 16).half()


def float32_inside():
    return Float32Inside(), torch.randn(8, 16)


def large():
    return Large(), torch.ones(1 << 24)


def not_when_kept():
    if sys.argv[0].endswith("kept.py"):
        raise KeyError("only there")
    return fixed()


def transformer():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.arange(64).reshape(2, 32)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
