"""Norms whose forward holds its eps as a number, such as nanoGPT's."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.swapping.reasons import Reason

COLS, EPS = 64, 1e-5


class LayerNorm(nn.Module):
    def __init__(self, cols=COLS, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.bias = nn.Parameter(torch.zeros(cols)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class RMSNorm(LayerNorm):
    def forward(self, x):
        scaled = x * 0.5 * 2.0  # other numbers than eps
        return scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class NormOfGlobal(LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, EPS) * 1.0


class NormOfItsClass(LayerNorm):
    epsilon = 1e-5

    def forward(self, x):
        unused = 1e-5
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.epsilon + 0 * unused)


class NormWithEpsOutside(LayerNorm):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * self.weight


REFUSED = {
    NormOfGlobal: (Reason.NO_EPS, ""),
    NormOfItsClass: (Reason.PROBE, "its eps is no number in its forward, which holds 1e-05"),
    NormWithEpsOutside: (Reason.PROBE, "differs from rms_norm for unit inputs"),
}


def small(seed=0):
    return 3e-3 * torch.randn(7, COLS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (LayerNorm, "layer_norm, eps 1e-05 in its forward"),
        (lambda: LayerNorm(bias=False), "layer_norm, eps 1e-05 in its forward"),
        (lambda: RMSNorm(bias=False), "rms_norm, eps 1e-06 in its forward"),
    ],
)
def test_a_number_in_the_forward_is_taken(make, told):
    norm = make()
    stock = copy.deepcopy(norm)
    report = onepass.swap(norm, strict=True)
    assert report.swapped[0]["to"] == f"onepass {told}"
    assert report.verify(small())
    x = small().requires_grad_()
    torch.testing.assert_close(norm(x), stock(x))  # with another eps it is not near
    with torch.no_grad():
        assert pickle.loads(pickle.dumps(norm))(x).equal(norm(x))


@pytest.fixture
def editable(monkeypatch):
    """A class whose forward is put back at the end."""
    code = LayerNorm.forward.__code__
    yield lambda eps: code.replace(
        co_consts=tuple(eps if constant == 1e-5 else constant for constant in code.co_consts)
    )
    LayerNorm.forward.__code__ = code


@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_that_is_changed_later_counts(editable, compiled):
    """As reloading of modules in notebooks changes it."""
    norm, stock = LayerNorm(), LayerNorm()
    onepass.swap(norm)
    call = torch.compile(norm, backend="eager", fullgraph=True) if compiled else norm
    call(small())
    LayerNorm.forward.__code__ = editable(0.5)
    torch.testing.assert_close(call(small()), stock(small()))
    assert stock(small()).abs().max() < 0.1


def test_a_model_is_told_the_norms_that_torch_keeps_in_small_calls(monkeypatch):
    from onepass._policy import small_calls

    monkeypatch.setattr(small_calls, "norm_is_small", lambda input: True)
    norm = LayerNorm()
    assert small_calls.NORM_NOTE in onepass.swap(norm).notes
    assert onepass.explain(norm, small()).calls == []
