"""A Mamba for `onepass compare`: four layers of 512 in float32, as on a CPU without CUDA packages.

    cd examples
    python -m onepass compare --model mamba:make          # 128 tokens
    python -m onepass compare --model mamba:longer        # 256: stock takes seconds a step
    python -m onepass compare --model mamba:make --generate 32

Weights are random: the time of a step does not depend on them.
"""

from __future__ import annotations

import torch
import transformers

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "state_size": 16}


def make(tokens: int = 128, words: int = 1024, **sizes):
    """(model, batch): one sequence."""
    config = transformers.MambaConfig(vocab_size=words, **{**SIZES, **sizes})
    ids = torch.randint(words, (1, tokens))
    return transformers.MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def longer():
    """The same with twice as many tokens."""
    return make(256)
