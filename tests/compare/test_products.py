"""Linear layers in `onepass compare`: their time, operations and speed."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass._policy import products
from onepass.tools.compare import attribution
from onepass.tools.compare.attribution import Timeline
from onepass.tools.compare.products import products_of
from tests.compare.cases import settings_of


def test_swapped_linear_layers_are_linear(monkeypatch):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    slow = products.Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
    monkeypatch.setattr(products, "facts", lambda: slow)
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(8, 8))
    assert len(onepass.swap(model).swapped) == 2
    timeline = Timeline(torch.device("cpu"))
    with timeline.watch(model):
        timeline.enter_phase("forward")
        output = model(torch.randn(4, 8))
        timeline.enter_phase("backward")
    entered = [part for _, _, part in timeline._marks if part in attribution.PARTS[:6]]
    assert entered == ["linear", "linear"]
    assert timeline._owner(output.grad_fn._sequence_nr()) == "linear"


def test_operations_of_linear_layers():
    """Forward, and twice as many backward except where no gradient is needed; projections of
    MultiheadAttention count as attention."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = self.two(self.one(x))
            return self.attend(x, x, x, need_weights=False)[0]

    model = Model()
    model.two.weight.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 10, 8)).sum().backward()
    product = 2 * 40 * 8 * 16
    counted = products_of(counter, model, settings_of())
    assert counted.operations == 2 * product + 2 * product  # no dX of `one`, no dW of `two`
    assert counted.ceiling > 0
    spent = {phase: dict.fromkeys(attribution.PARTS, 0.5) for phase in attribution.PHASES}
    assert counted.rate(spent) == pytest.approx(4 * product / 1.5e-3 / 1e9)
    assert counted.rate(None) is None
