"""Models for `onepass compare`: two Llama layers in bfloat16, trained whole or by LoRA, and
by LoRA beside weights of 4 bits.

    cd examples
    python -m onepass compare --model llama_lora:whole
    python -m onepass compare --model llama_lora:adapters     # needs peft, as does the next
    python -m onepass compare --model llama_lora:quantised

Weights are random: the time of a step does not depend on them. The sizes are those of Llama 3.2 1B
but for the number of layers and of words.
"""

from __future__ import annotations

import torch
import transformers

import onepass

TOKENS = 1024
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}


def whole(tokens: int = TOKENS, words: int = 8192, **sizes):
    """(model, batch): every parameter is trained."""
    config = transformers.LlamaConfig(vocab_size=words, **{**SIZES, **sizes})
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(words, (1, tokens))
    return model, {"input_ids": ids, "labels": ids}


def adapters(**sizes):
    """(model, batch): adapters of queries and values are trained."""
    import peft

    model, batch = whole(**sizes)
    config = peft.LoraConfig(r=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config), batch


def quantised(**sizes):
    """(model, batch): the same, and adapters of all other linear layers, beside a base in nf4."""
    import peft

    model, batch = whole(**sizes)
    onepass.quantize(model, "nf4")
    config = peft.LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")
    return peft.get_peft_model(model, config), batch
