"""Modules work whose forward is wrapped on the instance after a swap, also after `unswap`: the
wrapper holds the swapped forward."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from tests.swap.small_models import CONFIG, adaptive, resnet

LlamaForCausalLM = pytest.importorskip("transformers").LlamaForCausalLM
pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")

accelerate = pytest.importorskip("accelerate")


pytestmark = pytest.mark.usefixtures("linear_layers_gain")


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        query = self.project(x).view(2, -1, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query)


def x(*shape):
    return torch.randn(shape)


def activated():
    return nn.Sequential(nn.GroupNorm(4, 64), nn.SiLU())


MODELS = {
    "layer norm": (lambda: nn.LayerNorm(64), lambda: (x(9, 64),)),
    "RMS norm": (lambda: nn.RMSNorm(64), lambda: (x(9, 64),)),
    "group norm": (lambda: nn.GroupNorm(4, 64).bfloat16(), lambda: (x(2, 64, 80, 80).bfloat16(),)),
    "another norm": (lambda: llama.LlamaRMSNorm(64), lambda: (x(9, 64),)),
    "group norm, silu": (activated, lambda: (x(2, 64, 40, 40),)),
    "resnet": (resnet, lambda: (x(2, 64, 40, 40), x(2, 64))),
    "adaptive": (adaptive, lambda: (x(2, 9, 64), x(2, 64))),
    "block": (lambda: llama.LlamaMLP(CONFIG), lambda: (x(512, 64),)),
    "linear": (lambda: nn.Linear(64, 64), lambda: (x(300, 64),)),
    "Conv1D": (lambda: pytorch_utils.Conv1D(64, 64), lambda: (x(300, 64),)),
    "dropout": (lambda: nn.Dropout(0.0), lambda: (x(9, 64),)),
    "loss": (nn.CrossEntropyLoss, lambda: (x(2000, 64), torch.randint(64, (2000,)))),
    "attention": (lambda: nn.MultiheadAttention(64, 4), lambda: (x(9, 2, 64),) * 3),
    "layer": (lambda: nn.TransformerEncoderLayer(64, 4, dropout=0.0), lambda: (x(9, 2, 64),)),
    "calls": (Attending, lambda: (x(2, 300, 64),)),
    "model": (lambda: LlamaForCausalLM(CONFIG), lambda: (torch.randint(256, (2, 64)),)),
}


def wraps(module):
    inner = module.forward
    module.forward = functools.wraps(inner)(lambda *args, **named: inner(*args, **named))


def of_the_class(module):
    inner = type(module).forward
    module.forward = types.MethodType(lambda *args, **named: inner(*args, **named), module)


def autocast(module):
    module.forward = torch.autocast("cpu", enabled=False)(module.forward)


def accelerates(module):
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def accelerates_and_removes(module):
    accelerates(module)
    accelerate.hooks.remove_hook_from_module(module)


WRAPPERS = [wraps, of_the_class, autocast, accelerates, accelerates_and_removes]


def outputs(model, inputs):
    with torch.no_grad():
        result = model(*inputs)
    if isinstance(result, dict):
        result = result["logits"]
    return result if isinstance(result, tuple) else (result,)


def same(found, expected):
    torch.testing.assert_close(*([y for y in ys if y is not None] for ys in (found, expected)))


def offloads(model):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert "_old_forward" in vars(model.model.norm)


def check(name, wrap):
    """A model works before and after `unswap`, if `wrap` is called between."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, inputs = make().eval(), inputs()
    stock = outputs(model, inputs)
    assert onepass.swap(model).swapped
    wrap(model)
    same(outputs(model, inputs), stock)
    onepass.unswap(model)
    same(outputs(model, inputs), stock)


@pytest.mark.grid
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_works_before_and_after_unswap(name, wrapper):
    check(name, lambda model: [wrapper(module) for module in model.modules()])


def test_cpu_offload():
    check("model", offloads)


def test_the_with_block_ends_with_a_working_model():
    model, images = activated(), x(2, 64, 8, 8)
    expected = model(images)
    with onepass.swapped(model):
        wraps(model)
    assert torch.equal(model(images), expected)
