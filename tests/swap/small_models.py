"""Small models of other libraries."""

import pytest

transformers = pytest.importorskip("transformers", reason="its modules are swapped")

CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
)


def diffusers_part(name: str):
    return pytest.importorskip(f"diffusers.models.{name}", reason="compares with diffusers' own")


def adaptive():
    return diffusers_part("normalization").AdaLayerNormContinuous(64, 64, elementwise_affine=False)


def resnet():
    return diffusers_part("resnet").ResnetBlock2D(in_channels=64, temb_channels=64)


def conv1d():
    """The linear layer of GPT-2."""
    return transformers.pytorch_utils.Conv1D(24, 16)
