"""A model of torchtitan whose norms and optimizer its overrides replace."""

from __future__ import annotations

import copy

import pytest
import torch

import onepass
from onepass import numerics
from onepass._ops.dispatch_log import record

pytest.importorskip(
    "torchtitan.models.llama3", reason="torchtitan is not installed", exc_type=ImportError
)
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3 import llama3_configs

from onepass.integrations.torchtitan import optimizer


@pytest.fixture
def config():
    config = llama3_configs["debugmodel"]("varlen")
    config.layers = config.layers[:2]
    return config


def norms(config):
    torch.manual_seed(0)
    model = config.build()
    found = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.RMSNorm)}
    for norm in found.values():
        torch.nn.init.normal_(norm.weight)
    return model, found


def test_norms(config):
    """Its attention runs on CUDA alone, so each norm is called by itself."""
    stock, base = norms(config)
    names = ["onepass.integrations.torchtitan.rms_norm"]
    lines = apply_overrides(OverrideConfig(imports=names), config)
    model, found = norms(config)
    assert len(lines) == len(found) == 5 and list(found) == list(base)
    assert list(model.state_dict()) == list(stock.state_dict())
    for name, norm in found.items():
        assert type(norm).__module__ == "onepass.integrations.torchtitan"
        norm.weight.data.copy_(base[name].weight)
        x = torch.randn(2, 8, 256)

        def results(module, x):
            x = x.clone().requires_grad_()
            y = module(x)
            return y, *torch.autograd.grad(y.sin().sum(), [x, module.weight])

        with record() as calls:
            ours = results(norm, x)
        assert "rms_norm" in [call["op"] for call in calls]
        ref = results(copy.deepcopy(base[name]).double(), x.double())
        for mine, right, torchs in zip(ours, ref, results(base[name], x), strict=True):
            numerics.assert_close(mine, right, torchs)


def test_optimizer(config):
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "fused": False}
    )
    stock = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    container = optimizer(stock, max_grad_norm=1.0).build(model_parts=[model])
    (found,) = container.optimizers
    assert type(found) is onepass.optim.AdamW and found.max_grad_norm == 1.0
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    container.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert float(found.grad_norm) > 1.0
