"""swap, kind "attention": torch's modules, and calls of F.scaled_dot_product_attention."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as recompute

import onepass
from onepass import numerics
from onepass.swapping import inputs
from tests.swap.foreign_attention import (
    CHECKPOINTING,
    FOUND,
    Alias,
    Base,
    Helper,
    Method,
    Plain,
    WithProcessor,
)
from tests.swap.reported import names, types

CALLS = "onepass.functional.scaled_dot_product_attention"


class Block(nn.Module):
    """Holds attention and never calls it itself."""

    def __init__(self, cls=Plain, **options):
        super().__init__()
        self.attention = cls(**options)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def attentions_in(calls) -> int:
    return sum(call["op"].startswith("attention") for call in calls)


# ---------------------------------------------------------------- call sites


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_calls_are_found_and_redirected(cls):
    model, x = Block(cls), torch.randn(2, 7, 16)
    stock, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    state, signature = list(model.state_dict()), inspect.signature(model.attention.forward)
    report = onepass.swap(model, kinds="attention", strict=True)
    assert names(report.swapped) == {"attention"}, report
    assert report.swapped[0]["to"] == CALLS and report.swapped[0]["kind"] == "attention"
    with onepass._dispatch_log.record() as calls:
        y = model(x)
    assert attentions_in(calls) == 1
    numerics.assert_close(y, exact(x.double()), stock(x))
    assert report.verify(x).ok
    assert isinstance(model.attention, cls) and type(model.attention).__name__ == cls.__name__
    assert inspect.signature(model.attention.forward) == signature
    assert list(model.state_dict()) == state
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert types(twin) == types(model) and torch.equal(twin(x), y)
    assert onepass.unswap(model) == ["attention"] and types(model) == types(stock)
    with onepass._dispatch_log.record() as calls:
        assert torch.equal(model(x), stock(x))
    assert not calls


def test_torchs_namespace_is_untouched():
    before = F.scaled_dot_product_attention
    model = Plain()
    onepass.swap(model)
    seen = []
    model.qkv.register_forward_hook(lambda *_: seen.append(F.scaled_dot_product_attention))
    model(torch.randn(2, 7, 16))
    assert seen == [before] and F.scaled_dot_product_attention is before
    q = torch.randn(1, 1, 3, 4)
    with onepass._dispatch_log.record() as calls:
        F.scaled_dot_product_attention(q, q, q)
    assert not calls


def test_only_the_swapped_instance_is_redirected():
    model = nn.Sequential(Plain(), Plain())
    onepass.swap(model, include="0")
    x = torch.randn(2, 7, 16)
    for module, expected in zip(model, (1, 0), strict=True):
        with onepass._dispatch_log.record() as calls:
            module(x)
        assert attentions_in(calls) == expected


class CallsBesideItsChild(Plain):
    def __init__(self):
        super().__init__()
        self.child = Plain()

    def forward(self, x):
        return super().forward(self.child(x))


def test_innermost_modules_are_swapped_and_containers_for_their_own_calls():
    model = nn.Sequential(Block(), CallsBesideItsChild())
    report = onepass.swap(model, kinds="attention")
    assert names(report.swapped) == {"0.attention", "1", "1.child"}
    with onepass._dispatch_log.record() as calls:
        model(torch.randn(2, 7, 16))
    assert attentions_in(calls) == 3


class CallsAround(CallsBesideItsChild):
    def __init__(self, child):
        super().__init__()
        self.child = child


@pytest.mark.parametrize("child", [Plain, CHECKPOINTING[0]], ids=["excluded", "refused"])
def test_a_container_of_one_that_keeps_its_calls_keeps_its_own(child):
    model = nn.Sequential(Plain(), CallsAround(CallsAround(child())))
    report = onepass.swap(model, kinds="attention", exclude="1.child.child")
    assert names(report.swapped) == {"0"}
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert reasons["1.child"] == "holds '1.child.child', which keeps its attention as it is"
    assert reasons["1"] == "holds '1.child', which keeps its attention as it is"
    with onepass._dispatch_log.record() as calls:
        model(torch.randn(2, 7, 16))
    assert attentions_in(calls) == 1
    assert type(model[1].child.child) is child


def test_modes_further_out_see_the_call():
    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = Plain()
    onepass.swap(model)
    found = []
    with Names(), onepass._dispatch_log.record() as calls:
        model(torch.randn(2, 7, 16))
    assert found.count("scaled_dot_product_attention") == 1 and attentions_in(calls) == 1


def test_other_threads_are_not_redirected():
    inside = []

    class Threaded(Plain):
        def forward(self, x):
            q = torch.randn(1, 1, 3, 4)
            thread = threading.Thread(
                target=lambda: inside.append(F.scaled_dot_product_attention(q, q, q))
            )
            with onepass._dispatch_log.record() as calls:
                thread.start()
                thread.join()
            assert not calls
            return super().forward(x)

    model = Threaded()
    assert onepass.swap(model).swapped
    model(torch.randn(2, 7, 16))
    assert len(inside) == 1


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
    model, x = Restless(), torch.randn(2, 7, 16)
    expected = model(x)
    report = onepass.swap(model)
    with onepass._dispatch_log.record() as calls:
        assert torch.equal(model(x), expected)
    assert not calls
    assert any("CausalBias" in note and "512" in note for note in report.notes)
    assert any("microsecond" in note and "own forward" in note for note in report.notes)


def test_an_exception_inside_ends_the_redirection():
    model = Plain()
    onepass.swap(model)
    with pytest.raises(ValueError, match="not enough values"):
        model(torch.randn(7, 16))
    q = torch.randn(1, 1, 3, 4)
    with onepass._dispatch_log.record() as calls:
        F.scaled_dot_product_attention(q, q, q)
    assert not calls


def test_dropout_follows_manual_seed_and_is_noted():
    model, x = Plain(p=0.5), torch.randn(2, 7, 16)
    report = onepass.swap(model)
    assert any("reproducible from manual_seed and not equal" in note for note in report.notes)
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), y) and not torch.equal(model(x), y)


# ---------------------------------------------------------------- refused, skipped, unknown


@pytest.mark.parametrize("cls", CHECKPOINTING, ids=lambda cls: cls.__name__)
def test_checkpoints_inside_are_refused(cls, torchs_products):
    model = nn.Sequential(cls())
    report = onepass.swap(model)
    (entry,) = report.skipped
    assert entry["reason"].startswith("checkpoints inside its forward") and not report.swapped
    with pytest.raises(RuntimeError, match="strict.*checkpoints inside"):
        onepass.swap(model, strict=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_it_recompute_with_it(reentrant):
    model = Block(p=0.5)
    onepass.swap(model)
    x = torch.randn(2, 7, 16, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        y = recompute(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        with onepass._dispatch_log.record() as calls:
            y.square().sum().backward()
        assert attentions_in(calls) == 1 + checkpointed
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))


class OwnAttention(Base):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.join((q @ k.mT) @ v)


class OwnMultihead(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class OwnBlock(nn.TransformerEncoderLayer):
    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return x


def wide_heads():
    return nn.MultiheadAttention(520, 1)


def forward_on_the_instance():
    module = Plain()
    module.forward = lambda x: x
    return module


def parametrized():
    module = nn.MultiheadAttention(8, 2)
    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", nn.Identity())
    return module


@pytest.mark.parametrize(
    ("module", "section", "reason"),
    [
        (OwnAttention, "unknown", "calls no F.scaled_dot_product_attention itself"),
        (lambda: OwnMultihead(8, 2), "unknown", "a subclass with a forward of its own"),
        (wide_heads, "skipped", "its head_dim, 520, is above 512"),
        (lambda: OwnBlock(8, 2), "skipped", "its class overrides _sa_block"),
        (forward_on_the_instance, "skipped", "its forward is replaced on the instance"),
        (parametrized, "skipped", "is parametrized"),
    ],
)
def test_kept_with_a_reason(module, section, reason):
    model = nn.ModuleDict({"it": module()})
    before = type(model["it"])
    report = onepass.swap(model, kinds="attention")
    entries = {entry["name"]: entry for entry in getattr(report, section)}
    assert reason in entries["it"]["reason"] and type(model["it"]) is before


def test_devices_without_kernels_are_refused(monkeypatch, torchs_products):
    has_kernels = onepass.swapping.matchers.has_kernels
    assert has_kernels("cpu", "attention") and not has_kernels("mps", "attention")
    monkeypatch.setattr(
        onepass.swapping.matchers, "has_kernels", lambda device, kind: kind != "attention"
    )
    report = onepass.swap(nn.Sequential(Plain(), nn.MultiheadAttention(8, 2), nn.LayerNorm(8)))
    assert names(report.swapped) == {"2"} and names(report.skipped) == {"0", "1"}
    assert {"onepass has no kernels for its device, cpu, in this build"} == {
        entry["reason"] for entry in report.skipped
    }


def test_other_devices_run_torchs_attention(monkeypatch):
    model = nn.Sequential(Plain(), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    stock, x = copy.deepcopy(model), torch.randn(2, 7, 16)
    onepass.swap(model, kinds="attention")
    monkeypatch.setattr(inputs, "_ATTENTION_DEVICES", frozenset())
    with torch.no_grad(), onepass._dispatch_log.record() as calls:
        assert torch.equal(model(x), stock(x))
    assert not calls


# ---------------------------------------------------------------- torch's modules


def transformer():
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True)


def test_torchs_modules_are_swapped_whole():
    model = transformer()
    before = types(model)
    dry = onepass.swap(model, kinds="attention", dry_run=True)
    assert types(model) == before
    report = onepass.swap(model, kinds="attention", strict=True)
    assert dry.to_dict() == report.to_dict()
    assert {entry["name"]: entry["to"] for entry in report.swapped} == {
        "encoder.layers.0": "onepass.nn.TransformerEncoderLayer",
        "encoder.layers.0.self_attn": "onepass.nn.MultiheadAttention",
        "decoder.layers.0": "onepass.nn.TransformerDecoderLayer",
        "decoder.layers.0.self_attn": "onepass.nn.MultiheadAttention",
        "decoder.layers.0.multihead_attn": "onepass.nn.MultiheadAttention",
    }
    assert isinstance(model.encoder.layers[0], onepass.nn.TransformerEncoderLayer)
    assert isinstance(model.decoder.layers[0].self_attn, onepass.nn.MultiheadAttention)
    again = onepass.swap(model, kinds="attention")
    assert again.swapped == report.swapped and types(model) != before
    assert len(onepass.unswap(model)) == 5 and types(model) == before


def test_transformer_computes_the_same_and_keeps_its_state():
    model = transformer()
    stock, exact = copy.deepcopy(model), copy.deepcopy(model).double().eval()
    report = onepass.swap(model)
    src, tgt = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    assert report.verify(src, tgt).ok
    assert list(model.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(model.state_dict())
    model.load_state_dict(stock.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert types(twin) == types(model)
        twin.eval()
        with torch.no_grad(), onepass._dispatch_log.record() as calls:
            y = twin(src, tgt)
        assert attentions_in(calls) == 3
        numerics.assert_close(y, exact(src.double(), tgt.double()), stock.eval()(src, tgt))
    assert len(onepass.unswap(twin)) == len(report.swapped) and types(twin) == types(stock)


class QuietMultihead(nn.MultiheadAttention):
    """A subclass that inherits forward."""


def test_subclasses_that_leave_forward_alone():
    model = QuietMultihead(16, 2, batch_first=True)
    onepass.swap(model)
    x = torch.randn(2, 7, 16)
    with onepass._dispatch_log.record() as calls:
        model(x, x, x, need_weights=False)
    assert attentions_in(calls) == 1 and isinstance(model, QuietMultihead)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model) and onepass.unswap(twin) and type(twin) is QuietMultihead


def test_need_weights_is_said_where_a_caller_may_ask_for_them():
    def said(model):
        return [note for note in onepass.swap(model).notes if "need_weights" in note]

    (note,) = said(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "encoder": transformer()}))
    assert note.startswith("a: only calls with need_weights=False gain")
    assert not said(transformer())
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    onepass.swap(model)
    x = torch.randn(2, 7, 16)
    with onepass._dispatch_log.record() as calls:
        assert model(x, x, x)[1].shape == (2, 7, 7)
    assert not calls


def test_dropout_of_attention_is_noted_where_there_is_any():
    def noted(p):
        notes = onepass.swap(nn.MultiheadAttention(8, 2, dropout=p)).notes
        return any("attention that drops weights" in note for note in notes)

    assert noted(0.1) and not noted(0.0)


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
quiet = pytest.mark.filterwarnings("ignore:.*nested tensor", "ignore:enable_nested_tensor")


@quiet
@pytest.mark.parametrize("kinds", [("attention",), ("norm", "attention", "dropout")], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_inference_runs_the_swapped_modules(kinds, padded):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    stock, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(2, 5, 16)
    report = onepass.swap(model, kinds=kinds)
    (note,) = (note for note in report.notes if note.startswith("layers.*: in inference too"))
    assert "padding comes back as zeros" in note
    mask = PADDING if padded else None
    with torch.no_grad():
        with onepass._dispatch_log.record() as calls:
            y = model(x, src_key_padding_mask=mask)
        expected = stock(x, src_key_padding_mask=mask)
        ref = exact(x.double(), src_key_padding_mask=mask)
    assert attentions_in(calls) == 2
    assert sum("norm" in call["op"] for call in calls) == (4 if "norm" in kinds else 0)
    numerics.assert_close(y, ref, expected)
    assert not padded or (y[PADDING] == 0).all()


def test_excluded_layers_are_named_as_bypassed():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    notes = onepass.swap(model, exclude="layers.?").notes
    assert any(note.startswith("layers.*: in eval mode without gradients") for note in notes)
    onepass.unswap(model)
    assert not any("without gradients" in note for note in onepass.swap(model).notes)


# ---------------------------------------------------------------- torch


class Unflattened(Plain):
    """Splits heads as diffusers does; Dynamo cannot trace the method under another mode."""

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()


class BesideTorchs(Plain):
    """Calls the function and holds torch's module, which is called below its redirection."""

    def __init__(self, **options):
        super().__init__(**options)
        self.other = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.other(x, x, x, need_weights=False)[0] + super().forward(x)


@pytest.mark.parametrize(
    "cls",
    [
        Plain, Helper, BesideTorchs,
        *(pytest.param(cls, marks=pytest.mark.slow)
          for cls in (Alias, Method, WithProcessor, Unflattened)),
    ],
)  # fmt: skip
def test_compile_fullgraph(cls):
    torch._dynamo.reset()
    model = Block(cls)
    onepass.swap(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9):
        x = torch.randn(2, seq, 16)
        results = []
        for m in (model, compiled):
            y = m(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_compiled_code_calls_the_operator_with_dropout():
    torch._dynamo.reset()
    model = nn.Sequential(Block(p=0.5), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    onepass.swap(model)
    x = torch.randn(2, 7, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for m in (model, compiled):
        torch.manual_seed(4)
        with onepass._dispatch_log.record() as calls:
            results.append(m(x))
        assert attentions_in(calls) == 2
    torch.testing.assert_close(*results)


def test_export():
    model, x = Block().eval(), torch.randn(2, 7, 16)
    onepass.swap(model)
    exported = torch.export.export(model, (x,))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("onepass.attention.default") == 1
    torch.testing.assert_close(exported.module()(x), model(x))


def test_autocast_gives_the_dtypes_of_stock():
    model, x = Plain(), torch.randn(2, 7, 16)
    stock = copy.deepcopy(model)
    onepass.swap(model)
    seen = []
    for m in (stock, model):
        m.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        assert y.dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 2


# ---------------------------------------------------------------- transformers

IDS = torch.arange(20).reshape(2, 10) % 32


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_transformers_attention_by_name():
    model = llama()
    padding = torch.ones_like(IDS)
    padding[1, :3] = 0
    exact = copy.deepcopy(model).double()
    expected, ref = (m(IDS, attention_mask=padding).logits for m in (model, exact))
    report = onepass.swap(model, kinds="attention")
    assert names(report.swapped) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    with onepass._dispatch_log.record() as calls:
        got = model(IDS, attention_mask=padding).logits
    assert attentions_in(calls) == 2
    rows = padding.bool()
    numerics.assert_close(got[rows], ref[rows], expected[rows])


def test_transformers_modules_that_call_it_themselves():
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.FalconModel(config).eval()
    report = onepass.swap(model)
    found = {entry["name"] for entry in report.swapped if entry["kind"] == "attention"}
    assert found == {"h.0.self_attention", "h.1.self_attention"}
    with onepass._dispatch_log.record() as calls:
        model(IDS)
    assert attentions_in(calls) == 2 and report.verify(IDS).ok
