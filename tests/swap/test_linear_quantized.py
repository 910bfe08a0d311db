"""Linear layers and torch's dynamic quantization, in either order."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import onepass
from tests.swap.linear_calls import swap
from tests.swap.test_linear import model

pytestmark = pytest.mark.usefixtures("slow_products")


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
    """quantize_dynamic looks for the class itself and finds no swapped layer, which is said."""
    stock, ours = model(), model()
    ours.load_state_dict(stock.state_dict())
    swap(ours)
    with pytest.warns(UserWarning, match="passes over swapped linear .*unswap"):
        passed_over = quantized(ours)
    assert [type(module) for module in passed_over] == [type(module) for module in ours]
    assert not any(hasattr(module, "qconfig") for module in (*passed_over, *ours))
    onepass.unswap(ours)
    x = torch.randn(6, 24)
    assert torch.equal(quantized(ours)(x), quantized(stock)(x))


def test_a_swapped_layer_holds_its_qconfig_as_others_do():
    layer = nn.Linear(24, 48)
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    kept = layer.qconfig
    assert swap(layer).swapped and layer.qconfig is kept
    del layer.qconfig
    for missing in (lambda: layer.qconfig, lambda: delattr(layer, "qconfig")):
        with pytest.raises(AttributeError, match="qconfig"):
            missing()
    with pytest.warns(UserWarning, match="passes over"):
        layer.qconfig = None
    onepass.unswap(layer)
    assert layer.qconfig is None and vars(layer)["qconfig"] is None


def test_quantizing_other_classes_says_nothing():
    """Norms and dropouts are in none of quantize_dynamic's lists."""
    other = nn.Sequential(nn.LayerNorm(8), nn.Dropout(), nn.LSTM(8, 8))
    onepass.swap(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        assert type(quantized(other)[2]) is nn.LSTM
