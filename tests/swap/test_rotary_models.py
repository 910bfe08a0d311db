"""swap, kind "rotary": models of transformers."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

import onepass
from tests.integrations import transformers_cases as cases
from tests.swap.test_rotary import ours, swap

transformers = cases.transformers
NAMES = (
    "qwen3", "phi", "gpt_neox", "gpt_oss", "deepseek_v3", "deepseek_v32", "mimo_v2_flash",
    "openai_privacy_filter",
)  # fmt: skip
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
OTHERS = ("cohere", "glm", "olmo")


def build(name: str):
    if name not in OTHERS:
        return cases.build(name)
    config = getattr(transformers, f"{name.title()}Config")(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_models_of_transformers(name):
    model = build(name)
    file = sys.modules[type(model).__module__]
    function = getattr(file, "apply_rotary_pos_emb", None)
    stock, classes = copy.deepcopy(model), [type(module) for module in model.modules()]
    report = swap(model, strict=True)
    own = {"gpt_neox": "gpt_neox.layers.{}.attention"}.get(name, "model.layers.{}.self_attn")
    assert {entry["name"] for entry in report.swapped} >= {own.format(0), own.format(1)}
    with torch.no_grad():
        found = ours(model, cases.IDS)
    assert found >= 2 and not ours(stock, cases.IDS)
    assert report.verify(cases.IDS).ok
    assert getattr(file, "apply_rotary_pos_emb", None) is function
    onepass.unswap(model)
    assert [type(module) for module in model.modules()] == classes


def test_all_kinds_of_a_model_at_once():
    model = cases.build("llama")
    stock = copy.deepcopy(model)
    report = onepass.swap(model)
    assert {entry["kind"] for entry in report.swapped} >= {"norm", "attention", "mlp", "rotary"}
    assert report.verify(cases.IDS).ok
    settings = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(cases.IDS, **settings), stock.generate(cases.IDS, **settings))
    assert set(onepass.unswap(model)) == {entry["name"] for entry in report.swapped}
    assert torch.equal(model(cases.IDS).logits, stock(cases.IDS).logits)
