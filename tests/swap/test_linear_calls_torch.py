"""Redirected calls of F.linear beside the rest of torch, and in whole models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import onepass
from onepass import _dispatch_log
from onepass.swapping.reasons import Reason
from tests.swap.foreign_linear import Base, OwnAttention, Plain
from tests.swap.linear_calls import CALLS, count, swap
from tests.swap.reported import types

pytestmark = pytest.mark.usefixtures("slow_products")


# ---- inputs that are not onepass's ---------------------------------------------------------------


def test_what_onepass_does_not_compute_runs_torchs():
    class Restless(Base):
        def forward(self, x):
            nested = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)
            return (
                F.linear(nested, self.weight).values().sum()
                + F.linear(x, self.weight[0]).sum()
                + F.linear(x, self.weight.to_sparse()).sum()
                + F.linear(x, self.weight, torch.ones(1)).sum()
            )

    model, x = Restless(), torch.randn(5, 16)
    with torch.no_grad():
        expected = model(x)
        assert swap(model).swapped
        with _dispatch_log.record() as calls:
            assert torch.equal(model(x), expected)
    assert not calls


def test_modes_further_out_see_the_call():
    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model, found = Plain(), []
    swap(model)
    with Names():
        assert count(lambda: model(torch.randn(4, 16))) == 1
    assert found.count("linear") == 1


# ---- torch: transforms, checkpoints, graphs ------------------------------------------------------


def test_compiled_beside_attention():
    model = OwnAttention()
    stock = copy.deepcopy(model)
    onepass.swap(model)
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(compiled(x), stock(x))
    assert len(graphs) == 1
    with torch.no_grad():
        torch._dynamo.reset()
        compiled(x)
    assert "onepass.linear_forward" in graphs[-1]


@pytest.mark.filterwarnings("ignore")
def test_traced():
    model, x = Plain(), torch.randn(4, 16)
    swap(model)
    traced = torch.jit.trace(model, x)
    assert "onepass::linear" in str(traced.inlined_graph)
    longer = torch.randn(7, 16)
    assert torch.equal(traced(longer), model(longer))
    graph = torch.fx.symbolic_trace(nn.Sequential(model))
    assert torch.equal(graph(longer), model(longer)) and count(lambda: graph(longer)) == 1


# ---- whole models --------------------------------------------------------------------------------


MIXTRAL = dict(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
)  # fmt: skip


def mixtral(experts: str | None) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)).eval()
    if experts:
        model.set_experts_implementation(experts)
    return model


def test_the_experts_of_mixtral():
    ids = torch.arange(20).reshape(2, 10) % 32
    stock, ours = mixtral("eager"), mixtral("eager")
    report = onepass.swap(ours)
    calls = {entry["name"] for entry in report.swapped if entry["to"] == CALLS}
    parts = ("mlp.experts", "mlp.gate")
    assert calls == {f"model.layers.{layer}.{part}" for layer in range(2) for part in parts}
    assert report.verify({"input_ids": ids, "labels": ids}).ok
    layer, x = ours.model.layers[0].mlp, torch.randn(2, 10, 16)
    assert count(lambda: layer(x)) > 2
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, **options), stock.generate(ids, **options))
    onepass.unswap(ours)
    assert types(ours) == types(stock) and torch.equal(ours(ids).logits, stock(ids).logits)


def test_experts_that_transformers_computes_otherwise():
    model = mixtral(None)
    assert model.config._experts_implementation != "eager"
    report = onepass.swap(model)
    skipped = {e["name"]: e["reason"] for e in report.skipped if "experts" in e["name"]}
    assert len(skipped) == 2 and all(r.kind is Reason.EXPERTS for r in skipped.values())
    assert "set_experts_implementation" in next(iter(skipped.values()))


def test_adapters_that_multiply_themselves():
    """peft's DeLoRA: F.linear with parameters that are in lists."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.DeloraConfig(r=2, target_modules=["q_proj"], init_weights=False)
    model = peft.get_peft_model(mixtral("eager"), config).eval()
    ids = torch.arange(20).reshape(2, 10) % 32
    expected = model(ids).logits
    report = onepass.swap(model)
    calls = [e["name"] for e in report.swapped if e["from"].startswith("peft.")]
    assert calls == [f"base_model.model.model.layers.{n}.self_attn.q_proj" for n in range(2)]
    layer, x = model.get_submodule(calls[0]), torch.randn(2, 10, 16)
    assert count(lambda: layer(x)) == 1 + 2  # the layer that it wraps, and its own
    assert report.verify({"input_ids": ids, "labels": ids}).ok
    torch.testing.assert_close(model(ids).logits, expected)
