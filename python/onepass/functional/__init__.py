"""The operators as functions, with the signatures and semantics of `torch.nn.functional`."""

import onepass._ops  # noqa: F401, first: it reports a broken installation
from onepass.functional.attention import scaled_dot_product_attention, varlen_attention
from onepass.functional.attention_decode import attention_with_kv_cache, merge_attention_states
from onepass.functional.causal_conv import causal_conv1d, causal_conv1d_update
from onepass.functional.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    delta_rule_update,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from onepass.functional.dropout import add_dropout, drop_path_scale, dropout
from onepass.functional.gate import gated_activation, gelu_mul, silu_mul
from onepass.functional.group_norm import group_norm
from onepass.functional.linear import linear
from onepass.functional.loss import cross_entropy, linear_cross_entropy
from onepass.functional.mamba_chunk_scan import mamba_chunk_scan
from onepass.functional.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    modulated_layer_norm,
    modulated_rms_norm,
    rms_norm,
)
from onepass.functional.quantized_linear import quantized_linear
from onepass.functional.rotary import rotary_embedding
from onepass.functional.selective_scan import selective_scan, selective_state_update

__all__ = [
    "add_dropout",
    "add_layer_norm",
    "add_rms_norm",
    "attention_with_kv_cache",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "cross_entropy",
    "delta_rule_update",
    "drop_path_scale",
    "dropout",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "gated_activation",
    "gelu_mul",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "mamba_chunk_scan",
    "merge_attention_states",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "quantized_linear",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "selective_scan",
    "selective_state_update",
    "silu_mul",
    "varlen_attention",
]
