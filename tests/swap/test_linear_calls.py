"""swap, kind "linear": modules that hold weights and call F.linear, also beside attention, in the
rest of torch, and in whole models."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass import _dispatch_log
from onepass._policy import small_calls
from onepass.swapping.reasons import Reason
from tests.swap.foreign_linear import (
    Base,
    CheckpointsInside,
    Experts,
    LongName,
    OwnAttention,
    Plain,
    TiedHead,
)
from tests.swap.linear_calls import CALLS, FAST, SLOW, Block, count, set_facts, swap
from tests.swap.reported import attentions, names, types

pytestmark = pytest.mark.usefixtures("slow_products", "probed_once")


LEAST = dict(small_calls.LEAST_LINEAR_CALLS)  # the fixture of all tests takes them away


# ---- call sites ----------------------------------------------------------------------------------


def test_only_the_swapped_instance_is_redirected_and_only_in_its_thread():
    model, x = nn.Sequential(Plain(), Plain()), torch.randn(4, 16)
    swap(model, include="0")
    assert [count(lambda m=module: m(x)) for module in model] == [1, 0]
    seen = []

    class Threaded(Plain):
        def forward(self, x):
            run = lambda: seen.append(F.linear(x, self.weight))  # noqa: E731
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return x

    model = Threaded()
    assert swap(model).swapped
    assert not count(lambda: model(x)) and len(seen) == 1


def test_an_exception_inside_ends_the_redirection():
    model, x = Plain(), torch.randn(4, 16)
    swap(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5))
    assert not count(lambda: F.linear(x, model.weight))


def test_a_head_tied_to_an_embedding():
    model, ids = TiedHead(), torch.arange(20).reshape(2, 10)
    stock = copy.deepcopy(model)
    report = onepass.swap(model, strict=True)
    linear = {entry["name"] for entry in report.swapped if entry["kind"] == "linear"}
    assert linear == {"", "body.1"}
    assert count(lambda: model(ids)) == 2
    assert report.verify(ids).ok
    torch.testing.assert_close(model(ids), stock(ids))


# ---- the rule ------------------------------------------------------------------------------------


def test_the_dtype_at_the_call_decides(monkeypatch):
    set_facts(monkeypatch, SLOW._replace(bfloat16=True))
    model, x = Plain(), torch.randn(4, 16)
    swap(model)
    assert count(lambda: model(x)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert not count(lambda: model(x))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert not count(lambda: model.bfloat16()(x[:1].bfloat16()))


def test_small_calls_run_their_own_forward(one_thread, monkeypatch):
    """By the rows of the largest tensor, and the largest weight of the module."""
    monkeypatch.setattr(small_calls, "LEAST_LINEAR_CALLS", LEAST)
    modes = []

    class Watched(Plain):
        def forward(self, x, ids=None):
            modes.append(torch._C._len_torch_function_stack())
            return super().forward(x)

    model = Watched(64)
    report = swap(model)
    assert any("a microsecond longer" in note for note in report.notes)
    rows = LEAST[torch.float32][0] // 64**2
    with _dispatch_log.record() as calls:
        model(torch.randn(rows - 1, 64)), model(torch.randn(rows, 64))
    (left,) = [call for call in calls if call["level"] == "torch's own"]
    assert modes == [0, 1] and "too small to gain" in left["reason"]
    modes.clear()
    model(torch.randn(1, 64), torch.zeros(2, rows, dtype=torch.long))
    torch.set_num_threads(2)
    model(torch.randn(rows, 64)), model(torch.randn(2 * rows, 64))
    model.eval()
    with torch.no_grad():
        model(torch.randn(2 * LEAST[torch.float32][1] // 64**2, 64))
    assert modes == [1, 0, 1, 1]
    modes.clear()
    model.bfloat16()
    with torch.no_grad():
        model(torch.randn(1, 64).bfloat16())
    assert modes == [0]


def test_rows_are_shared_by_a_stack_of_experts(one_thread, monkeypatch):
    module = Experts(experts=8)
    swap(module)
    work = 2 * 16**2  # of one row with one expert
    monkeypatch.setattr(small_calls, "LEAST_LINEAR_CALLS", {torch.float32: (10 * work,) * 2})
    assert count(lambda: module(torch.randn(40, 16))) > 1
    assert not count(lambda: module(torch.randn(39, 16)))


# ---- attention beside it -------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("attention", "linear"), ("linear", "attention"), None])
def test_both_kinds_of_calls(kinds):
    model, x = Block(OwnAttention()), torch.randn(2, 7, 16)
    stock = copy.deepcopy(model)
    report = onepass.swap(model, kinds=kinds, strict=True)
    found = {(e["kind"], e["to"]) for e in report.swapped if e["name"] == "inner"}
    attends = "onepass.functional.scaled_dot_product_attention"
    assert found == {("attention", attends), ("linear", CALLS)}
    assert count(lambda: model(x)) == 2 and attentions(lambda: model(x)) == 1
    assert report.verify(x).ok
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin.inner) is type(model.inner) and torch.equal(twin(x), model(x))
    again = onepass.swap(model, kinds=kinds)
    assert len(again.swapped) == len(report.swapped) and not again.skipped
    assert "inner" in onepass.unswap(model) and types(model) == types(stock)


@pytest.mark.parametrize("first", ["attention", "linear"])
def test_the_other_kind_later_asks_for_unswap(first):
    model, x = OwnAttention(), torch.randn(2, 7, 16)
    onepass.swap(model, kinds=first)
    assert (count(lambda: model(x)), attentions(lambda: model(x))) == (
        (2, 0) if first == "linear" else (0, 1)
    )
    before = type(model)
    report = onepass.swap(model)
    assert {entry["kind"] for entry in report.swapped} == {first} and type(model) is before
    (entry,) = report.skipped
    assert entry["reason"].kind is Reason.REDIRECTED
    onepass.unswap(model)
    assert {entry["kind"] for entry in onepass.swap(model).swapped} == {"attention", "linear"}


def test_each_kind_of_calls_is_ours_where_it_gains(monkeypatch):
    model, x = OwnAttention(), torch.randn(2, 7, 16)

    def ours() -> tuple[int, int]:
        return count(lambda: model(x)), attentions(lambda: model(x))

    onepass.swap(model)
    huge = {torch.float32: (1 << 40, 1 << 40)}
    with monkeypatch.context() as patch:
        patch.setattr(small_calls, "LEAST_ATTENTION", huge)
        assert ours() == (2, 0)
        patch.setattr(small_calls, "LEAST_LINEAR_CALLS", huge)
        assert ours() == (0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(small_calls, "LEAST_LINEAR_CALLS", huge)
        assert ours() == (0, 1)
    onepass.unswap(model)
    set_facts(monkeypatch, FAST)  # attention alone is swapped
    report = onepass.swap(model, strict=True)
    assert [entry["kind"] for entry in report.swapped] == ["attention"]
    set_facts(monkeypatch, SLOW)
    assert ours() == (0, 1)


class WeightsAsAttention(Plain):
    """Its name says attention, but no rule matches it."""


def test_another_kind_that_has_no_rule_does_not_hide_it():
    report = onepass.swap(WeightsAsAttention())
    assert names(report.unknown) == names(report.swapped) == {""}
    assert report.swapped[0]["kind"] == "linear"


# ---- kept as they are ----------------------------------------------------------------------------


def test_scripted_modules_are_left_alone():
    model = nn.Sequential(torch.jit.script(LongName()), Plain())
    assert names(swap(model).swapped) == {"1"}
    assert count(lambda: model(torch.randn(4, 16))) == 1
    with pytest.raises(RuntimeError, match="no module of onepass"):
        torch.jit.script(model)


class Around(Base):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return F.linear(self.inner(x), self.weight)


@pytest.mark.parametrize(
    "inner", [Plain, CheckpointsInside, lambda: nn.Linear(16, 16)], ids=["own", "refused", "layer"]
)
def test_a_container_of_one_that_keeps_its_calls_keeps_its_own(inner):
    model, x = nn.Sequential(Plain(), Around(Around(inner()))), torch.randn(4, 16)
    report = swap(model, exclude="1.inner.inner")
    assert names(report.swapped) == {"0"}
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert reasons["1.inner"] == "holds '1.inner.inner', which keeps its linear as it is"
    assert reasons["1"] == "holds '1.inner', which keeps its linear as it is"
    assert count(lambda: model(x)) == 1


def test_a_container_keeps_one_kind_for_what_it_holds_of_it():
    class Both(OwnAttention):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return super().forward(self.layer(x))

    model, x = Both(), torch.randn(2, 7, 16)
    report = onepass.swap(model, exclude="layer")
    assert [(e["name"], e["kind"]) for e in report.swapped] == [("", "attention")]
    reasons = {entry["name"]: entry["reason"].kind for entry in report.skipped}
    assert reasons == {"": Reason.HOLDS_KEPT, "layer": Reason.EXCLUDED}
    assert not count(lambda: model(x)) and attentions(lambda: model(x)) == 1


@pytest.mark.filterwarnings("ignore")
def test_traced():
    model, x = Plain(), torch.randn(4, 16)
    swap(model)
    traced = torch.jit.trace(model, x)
    assert "onepass::linear" in str(traced.inlined_graph)
    longer = torch.randn(7, 16)
    assert torch.equal(traced(longer), model(longer))


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
