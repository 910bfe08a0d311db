"""Norms of other libraries: RMS and layer norms, and modules that only look like one."""

import torch
from torch import nn

from onepass.swapping.reasons import Reason


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


# Norms that are refused, each with words of the reason; test_norms.py has those of transformers.


class RMSWithBias(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.bias = nn.Parameter(torch.zeros(cols))

    def forward(self, x):
        return x * self.rstd(x) * self.weight + self.bias


class EpsOutside(Weighted):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class OtherEps(Weighted):
    """Has an eps, but uses another one."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


class Max(Weighted):
    def forward(self, x):
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class Unbiased(Weighted):
    """Divides by cols - 1."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


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


class Uncopyable(Weighted):
    def __init__(self, cols):
        super().__init__(cols)
        self.stream = (item for item in [])

    forward = RMS.forward


class InPlace(Weighted):
    def forward(self, x):
        return x.mul_(self.rstd(x)) * self.weight


ACCEPTED = {
    RMS: "onepass rms_norm",
    OnePlusRMS: "onepass rms_norm, weight_offset 1",
    GammaBeta: "onepass layer_norm",
    OnePlusLayer: "onepass layer_norm, weight_offset 1",
    LayerNormOverridden: "onepass layer_norm",
}

REFUSED = {  # the reason, and words of it
    RMSWithBias: (Reason.PROBE, "is an RMS norm with a bias"),
    EpsOutside: (Reason.PROBE, "differs from rms_norm for small inputs in float32"),
    OtherEps: (Reason.PROBE, "differs from rms_norm for unit inputs in float32"),
    Max: (Reason.PROBE, "is no RMS or layer norm"),
    Unbiased: (Reason.PROBE, "is no RMS or layer norm"),
    Clamped: (Reason.PROBE, "differs from rms_norm for large inputs in float32"),
    OverBatch: (Reason.PROBE, "is no RMS or layer norm"),
    Detached: (Reason.PROBE, "for unit inputs in float32: gradient of the input"),
    CoarseInBfloat16: (Reason.PROBE, "differs from rms_norm for unit inputs in bfloat16"),
    NoisyInTraining: (Reason.PROBE, "draws random numbers in training"),
    OtherInEval: (Reason.PROBE, "differs between training and eval"),
    Counting: (Reason.PROBE, "keeps state: a call changes its attribute 'calls'"),
    HiddenState: (Reason.PROBE, "keeps state: two calls with the same input differ"),
    TensorAttribute: (Reason.KEEPS_TENSOR, "'scale'"),
    Gated: (Reason.ARGUMENTS, "(x, gate=None)"),
    AnyArguments: (Reason.ARGUMENTS, "(*args)"),
    TwoWeightsNorm: (Reason.PARAMETERS, "2 parameters (weight, gain)"),
    Uncopyable: (Reason.PROBE, "cannot be copied"),
    InPlace: (Reason.PROBE, "fails on a 2-D float32 input"),
}
