"""Experts of gpt-oss with quantised weights, a layer for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.nn.quantized_linear import QuantizedLinear

WEIGHTS = ("gate_up_proj", "down_proj")
STORED = tuple(f"{name}_{part}" for name in WEIGHTS for part in ("blocks", "scales"))


class QuantizedExperts(nn.Module):
    """transformers' `GptOssExperts` with a layer for each expert's products; experts that no token
    goes to are not read.

    Args:
        experts: the module whose place it takes; its biases are kept.
    """

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.num_experts, self.limit, self.alpha = (
            experts.num_experts,
            experts.limit,
            experts.alpha,
        )
        for name in WEIGHTS:
            weight = getattr(experts, name)  # (experts, in_features, out_features)
            layers = [
                nn.Linear(*weight.shape[1:], False, device="meta", dtype=weight.dtype)
                for _ in range(self.num_experts)
            ]
            setattr(self, name, nn.ModuleList(layers))
            setattr(self, f"{name}_bias", getattr(experts, f"{name}_bias"))
        self._gate = type(experts)._apply_gate

    def forward(self, hidden_states: Tensor, router_indices=None, routing_weights=None) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            if expert >= self.num_experts:  # of another process
                continue
            token, place = torch.where(router_indices == expert)
            gate_up = self.gate_up_proj[expert](hidden_states[token])
            gated = self._gate(self, gate_up + self.gate_up_proj_bias[expert])
            down = self.down_proj[expert](gated) + self.down_proj_bias[expert]
            weighted = down * routing_weights[token, place, None]
            output.index_add_(0, token, weighted.to(output.dtype))
        return output


def put(model: nn.Module) -> None:
    """Puts quantised experts, that hold nothing yet, in the place of a model's own."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, GptOssExperts):
                parent._modules[name] = QuantizedExperts(child)


def dequantize(model: nn.Module) -> None:
    """Gives a model its own experts back, with the weights that the codes stand for."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, QuantizedExperts):
                with torch.device("meta"):
                    plain = GptOssExperts(model.config.get_text_config())
                for weight in WEIGHTS:
                    layers: list[QuantizedLinear] = list(getattr(child, weight))
                    stacked = torch.stack([layer.dequantized().t() for layer in layers])
                    setattr(plain, weight, nn.Parameter(stacked, requires_grad=False))
                    setattr(plain, f"{weight}_bias", getattr(child, f"{weight}_bias"))
                parent._modules[name] = plain.train(child.training)
