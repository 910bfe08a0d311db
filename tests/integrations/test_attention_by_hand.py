"""Whose attention by hand a swap takes, tried on the packages that are installed: the table of
docs/swap.md."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from onepass import _dispatch_log
from tests.swap import attention_by_hand as cases

LEFT = "computes attention by hand, and runs as it was written"
PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
BY_HAND, BY_REGISTRY, AS_WRITTEN = "one call", "by transformers' registry", "as written"
TEXT = torch.arange(24).reshape(1, 24) + 3
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def shape(cls: type[nn.Module]) -> Callable:
    """A class of ours that is written like theirs."""
    return lambda: (cls(), torch.randn(2, cases.TOKENS, cases.WIDTH))


def of_transformers(name: str, **sizes) -> Callable:
    """By its class; `sizes` are of its config."""

    def make():
        transformers = pytest.importorskip(
            "transformers", reason="these models are its own, with attention by hand"
        )
        cls = getattr(transformers, name)
        is_of_images = "image_size" in sizes
        words = {} if is_of_images else dict(vocab_size=64, bos_token_id=1, eos_token_id=1)
        config = cls.config_class(**words, **sizes)
        config._attn_implementation = "eager"
        return cls(config), dict(pixel_values=IMAGE) if is_of_images else dict(
            input_ids=TEXT, **dict(decoder_input_ids=TEXT) if config.is_encoder_decoder else {}
        )

    return make


def of_timm(module: str, name: str, **options) -> Callable:
    def make():
        timm = pytest.importorskip(
            "timm",
            reason="not in .venv: it brings torchvision; make test-integrations installs it",
            exc_type=ImportError,
        )
        before = timm.layers.config._USE_FUSED_ATTN
        timm.layers.set_fused_attn(False)
        try:
            cls = getattr(importlib.import_module(f"timm.models.{module}"), name)
            return cls(img_size=32, embed_dim=32, num_classes=4, **options), IMAGE
        finally:
            timm.layers.config._USE_FUSED_ATTN = before

    return make


def of_x_transformers(**options) -> Callable:
    def make():
        package = pytest.importorskip(
            "x_transformers", reason="not in .venv; make test-integrations installs it"
        )
        layers = package.Decoder(dim=32, depth=1, heads=2, attn_dim_head=16, **options)
        return package.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers), TEXT

    return make


WIDE = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
IMAGES = dict(WIDE, image_size=32, patch_size=8)
GPT = dict(n_embd=64, n_layer=1, n_head=4, n_positions=64)
VIT = dict(patch_size=8, depth=1, num_heads=2)
WINDOWS = dict(image_size=32, patch_size=2, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
CASES = {
    "nanoGPT's slow branch, minGPT": (BY_HAND, [shape(cases.NanoGPT)]),
    "T5's relative bias, by hand": (BY_HAND, [shape(cases.T5)]),
    "ALiBi, by hand": (BY_HAND, [shape(cases.Alibi)]),
    "transformers, eager: GPT-2, BERT, Llama, T5, ViT, BEiT (relative bias)": (BY_REGISTRY, [
        of_transformers("GPT2LMHeadModel", **GPT), of_transformers("BertForMaskedLM", **WIDE),
        of_transformers("LlamaForCausalLM", **WIDE), of_transformers("ViTModel", **IMAGES),
        of_transformers("T5Model", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        of_transformers("BeitModel", **IMAGES, use_relative_position_bias=True),
    ]),
    "transformers, no registry: Bloom, Falcon, MPT, GPT-J, DeBERTa v2, XLNet, Swin v2": (BY_HAND, [
        of_transformers("BloomForCausalLM", hidden_size=32, n_layer=1, n_head=4),
        of_transformers(
            "FalconForCausalLM", hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        of_transformers("MptForCausalLM", d_model=32, n_layers=1, n_heads=4, max_seq_len=64),
        of_transformers("GPTJForCausalLM", rotary_dim=8, **GPT),
        of_transformers(
            "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c"], **WIDE),
        of_transformers("XLNetLMHeadModel", d_model=32, n_layer=1, n_head=4, d_inner=64),
        of_transformers("Swinv2Model", **WINDOWS),
    ]),
    "transformers: OpenAI's GPT (masks by -10,000)": (
        AS_WRITTEN, [of_transformers("OpenAIGPTLMHeadModel", **GPT)]),
    "timm, `fused_attn` off: ViT, with relative bias too, BEiT, Swin": (BY_HAND, [
        of_timm("vision_transformer", "VisionTransformer", **VIT),
        of_timm("vision_transformer_relpos", "VisionTransformerRelPos", rel_pos_type="bias", **VIT),
        of_timm("beit", "Beit", **VIT, use_rel_pos_bias=True),
        of_timm("swin_transformer", "SwinTransformer",
                patch_size=2, depths=(1,), num_heads=(2,), window_size=4),
    ]),
    "x-transformers: as it comes, rotary, ALiBi, relative bias, one key head": (BY_HAND, [
        of_x_transformers(), of_x_transformers(rotary_pos_emb=True),
        of_x_transformers(alibi_pos_bias=True, alibi_num_heads=2),
        of_x_transformers(rel_pos_bias=True), of_x_transformers(attn_kv_heads=1),
    ]),
    "x-transformers: sparse top k, talking heads, softclamp (TorchScript)": (AS_WRITTEN, [
        of_x_transformers(attn_sparse_topk=4), of_x_transformers(attn_pre_talking_heads=True),
        of_x_transformers(attn_softclamp_logits=True),
    ]),
}  # fmt: skip
EACH = [
    pytest.param(expected, make, id=f"{name}, {number}")
    for name, (expected, makers) in CASES.items()
    for number, make in enumerate(makers)
]


@pytest.mark.parametrize(("expected", "make"), EACH)
def test_what_is_taken(expected, make):
    torch.manual_seed(0)
    model, batch = make()
    report = onepass.swap(model.eval(), kinds="attention")
    result = report.verify(batch)
    with _dispatch_log.record() as calls, torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    attention = [call for call in calls if call["op"] == "attention"]
    assert bool(attention) is bool(result.ok) is (expected != AS_WRITTEN), result
    by_registry = [entry for entry in report.swapped if "registry" in entry["to"]]
    assert bool(by_registry) is (expected == BY_REGISTRY)
    assert (LEFT in report.details()) is (expected == AS_WRITTEN)


def test_the_page_says_the_same():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    rows = {name: said for name, said in rows if said in (BY_HAND, BY_REGISTRY, AS_WRITTEN)}
    assert rows == {name: expected for name, (expected, _) in CASES.items()}
