"""Linear layers: taken where they are asked for and torch's products are slow, and only there."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import onepass
from onepass import numerics
from onepass.swapping import products
from onepass.swapping.products import Facts
from onepass.swapping.reasons import Reason
from tests.swap.same_model import assert_computes_the_same

SLOW = Facts("AuthenticAMD", mkl=True, bfloat16=False, float16=False)
FAST = Facts("GenuineIntel", mkl=True, bfloat16=True, float16=True)


@pytest.fixture(autouse=True)
def slow_products(monkeypatch):
    monkeypatch.setattr(products, "facts", lambda: SLOW)


def swap(model: nn.Module, **options) -> onepass.Report:
    return onepass.swap(model, kinds=("linear",), **options)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))


def test_only_where_they_are_asked_for():
    stock = model()
    report = onepass.swap(stock)
    assert not report.swapped and not report.skipped and type(stock[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_swapped_and_back(dtype):
    stock = model().to(dtype)
    ours = copy.deepcopy(stock)
    report = swap(ours)
    assert [entry["name"] for entry in report.swapped] == ["0", "2"]
    assert isinstance(ours[0], onepass.nn.Linear) and isinstance(ours[0], nn.Linear)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    x = torch.randn(30, 24, dtype=dtype)
    assert_computes_the_same(ours, stock, x)
    (call,) = onepass.explain(ours[0], x).calls
    assert call["kernel"] == "linear_kernel"
    onepass.unswap(ours)
    assert type(ours[0]) is type(ours[2]) is nn.Linear
    assert torch.equal(ours(x), stock(x))


def test_gradients_are_those_of_the_numerics_rule():
    stock = model()
    ours, wide = copy.deepcopy(stock), copy.deepcopy(stock).double()
    swap(ours)
    x = torch.randn(64, 24)
    for one in (stock, ours, wide):
        one(x.to(next(one.parameters()).dtype)).square().sum().backward()
    for ref, base, got in zip(
        wide.parameters(), stock.parameters(), ours.parameters(), strict=True
    ):
        numerics.assert_close(got.grad, ref.grad, base.grad)


@pytest.mark.parametrize(
    ("dtype", "facts", "text"),
    [
        (torch.float32, SLOW, None),
        (torch.float32, SLOW._replace(mkl=False), "float32 products, by BLAS on AuthenticAMD"),
        (torch.float32, FAST, "float32 products, by MKL on GenuineIntel"),
        (torch.bfloat16, FAST._replace(bfloat16=False), None),
        (torch.bfloat16, FAST, "bfloat16 products, by oneDNN"),
        (torch.float16, FAST._replace(float16=False), None),
        (torch.float16, FAST, "float16 products, by oneDNN"),
        (torch.float64, SLOW, "torch.float64 products"),
    ],
    ids=str,
)
def test_the_rule(dtype, facts, text, monkeypatch):
    monkeypatch.setattr(products, "facts", lambda: facts)
    report = swap(nn.Linear(8, 8, dtype=dtype))
    if text is None:
        assert len(report.swapped) == 1 and not report.skipped
    else:
        (entry,) = report.skipped
        assert entry["reason"] == f"torch is as fast here in {text}"
        assert entry["reason"].kind is Reason.AS_FAST and not report.swapped


def test_facts_of_this_machine(monkeypatch):
    monkeypatch.undo()
    products.facts.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    held = products.facts()
    assert not held.bfloat16 and not held.float16
    products.facts.cache_clear()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    facts = products.facts()
    assert facts.bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert facts.vendor == "" or facts.vendor in open("/proc/cpuinfo").read()


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Subclass(nn.Linear):
    pass


def test_what_is_left_as_it_is():
    lazy = nn.LazyLinear(8)
    instance = nn.Linear(8, 8)
    instance.forward = lambda x: x
    own = nn.ModuleDict(
        dict(
            own=OwnForward(8, 8),
            normed=parametrizations.weight_norm(nn.Linear(8, 8)),
            instance=instance,
            lazy=lazy,
            subclass=Subclass(8, 8),
            ours=onepass.nn.Linear(8, 8),
            attention=nn.MultiheadAttention(8, 2),  # reads the weight of its out_proj alone
        )
    )
    report = swap(own)
    assert [entry["name"] for entry in report.swapped] == ["subclass"]
    kinds = {entry["name"]: entry["reason"].kind for entry in report.skipped}
    assert kinds == {
        "own": Reason.OWN_FORWARD,
        "normed": Reason.PARAMETRIZED,
        "instance": Reason.INSTANCE_FORWARD,
        "lazy": Reason.PARAMETER_CLASS,
    }
    assert type(own.subclass).__name__ == "Subclass" and isinstance(own.subclass, Subclass)


def test_tied_weights_hooks_and_pickles():
    tied = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    tied[1].weight = tied[0].weight
    called = []
    tied[1].register_forward_hook(lambda *_: called.append(1))
    swap(tied)
    tied(torch.tensor([3, 4])).sum().backward()
    assert tied[1].weight is tied[0].weight and called == [1]
    one = nn.Linear(8, 3)
    swap(one)
    again = pickle.loads(pickle.dumps(one))
    x = torch.randn(2, 8)
    assert type(again) is type(one) and torch.equal(again(x), one(x))


def test_under_autocast_and_compiled():
    stock = model()
    ours = copy.deepcopy(stock)
    swap(ours)
    x = torch.randn(6, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype is stock(x).dtype is torch.bfloat16
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x), ours(x))
