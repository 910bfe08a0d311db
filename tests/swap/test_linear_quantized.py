"""Linear layers and torch's dynamic quantization, in either order."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import onepass
from onepass._ops import products
from tests.swap.test_linear import SLOW, model, swap


@pytest.fixture(autouse=True)
def slow_products(monkeypatch):
    monkeypatch.setattr(products, "facts", lambda: SLOW)


def quantized(stock: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(stock, {nn.Linear}, dtype=torch.qint8)


def test_quantized_layers_are_left_alone():
    stock = quantized(model())
    x = torch.randn(6, 24)
    expected = stock(x)
    report = onepass.swap(stock)
    assert not report.swapped and torch.equal(stock(x), expected)


def test_layers_are_quantized_after_unswap():
    """quantize_dynamic looks for the class itself and finds no swapped layer."""
    stock, ours = model(), model()
    ours.load_state_dict(stock.state_dict())
    report = swap(ours)
    assert any("quantize_dynamic" in note for note in report.notes)
    assert [type(module) for module in quantized(ours)] == [type(module) for module in ours]
    onepass.unswap(ours)
    x = torch.randn(6, 24)
    assert torch.equal(quantized(ours)(x), quantized(stock)(x))
