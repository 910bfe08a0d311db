"""attach and detach: models, copies, checkpoints; swap, verify and explain of attached models."""

import copy
import json
import sys

import pytest
import torch
from torch import nn

import onepass
import onepass.integrations.transformers as integration
from onepass.integrations.transformers import attention
from onepass.integrations.transformers import models as integration_models
from onepass.swapping import matchers
from tests.integrations import transformers_cases as cases
from tests.integrations.transformers_cases import (
    IDS,
    build,
    close,
    implementations,
    inputs,
    kinds,
    run,
    transformers,
)


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


# ---------------------------------------------------------------- copies and checkpoints


def test_checkpoints_do_not_know(tmp_path):
    model = build("clip")
    stock = build("clip")
    integration.attach(model)
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    texts = [(tmp_path / who / "config.json").read_text() for who in ("ours", "stock")]
    assert "onepass" not in texts[0] and json.loads(texts[0]) == json.loads(texts[1])
    for file in (tmp_path / "ours").glob("*.json"):
        assert "onepass" not in file.read_text()
    loaded = transformers.CLIPModel.from_pretrained(tmp_path / "ours")
    assert set(implementations(loaded)) == {"sdpa"}


def test_from_pretrained_takes_the_name(tmp_path):
    build("llama").save_pretrained(tmp_path)
    integration.register()
    integration.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="onepass"
    )
    logits, ops = run(model, IDS)
    assert len(ops) == 2
    close(logits.logits, build("llama")(IDS).logits)
    model.save_pretrained(tmp_path / "again")
    assert "onepass" not in (tmp_path / "again" / "config.json").read_text()
    (entry, _) = integration.attach(model).attached
    assert entry["before"] == "sdpa"  # transformers' default: it never was another
    assert integration.detach(model) and set(implementations(model)) == {"sdpa"}


# ---------------------------------------------------------------- attach and detach


@pytest.mark.parametrize("name", cases.MODELS)
def test_detach_gives_every_config_back_what_it_had(name):
    model = build(name)
    for number, config in enumerate({id(c): c for c in configs(model)}.values()):
        config._attn_implementation_internal = ("eager", "sdpa")[number % 2]
    before, state, types = implementations(model), dict(model.config.to_dict()), kinds(model)
    attributes = [set(vars(module)) for module in model.modules()]
    report = integration.attach(model)
    assert set(implementations(model)) == {"onepass"} and kinds(model) == types
    assert {entry["before"] for entry in report.attached} <= set(before)
    assert integration.attach(model).to_dict() == report.to_dict()  # again changes nothing
    assert integration.detach(model)
    assert implementations(model) == before and model.config.to_dict() == state
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert integration.detach(model) == [] and implementations(model) == before


def configs(model):
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            yield module.config
            yield from (getattr(module.config, key) for key in module.config.sub_configs)


def test_a_part_can_be_detached_and_attached_again():
    model = build("clip")
    integration.attach(model)
    integration.detach(model.vision_model)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "onepass"
    integration.attach(model)
    assert set(implementations(model)) == {"onepass"}
    integration.detach(model)
    assert set(implementations(model)) == {"sdpa"}


def test_a_part_that_was_attached_alone():
    for name, part in (("clip", "vision_model"), ("llama", "model")):
        model = build(name)
        model.set_attn_implementation("eager")
        integration.attach(getattr(model, part))
        assert "onepass" in implementations(model)
        with integration_models.stock(model):
            assert set(implementations(model)) == {"eager"}
        integration.attach(model)
        assert set(implementations(model)) == {"onepass"}
        integration.detach(model)
        assert set(implementations(model)) == {"eager"}
        integration.attach(getattr(model, part))
        integration.detach(model)
        assert set(implementations(model)) == {"eager"}


def test_what_was_chosen_since_is_left_alone():
    model = build("llama")
    integration.attach(model)
    model.set_attn_implementation("eager")
    assert integration.detach(model) == [] and set(implementations(model)) == {"eager"}


def test_models_in_wrappers():
    model = nn.ModuleList([Wrapper(build("llama")), build("bert"), nn.Linear(2, 2)])
    report = integration.attach(model)
    names = {entry["name"].rpartition("layer")[0] for entry in report.attached}
    assert names == {"0.inner.model.", "1.bert.encoder."}
    assert str(report).startswith("onepass: attached 4, 0 skipped")
    assert "LlamaAttention" in report._repr_html_() and str(copy.deepcopy(report)) == str(report)
    assert json.loads(json.dumps(report.to_dict()))["skipped"] == []
    assert integration.detach(model)[0] == "0.inner"


@pytest.mark.parametrize("call", [integration.attach, integration.detach])
def test_what_is_no_model_of_transformers_is_refused(call):
    for model, kind in ((nn.Linear(2, 2), "Linear"), ("gpt2", "str"), (None, "NoneType")):
        with pytest.raises(
            TypeError, match=f"must be or hold a transformers.PreTrainedModel.*{kind}"
        ):
            call(model)


SMALL = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
NO_REGISTRY = "takes no attention from transformers' registry"
UNSUPPORTED = {  # the model, the settings of its config, the reason
    "Falcon": (SMALL, NO_REGISTRY),
    "Mpt": (dict(vocab_size=32, d_model=16, n_layers=2, n_heads=2), NO_REGISTRY),
    "FNet": (
        dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, intermediate_size=16), NO_REGISTRY,
    ),
    "Splinter": (
        dict(SMALL, intermediate_size=16, question_token_id=3),
        "transformers vouches for its eager attention alone",
    ),
    "MiniMaxM3VLText": (
        dict(
            vocab_size=32, hidden_size=32, intermediate_size=48, dense_intermediate_size=32,
            shared_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, rotary_dim=8, index_n_heads=2, index_head_dim=8,
            index_block_size=2, index_topk_blocks=2, num_local_experts=4, num_experts_per_tok=2,
            pad_token_id=0, layer_types=["full_attention", "minimax_m3_sparse"],
        ),
        "selects blocks of keys",
    ),
}  # fmt: skip


def unsupported(name: str):
    config = getattr(transformers, f"{name}Config")(**UNSUPPORTED[name][0])
    return getattr(transformers, f"{name}Model")(config).eval()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_take_no_attention_from_outside_are_reported(name):
    model, reason = unsupported(name), UNSUPPORTED[name][1]
    before = implementations(model)
    expected = None if name == "MiniMaxM3VLText" else model(IDS).last_hidden_state
    report = integration.attach(model)
    assert not report.attached and report.skipped[0]["reason"].startswith(reason)
    assert implementations(model) == before
    assert expected is None or torch.equal(model(IDS).last_hidden_state, expected)
    with pytest.raises(RuntimeError, match="must be attached whole under strict, got .*" + reason):
        integration.attach(model, strict=True)
    assert integration.detach(model) == []
    if name == "FNet":  # it has no attention
        report = onepass.swap(model, kinds="attention")
        assert not report.swapped and not report.skipped and not report.unknown
    if name == "Falcon":
        reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
        assert "onepass.swap(model) makes it run" in reasons["h.0.self_attention"]
        onepass.swap(model)
        assert len(run(model, IDS)[1]) == 2


def test_models_of_newer_versions_are_reported(monkeypatch):
    """One on eager attention that nobody has looked at; one with an "sdpa" of its own."""
    model = build("gemma2")
    monkeypatch.setattr(model.config, "model_type", "gemma9", raising=False)
    report = integration.attach(model)
    assert not report.attached and "eager attention alone" in report.skipped[0]["reason"]
    model, own = build("llama"), transformers.AttentionInterface()
    own["sdpa"] = None
    monkeypatch.setattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", own)
    report = integration.attach(model)
    assert not report.attached and "attention of its own" in report.skipped[0]["reason"]


def test_strict_leaves_the_model_as_it_was():
    model = nn.ModuleList([build("llama"), unsupported("Mpt")])
    before = implementations(model)
    with pytest.raises(RuntimeError, match="'1': takes no attention"):
        integration.attach(model, strict=True)
    assert implementations(model) == before
    assert integration.attach(model[0], strict=True).attached
    with pytest.raises(RuntimeError):  # models attached before stay attached
        integration.attach(model, strict=True)
    assert implementations(model[0]) == ["onepass"]
    assert integration.detach(model) and implementations(model) == before


def test_a_device_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(matchers, "has_kernels", lambda device, kind: False)
    model = build("llama")
    with pytest.raises(RuntimeError, match="attach: model must be on devices .* got cpu: has no"):
        integration.attach(model)
    assert set(implementations(model)) == {"sdpa"}


def test_meta_models_are_attached():
    config = transformers.LlamaConfig(**cases.MODELS["llama"][1])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert len(integration.attach(model).attached) == 2


# ---------------------------------------------------------------- swap, verify, explain


@pytest.mark.parametrize("swap_first", [False, True])
def test_swap_and_attach_in_either_order(swap_first):
    model, stock = build("llama"), build("llama")
    calls = [lambda: integration.attach(model), lambda: onepass.swap(model)]
    for call in reversed(calls) if swap_first else calls:
        call()
    report = onepass.swap(model)
    attached = {e["name"] for e in report.swapped if "transformers' registry" in e["to"]}
    assert attached == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    kinds_of = {e["kind"] for e in report.swapped if e["name"] in attached}
    assert kinds_of == {"attention", "rotary"}
    assert not report.skipped
    (note,) = (note for note in report.notes if "detach(model)" in note)
    assert note.startswith("model.layers.*.self_attn: on onepass's attention by transformers'")
    assert onepass.swap(model, kinds="attention", strict=True).swapped
    assert not any(e["name"] in attached for e in onepass.swap(model, kinds="norm").swapped)
    assert len(run(model, IDS)[1]) == 2
    onepass.unswap(model)
    assert kinds(model) == kinds(stock) and set(implementations(model)) == {"onepass"}
    integration.detach(model)
    assert torch.equal(model(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_verify_compares_with_the_attention_from_before(name, monkeypatch):
    model = build(name)
    report = onepass.swap(model)
    attached = integration.attach(model)
    names = []
    forward = attention.attention_forward

    def counted(module, *args, **kwargs):
        names.append(module)
        return forward(module, *args, **kwargs)

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "onepass", counted)
    batch = {**inputs(name), "labels": IDS}
    batch.pop("decoder_input_ids", None)
    for verify in (report.verify, attached.verify):
        result = verify(batch)
        assert result.ok, result
        assert len(names) == 2 * len(attached.attached)  # judged as a whole, then call by call
        names.clear()
    assert set(implementations(model)) == {"onepass"}

    def wrong(*args, **kwargs):
        output, _ = forward(*args, **kwargs)
        return output + 1e-3 * output.roll(1, -1), None

    monkeypatch.setitem(functions, "onepass", wrong)
    assert not report.verify(batch).ok and not attached.verify(batch).ok


def test_what_swap_is_told_to_leave_is_not_listed_as_swapped():
    model = build("llama")
    integration.attach(model)
    report = onepass.swap(model, exclude="*", kinds="attention")
    assert not report.swapped
    reasons = [e["reason"] for e in report.skipped if e["name"].endswith("self_attn")]
    assert reasons == ["excluded by '*'; on onepass's attention all the same, as an earlier call "
                       "left it"] * 2  # fmt: skip


def test_verify_of_a_model_without_a_record(tmp_path):
    build("llama").save_pretrained(tmp_path)
    integration.register()
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="onepass")
    assert onepass.swap(model).verify(IDS).ok
    assert set(implementations(model)) == {"onepass"}
