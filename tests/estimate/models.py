"""Models of common kinds, each tiny or at its real size, with a batch that gives a loss."""

from __future__ import annotations

import torch
from torch import nn

CAUSAL = "gpt2", "llama"


def _transformers():
    import pytest

    return pytest.importorskip("transformers", reason="transformers is not installed")


def _tokens(vocabulary: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def gpt2(tiny: bool):
    transformers = _transformers()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000} if tiny else {}
    config = transformers.GPT2Config(**sizes)
    tokens = _tokens(config.vocab_size, 2, 64 if tiny else 256)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def llama(tiny: bool):
    """100 million parameters; grouped heads, an untied head."""
    transformers = _transformers()
    sizes = (64, 172, 2, 4, 2, 1000) if tiny else (640, 1728, 12, 10, 5, 32000)
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = f"{names} num_key_value_heads vocab_size".split()
    config = transformers.LlamaConfig(**dict(zip(names, sizes, strict=True)))
    tokens = _tokens(config.vocab_size, 2, 64 if tiny else 256)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def bert(tiny: bool):
    """With a mask of padding."""
    transformers = _transformers()
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 256, "vocab_size": 1000,
    } if tiny else {}  # fmt: skip
    config = transformers.BertConfig(**sizes)
    tokens = _tokens(config.vocab_size, 4, 64 if tiny else 128)
    mask = torch.ones_like(tokens)
    mask[1:, -16:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return transformers.BertForMaskedLM(config), batch


def vit(tiny: bool):
    # In a smaller model the scratch memory of its convolution would matter.
    transformers = _transformers()
    sizes = {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 512, "image_size": 64,
    } if tiny else {}  # fmt: skip
    config = transformers.ViTConfig(**sizes, num_labels=100)
    pixels = torch.randn(4, 3, config.image_size, config.image_size)
    batch = {"pixel_values": pixels, "labels": torch.randint(0, 100, (4,))}
    return transformers.ViTForImageClassification(config), batch


def t5(tiny: bool):
    transformers = _transformers()
    sizes = {
        "d_model": 64, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 2,
        "vocab_size": 1000,
    } if tiny else {}  # fmt: skip
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    length = 64 if tiny else 128
    tokens = _tokens(config.vocab_size, 4, length)
    labels = _tokens(config.vocab_size, 4, length // 2)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": labels}


class Denoising(nn.Module):
    """A diffusion transformer with its loss: the mean square error of the noise."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, timestep, label, noise):
        found = self.transformer(latents, timestep=timestep, class_labels=label).sample
        return nn.functional.mse_loss(found[:, : noise.shape[1]], noise)


def dit(tiny: bool):
    import pytest

    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    heads, head_dim, layers, size = (2, 32, 2, 16) if tiny else (6, 64, 12, 32)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=head_dim, num_layers=layers,
        in_channels=4, out_channels=8, sample_size=size, num_embeds_ada_norm=1000,
    )  # fmt: skip
    latents, noise = torch.randn(4, 4, size, size), torch.randn(4, 4, size, size)
    timestep, label = torch.randint(0, 1000, (4,)), torch.randint(0, 1000, (4,))
    return Denoising(transformer), (latents, timestep, label, noise)


MODELS = {function.__name__: function for function in (gpt2, llama, bert, vit, t5, dit)}
