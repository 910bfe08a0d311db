"""Models of common kinds, each tiny or at its real size, with a batch that gives a loss."""

import pytest
import torch
from torch import nn


def _of_transformers(name: str, head: str, sizes: dict):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}{head}")(config), config


def _tokens(config, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (rows, length))


def _of_tokens(name: str, head: str, sizes: dict, tiny: bool):
    model, config = _of_transformers(name, head, sizes)
    tokens = _tokens(config, 2, 64 if tiny else 256)
    return model, {"input_ids": tokens, "labels": tokens}


def gpt2(tiny: bool):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000} if tiny else {}
    return _of_tokens("GPT2", "LMHeadModel", sizes, tiny)


def llama(tiny: bool):
    """100 million parameters; grouped heads, an untied head."""
    sizes = (64, 172, 2, 4, 2, 1000) if tiny else (640, 1728, 12, 10, 5, 32000)
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = f"{names} num_key_value_heads vocab_size".split()
    return _of_tokens("Llama", "ForCausalLM", dict(zip(names, sizes, strict=True)), tiny)


def bert(tiny: bool):
    """With a mask of padding."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 256, "vocab_size": 1000,
    } if tiny else {}  # fmt: skip
    model, config = _of_transformers("Bert", "ForMaskedLM", sizes)
    tokens = _tokens(config, 4, 64 if tiny else 128)
    mask = torch.ones_like(tokens)
    mask[1:, -16:] = 0
    return model, {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def vit(tiny: bool):
    # In a smaller model the scratch memory of its convolution would matter.
    sizes = {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 512, "image_size": 64,
    } if tiny else {}  # fmt: skip
    model, config = _of_transformers("ViT", "ForImageClassification", {**sizes, "num_labels": 100})
    pixels = torch.randn(4, 3, config.image_size, config.image_size)
    return model, {"pixel_values": pixels, "labels": torch.randint(0, 100, (4,))}


def t5(tiny: bool):
    sizes = {
        "d_model": 64, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 2,
        "vocab_size": 1000,
    } if tiny else {}  # fmt: skip
    sizes["decoder_start_token_id"] = 0
    model, config = _of_transformers("T5", "ForConditionalGeneration", sizes)
    length = 64 if tiny else 128
    labels = _tokens(config, 4, length // 2)
    return model, {"input_ids": _tokens(config, 4, length), "labels": labels}


class Denoising(nn.Module):
    """A diffusion transformer with its loss: the mean square error of the noise."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, timestep, label, noise):
        found = self.transformer(latents, timestep=timestep, class_labels=label).sample
        return nn.functional.mse_loss(found[:, : noise.shape[1]], noise)


def dit(tiny: bool):
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
