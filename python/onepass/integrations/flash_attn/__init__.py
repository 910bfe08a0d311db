"""flash_attn's functions by their names and arguments, computed by onepass on a CPU and on CUDA.

A model that says ``from flash_attn import flash_attn_func`` runs here with the import changed::

    from onepass.integrations.flash_attn import flash_attn_func
    from onepass.integrations.flash_attn.bert_padding import pad_input, unpad_input
    from onepass.integrations.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

The package itself is neither imported nor needed. Its layouts hold: (batch, seq, heads, head_dim),
or (total, heads, head_dim) for sequences one after the other; key and value may have fewer heads
than query; causal attention and windows are aligned at the bottom right. Beyond it: float32 (and,
except for KV caches, float64), head dimensions to 512, values of another head dimension, any
combination of options, gradients of all terms of the scores and of the log-sum-exp. Padding and
rotation are plain PyTorch.

Differences: the log-sum-exp of a query without a key is -inf (there: inf), and it is always that
of the scores as documented; the matrix of probabilities is never made; dropout follows
`torch.manual_seed` with other numbers.
"""

from onepass.integrations.flash_attn import flash_attn_interface
from onepass.integrations.flash_attn.flash_attn_interface import *  # noqa: F403

__all__ = flash_attn_interface.__all__
