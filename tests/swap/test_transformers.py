"""`swap` of models of transformers: attention by its name in the config, and undoing it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass
import onepass.integrations.transformers as integration
from tests.integrations.transformers_cases import IDS, build, implementations, kinds, run
from tests.support import fresh

pytestmark = pytest.mark.usefixtures("probed_once")

NAMED = {"model.layers.0.self_attn", "model.layers.1.self_attn"}
BY_NAME = "onepass's attention, by transformers' registry"


def by_name(report) -> set[str]:
    return {e["name"] for e in report.swapped if (e["to"], e["kind"]) == (BY_NAME, "attention")}


@pytest.mark.parametrize("name", ["llama", "gpt2", "clip", "t5", "gpt_oss", "deepseek_v4"])
def test_swap_attaches_and_unswap_detaches(name):
    model, stock = build(name), build(name)
    attributes = [set(vars(module)) for module in model.modules()]
    before = implementations(model)
    dry = onepass.swap(model, dry_run=True)
    assert implementations(model) == before and kinds(model) == kinds(stock)
    assert [set(vars(module)) for module in model.modules()] == attributes
    report = onepass.swap(model, strict=name != "deepseek_v4")
    assert report.to_dict() == dry.to_dict()
    assert set(implementations(model)) == {"onepass"}
    assert by_name(report) == {e["name"] for e in integration.attach(copy.deepcopy(model)).attached}
    assert by_name(onepass.swap(model)) == by_name(report)
    changed = onepass.unswap(model)
    assert set(changed) == {entry["name"] for entry in report.swapped}
    assert implementations(model) == before and kinds(model) == kinds(stock)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert onepass.unswap(model) == []


def test_swap_of_attention_alone_and_of_all_but_it():
    model = build("llama")
    onepass.swap(model, kinds="norm")
    assert implementations(model) == ["sdpa"]
    assert by_name(onepass.swap(model, kinds="attention", strict=True)) == NAMED
    with pytest.raises(RuntimeError, match="no match for 'attention'"):
        onepass.swap(nn.LayerNorm(4), kinds="attention", strict=True)


def test_modules_that_share_a_config_change_together():
    model = build("clip")
    report = onepass.swap(model, exclude="vision_model.*layers.0.*", kinds="attention")
    assert all(name.startswith("text_model") for name in by_name(report)) and by_name(report)
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    first, second = (name for name in reasons if name.endswith("self_attn"))
    assert reasons[first] == "excluded by 'vision_model.*layers.0.*'"
    assert reasons[second] == f"shares its config with {first!r}, which keeps its own"
    assert model.config.text_config._attn_implementation == "onepass"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"  # makes masks for both
    with pytest.raises(RuntimeError, match="shares its config"):
        onepass.swap(model, exclude="vision_model.*layers.0.*", kinds="attention", strict=True)
    onepass.unswap(model)
    assert set(implementations(model)) == {"sdpa"}
    asked = []
    onepass.swap(model, filter_fn=lambda m, name: asked.append(name), kinds="attention")
    assert set(asked) == set(reasons) | by_name(report)
    assert set(implementations(model)) == {"sdpa"}


def test_swapped_models_of_transformers_are_restored():
    model, stock = build("gpt_oss"), build("gpt_oss")
    attributes = [set(vars(module)) for module in model.modules()]
    with onepass.swapped(model) as report:
        assert by_name(report) == NAMED and len(run(model, IDS)[1]) == 2
    assert implementations(model) == ["eager"] and kinds(model) == kinds(stock)
    assert [set(vars(module)) for module in model.modules()] == attributes
    integration.attach(model)
    with onepass.swapped(model):
        pass
    assert implementations(model) == ["onepass"]
    with onepass.swapped(model):
        integration.detach(model)
    assert implementations(model) == ["eager"] and kinds(model) == kinds(stock)


def test_what_swap_attached_detach_undoes_too():
    model = build("llama")
    onepass.swap(model, kinds=("norm", "attention"))
    assert integration.detach(model) and implementations(model) == ["sdpa"]
    assert not NAMED & set(onepass.unswap(model)) and implementations(model) == ["sdpa"]


def test_parts_attached_and_swapped_know_what_is_whose():
    model = build("clip")
    onepass.swap(model)
    integration.attach(model.text_model)  # from here on it is attached
    onepass.unswap(model)
    assert model.config.text_config._attn_implementation == "onepass"
    assert model.config.vision_config._attn_implementation == "sdpa"
    integration.detach(model)
    assert set(implementations(model)) == {"sdpa"}


def test_copies_of_swapped_models_unswap_by_themselves():
    model = build("gpt_oss")
    expected = model(IDS).logits
    onepass.swap(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(run(twin, IDS)[1]) == 2
        assert NAMED <= set(onepass.unswap(twin)) and implementations(twin) == ["eager"]
        assert implementations(model) == ["onepass"]
        assert torch.equal(twin(IDS).logits, expected)


def test_force_takes_models_whose_eager_attention_alone_is_vouched_for(monkeypatch):
    model = build("gemma2")
    monkeypatch.setattr(model.config, "model_type", "gemma9", raising=False)
    reasons = {e["name"]: e["reason"] for e in onepass.swap(model).skipped}
    assert set(reasons) == NAMED and "eager attention alone" in reasons[min(NAMED)]
    reason = onepass.swap(model, force="*.0.self_attn").skipped[0]["reason"]
    assert reason.endswith("force does not change that")  # as they share a config
    report = onepass.swap(model, force="*.self_attn", strict=True)
    assert by_name(report) == NAMED and not report.skipped
    (note,) = (note for note in report.notes if "forced" in note)
    assert note.startswith("model.layers.*.self_attn: forced")
    assert report.verify(IDS).ok
    onepass.unswap(model)
    assert implementations(model) == ["eager"]


def test_registries_that_are_not_transformers():
    code = (
        "import torch, onepass\n"
        "ALL_ATTENTION_FUNCTIONS = {}\n"
        "class Attention(torch.nn.Module):\n"
        "    def forward(self, x): return ALL_ATTENTION_FUNCTIONS['x'](x)\n"
        "(entry,) = onepass.swap(Attention()).skipped\n"
        "assert \"a registry that is not transformers'\" in entry['reason'], entry\n"
    )
    fresh.run(code, check=True)


def test_checkpoint_wrappers_around_layers_are_noted():
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = build("llama")
    wrappers.apply_activation_checkpointing(
        model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer"
    )
    attached = integration.attach(model)
    for report in (attached, onepass.swap(model)):
        assert any("use_cache=False in training" in note for note in report.notes)
        assert "use_cache=False" in str(report)
    model.config.use_cache = False
    assert not attached.to_dict()["skipped"] and not integration.attach(model).notes
