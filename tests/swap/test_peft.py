"""Swapped transformers models under peft: LoRA, modules_to_save, merging, adapters on disk."""

import copy

import pytest
import torch

import onepass
from tests.integrations.transformers_cases import IDS, build

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("slow_products", "probed_once")

NORMS = {
    f"model.layers.{layer}.{norm}"
    for layer in range(2)
    for norm in ("input_layernorm", "post_attention_layernorm")
} | {"model.norm"}


def llama():
    return build("llama", tie_word_embeddings=True)


def lora(**options):
    return peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], **options
    )


def perturb(model) -> None:
    """Adapters start as zero; random ones show whether they are there."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)


def logits(model):
    return model.eval()(IDS).logits


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def swapped_names(model) -> set[str]:
    return {n for n, module in model.named_modules() if hasattr(type(module), "_onepass_original")}


@pytest.mark.grid
@pytest.mark.parametrize("order", ["swap first", "adapters first"])
@pytest.mark.parametrize("saved", [None, ["input_layernorm", "norm"]], ids=["", "with norms"])
def test_adapters_train_merge_and_reload(tmp_path, saved, order):
    config, base = lora(modules_to_save=saved), llama()
    stock = peft.get_peft_model(copy.deepcopy(base), config)
    if order == "swap first":
        onepass.swap(base)
    model = peft.get_peft_model(base, config)
    if order == "adapters first":
        onepass.swap(model)
    found = swapped_names(model)
    # Names are matched by their end; the trainable copies are swapped too.
    assert len({name for name in found if "modules_to_save" in name}) == (5 if saved else 0)
    assert saved or {f"base_model.model.{name}" for name in NORMS} <= found
    perturb(stock)
    model.load_state_dict(stock.state_dict())
    close(logits(model), logits(stock))

    stock(IDS, labels=IDS).loss.backward()
    model(IDS, labels=IDS).loss.backward()
    trained = 0
    for name, parameter in stock.named_parameters():
        got = model.get_parameter(name).grad
        assert (got is None) == (parameter.grad is None)
        if got is not None:
            close(got, parameter.grad)
            trained += 1
    assert trained == (13 if saved else 8)

    model.save_pretrained(tmp_path)
    reloaded = llama()
    if order == "swap first":
        onepass.swap(reloaded)
    reloaded = peft.PeftModel.from_pretrained(reloaded, tmp_path)
    assert onepass.swap(reloaded).verify(IDS).ok
    close(logits(reloaded), logits(stock))
    merged = model.merge_and_unload()
    assert saved or swapped_names(merged) >= NORMS
    close(logits(merged), logits(stock))
    onepass.unswap(merged)
    close(logits(merged), logits(stock))
