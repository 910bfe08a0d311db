"""Norms of other libraries: RMS and layer norms, and modules that only look like one."""

from __future__ import annotations

import torch
from torch import nn


class Weighted(nn.Module):
    """The base of all classes below: one weight, an eps, a forward of one tensor."""

    def __init__(self, cols: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.eps = eps

    def rstd(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


# Norms that onepass computes.


class RMS(Weighted):
    def forward(self, x):
        return x * self.rstd(x) * self.weight


class OnePlusRMS(Weighted):
    def forward(self, x):
        return (x.float() * self.rstd(x.float()) * (1 + self.weight.float())).type_as(x)


class GammaBeta(nn.Module):
    """Layer norm under other names."""

    def __init__(self, cols):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(cols))
        self.beta = nn.Parameter(torch.zeros(cols))
        self.norm_epsilon = 1e-5

    def forward(self, features):
        centred = features - features.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + self.norm_epsilon) * self.gamma + self.beta


class OnePlusLayer(Weighted):
    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight + 1, None, self.eps)


class LayerNormOverridden(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input).to(input.dtype)


# Norms that are refused, each with words of the reason.


class RMSWithBias(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.bias = nn.Parameter(torch.zeros(cols))

    def forward(self, x):
        return x * self.rstd(x) * self.weight + self.bias


class EpsOutside(Weighted):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class EpsAsFloor(Weighted):
    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).clamp_min(self.eps).rsqrt() * self.weight


class OtherEps(Weighted):
    """Has an eps, but uses another one."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


class L1(Weighted):
    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class Max(Weighted):
    def forward(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class Unbiased(Weighted):
    """Divides by cols - 1."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class WeightBefore(Weighted):
    def forward(self, x):
        x = x * self.weight
        return x * self.rstd(x)


class Clamped(Weighted):
    """Equal to RMS norm as long as inputs are small."""

    def forward(self, x):
        x = x.clamp(-50, 50)
        return x * self.rstd(x) * self.weight


class OverBatch(Weighted):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.eps) * self.weight


class Detached(Weighted):
    """The right output with another gradient."""

    def forward(self, x):
        return x * self.rstd(x).detach() * self.weight


class CoarseInBfloat16(Weighted):
    """RMS norm in float32, something else in bfloat16."""

    def forward(self, x):
        eps = self.eps if x.dtype == torch.float32 else 0.1
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight


class NoisyInTraining(Weighted):
    def forward(self, x):
        y = x * self.rstd(x) * self.weight
        return y + 1e-3 * torch.randn_like(y) if self.training else y


class OtherInEval(Weighted):
    def forward(self, x):
        return x * self.rstd(x) * self.weight * (1.0 if self.training else 0.5)


class RunningBuffer(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.register_buffer("running", torch.ones(1))

    def forward(self, x):
        return x * self.rstd(x) * self.weight * self.running


class RunningAttribute(Weighted):
    """A running statistic in a Python number."""

    def __init__(self, cols):
        super().__init__(cols)
        self.running = 1.0

    def forward(self, x):
        self.running = 0.9 * self.running + 0.1 * x.detach().pow(2).mean().item()
        return x * self.running**-0.5 * self.weight


class Counting(Weighted):
    """The right output, and a count that swapping would stop."""

    def __init__(self, cols):
        super().__init__(cols)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.rstd(x) * self.weight


class HiddenState(Weighted):
    """State on the class, where it is easily missed."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * self.rstd(x) * self.weight * (1 + 0.1 * (type(self).calls % 2))


class TensorAttribute(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.scale = torch.ones(1)

    def forward(self, x):
        return x * self.rstd(x) * self.weight * self.scale


class Gated(Weighted):
    def forward(self, x, gate=None):
        y = x * self.rstd(x) * self.weight
        return y if gate is None else y * nn.functional.silu(gate)


class AnyArguments(Weighted):
    def forward(self, *args):
        return args[0] * self.rstd(args[0]) * self.weight


class TwoWeightsNorm(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.gain = nn.Parameter(torch.ones(cols))

    def forward(self, x):
        return x * self.rstd(x) * self.weight * self.gain


class PerHeadNorm(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.weight = nn.Parameter(torch.ones(2, cols))

    def forward(self, x):
        return x * self.rstd(x) * self.weight


class NoEpsNorm(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))

    def forward(self, x):
        return x * self.weight


class WeightlessNorm(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.cols = cols
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ReturnsTuple(Weighted):
    def forward(self, x):
        return x * self.rstd(x) * self.weight, x


class InPlace(Weighted):
    def forward(self, x):
        return x.mul_(self.rstd(x)) * self.weight


class ChannelsFirst(Weighted):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return (x * self.rstd(x) * self.weight).permute(0, 3, 1, 2)


ACCEPTED = {
    RMS: "onepass rms_norm",
    OnePlusRMS: "onepass rms_norm, weight_offset 1",
    GammaBeta: "onepass layer_norm",
    OnePlusLayer: "onepass layer_norm, weight_offset 1",
    LayerNormOverridden: "onepass layer_norm",
}

REFUSED = {
    RMSWithBias: "is an RMS norm with a bias",
    EpsOutside: "differs from rms_norm for small inputs in float32",
    EpsAsFloor: "differs from rms_norm for small inputs in float32",
    OtherEps: "differs from rms_norm for unit inputs in float32",
    L1: "is no RMS or layer norm",
    Max: "is no RMS or layer norm",
    Unbiased: "is no RMS or layer norm",
    WeightBefore: "is no RMS or layer norm",
    Clamped: "differs from rms_norm for large inputs in float32",
    OverBatch: "is no RMS or layer norm",
    Detached: "differs from rms_norm for unit inputs in float32: gradient of the input",
    CoarseInBfloat16: "differs from rms_norm for unit inputs in bfloat16",
    NoisyInTraining: "draws random numbers in training",
    OtherInEval: "differs between training and eval",
    RunningBuffer: "keeps buffers: running",
    RunningAttribute: "keeps state: a call changes its attribute 'running'",
    Counting: "keeps state: a call changes its attribute 'calls'",
    HiddenState: "keeps state: two calls with the same input differ",
    TensorAttribute: "keeps a tensor in its attribute 'scale'",
    Gated: "its forward takes (x, gate=None), not exactly one tensor",
    AnyArguments: "its forward takes (*args), not exactly one tensor",
    TwoWeightsNorm: "has 2 parameters (weight, gain)",
    PerHeadNorm: "its weight must have 1 dimension, got shape (2, ",
    NoEpsNorm: "has no eps",
    WeightlessNorm: "has no weight",
    ReturnsTuple: "returns tuple for an input of shape",
    InPlace: "fails on a 2-D float32 input",
    ChannelsFirst: "fails on a 2-D float32 input",
}
