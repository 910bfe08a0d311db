"""Small models with quantised layers and LoRA, and stock's with the same weights."""

import copy

import pytest
import torch
from torch import nn

import onepass
from onepass import numerics
from onepass.nn import QuantizedLinear
from tests.integrations.transformers_cases import IDS

peft = pytest.importorskip("peft", reason="peft is not installed")

from onepass.integrations._peft_layers import QuantizedLinear as OursLora  # noqa: E402
from onepass.integrations.peft import register, unregister  # noqa: E402

ROUNDS = "^peft: merging adapters into quantised layers rounds the sum to their format again"
X = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()  # as it is for the rest of the process, since quantize does


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(64, 16)).to(dtype)


def lora(**options) -> peft.LoraConfig:
    targets = ["0"] if options.get("lora_bias") else ["0", "2"]  # the second has no bias
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)


def own_quantised(weights: str) -> nn.Module:
    own = model()
    onepass.quantize(own, weights)
    return own


def perturbed(wrapped: nn.Module) -> nn.Module:
    """Adapters start as zero; random ones show whether they are there."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.1)
            elif "magnitude" in name:
                parameter.mul_(1.1)
    return wrapped


def of_codes(wrapped: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in wrapped.named_modules() if isinstance(m, QuantizedLinear)}


def plain(wrapped: nn.Module, config, dtype: torch.dtype, make=model) -> nn.Module:
    """Stock's: the same adapters on plain layers with the weights that the codes stand for."""
    unregister()
    stock = peft.get_peft_model(make(), copy.deepcopy(config)).to(dtype)
    adapters = {n: p for n, p in wrapped.state_dict().items() if "lora_" in n}
    stock.load_state_dict(adapters, strict=False)
    with torch.no_grad():
        for name, layer in of_codes(wrapped).items():
            stock.get_submodule(name).weight.copy_(layer.dequantized(dtype))
    register()
    assert not any(isinstance(layer, OursLora) for layer in stock.modules())
    return stock.train(wrapped.training)


@torch.no_grad()
def assert_as_dequantised(logits: torch.Tensor, wrapped: nn.Module) -> None:
    """By the numerics rule, against the model with plain layers in float64."""
    plain = copy.deepcopy(wrapped)
    onepass.dequantize(plain)
    base = plain(IDS).logits
    numerics.assert_close(logits.detach(), plain.double()(IDS).logits, base, "logits")
