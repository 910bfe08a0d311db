"""Models of transformers and diffusers with the widths of real ones and few layers.

    onepass compare --model benchmarks.blocks:gpt2 [--kinds loss]

Each function returns (model, batch), in training, without dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def gpt2() -> tuple[nn.Module, Batch]:
    """GPT-2 small's width and vocabulary, two of its twelve layers; 2 x 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config), _tokens(config.vocab_size, 2, 512)


def llama() -> tuple[nn.Module, Batch]:
    """A layer of Llama 3.2 1B; 1 x 512 tokens, and a vocabulary of 8192 instead of 128256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), _tokens(config.vocab_size, 1, 512)


def qwen3() -> tuple[nn.Module, Batch]:
    """A layer of Qwen3 0.6B; 1 x 512 tokens, and a vocabulary of 8192 instead of 151936."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config), _tokens(config.vocab_size, 1, 512)


def vit() -> tuple[nn.Module, Batch]:
    """Two layers of ViT-B/16; 4 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_labels=1000))
    batch = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(1000, (4,))}
    return model, batch


def dit() -> tuple[nn.Module, Batch]:
    """Two layers of DiT-B/2; 2 latents of 32 x 32."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=12, attention_head_dim=64, num_layers=2)
    batch = {
        "hidden_states": torch.randn(2, 4, 32, 32),
        "timestep": torch.randint(1000, (2,)),
        "class_labels": torch.randint(1000, (2,)),
    }
    return model, batch


def unet() -> tuple[nn.Module, Batch]:
    """Two levels of DDPM's UNet for CIFAR-10, without attention; 4 images of 32 x 32."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )
    return model, {"sample": torch.randn(4, 3, 32, 32), "timestep": torch.randint(1000, (4,))}


def _tokens(vocabulary: int, batch: int, length: int) -> Batch:
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}
