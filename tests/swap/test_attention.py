"""swap, kind "attention": torch's modules, and calls of F.scaled_dot_product_attention.

What every kind of swap does is tested on these modules in test_kinds.
"""

import copy

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.swapping import inputs
from tests.swap.attention_by_hand import NanoGPT
from tests.swap.foreign_attention import Base, Plain
from tests.swap.linear_calls import Block
from tests.swap.reported import attentions, names, operators, types

X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))


# ---- call sites ----------------------------------------------------------------------------------


def test_torchs_namespace_is_untouched():
    """It stays during a call, after it, and after one that raises."""
    before, model, seen = F.scaled_dot_product_attention, Plain(), []
    onepass.swap(model)
    model.qkv.register_forward_hook(lambda *_: seen.append(F.scaled_dot_product_attention))
    model(X)
    with pytest.raises(ValueError, match="not enough values"):
        model(X[0])
    assert seen == [before] and F.scaled_dot_product_attention is before
    q = torch.randn(1, 1, 3, 4)
    assert not operators(lambda: F.scaled_dot_product_attention(q, q, q))


class CallsBesideItsChild(Plain):
    def __init__(self):
        super().__init__()
        self.child = Plain()

    def forward(self, x):
        return super().forward(self.child(x))


def test_innermost_modules_are_swapped_and_containers_for_their_own_calls():
    model = nn.Sequential(Block(Plain()), CallsBesideItsChild(), Plain())
    report = onepass.swap(model, kinds="attention", exclude="2")
    assert names(report.swapped) == {"0.inner", "1", "1.child"}
    found = [attentions(lambda module=module: module(X)) for module in model]
    assert found == [1, 2, 0] and attentions(lambda: model(X)) == 3


class Restless(Base):
    def forward(self, x):
        q, k, v = self.split(x)
        bias = torch.nn.attention.bias.causal_lower_right(x.shape[1], x.shape[1])
        nested = torch.nested.nested_tensor(list(q.unbind()), layout=torch.jagged)
        wide = torch.ones(1, 1, 2, 520)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum()
            + F.scaled_dot_product_attention(nested, nested, nested).values().sum()
            + F.scaled_dot_product_attention(wide, wide, wide).sum()
        )


def test_what_onepass_does_not_compute_runs_torchs(torchs_products):
    model = Restless()
    expected = model(X)
    report = onepass.swap(model)
    assert torch.equal(model(X), expected) and not operators(lambda: model(X))
    assert any("CausalBias" in note and "512" in note for note in report.notes)
    assert any("microsecond" in note and "own forward" in note for note in report.notes)


def test_other_devices_run_torchs_attention(monkeypatch):
    model = nn.Sequential(Plain(), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    stock = copy.deepcopy(model)
    onepass.swap(model, kinds="attention")
    monkeypatch.setattr(inputs, "_ATTENTION_DEVICES", frozenset())
    with torch.no_grad():
        assert torch.equal(model(X), stock(X)) and not operators(lambda: model(X))


# ---- torch's modules -----------------------------------------------------------------------------


def transformer():
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True)


def test_torchs_modules_are_swapped_whole():
    model = transformer()
    before = types(model)
    dry = onepass.swap(model, kinds="attention", dry_run=True)
    assert types(model) == before
    report = onepass.swap(model, kinds="attention", strict=True)
    assert dry.to_dict() == report.to_dict()
    assert report.verify(torch.randn(2, 5, 16), X).ok
    assert {entry["name"]: entry["to"] for entry in report.swapped} == {
        "encoder.layers.0": "onepass.nn.TransformerEncoderLayer",
        "encoder.layers.0.self_attn": "onepass.nn.MultiheadAttention",
        "decoder.layers.0": "onepass.nn.TransformerDecoderLayer",
        "decoder.layers.0.self_attn": "onepass.nn.MultiheadAttention",
        "decoder.layers.0.multihead_attn": "onepass.nn.MultiheadAttention",
    }
    assert len(onepass.unswap(model)) == 5 and types(model) == before


def test_need_weights_is_said_where_a_caller_may_ask_for_them():
    def said(model):
        return [note for note in onepass.swap(model).notes if "need_weights" in note]

    (note,) = said(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "encoder": transformer()}))
    assert note.startswith("a: only calls with need_weights=False gain")
    assert not said(transformer())
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    onepass.swap(model)
    assert model(X, X, X)[1].shape == (2, 7, 7) and not operators(lambda: model(X, X, X))


@pytest.mark.parametrize("make", [lambda p: nn.MultiheadAttention(16, 2, dropout=p), NanoGPT])
def test_dropout_of_attention_is_noted_where_there_is_any(make):
    def noted(p):
        notes = onepass.swap(make(p), kinds="attention").notes
        return any("attention that drops weights" in note for note in notes)

    assert noted(0.1) and not noted(0.0)
