"""swap, kind "rotary": models of transformers."""

import copy
import sys

import pytest
import torch

import onepass
from tests.integrations import transformers_cases as cases
from tests.swap.test_rotary import ours, swap

NAMES = (
    *cases.ROTATING, "gpt_oss", "deepseek_v3", "deepseek_v32", "mimo_v2_flash",
    "openai_privacy_filter",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_models_of_transformers(name):
    model = cases.build(name)
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
