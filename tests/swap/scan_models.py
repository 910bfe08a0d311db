"""Small models of transformers with state-space and linear-attention layers, and random weights."""

from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers", reason="the models are its")

TOKENS = 12
IDS = (torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7) % 29 + 2
_SMALL = dict(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager")
_MAMBA = dict(
    vocab_size=32, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0,
    bos_token_id=1, eos_token_id=1,
)  # fmt: skip
_MAMBA2 = dict(
    _SMALL, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=4,
)  # fmt: skip
_DELTA = dict(
    _SMALL, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
_MIXED = ["linear_attention", "full_attention"]
_LATENT = dict(
    _SMALL | dict(num_key_value_heads=4), kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
    qk_nope_head_dim=8, n_group=1, topk_group=1, num_local_experts=4, **_EXPERTS,
)  # fmt: skip
_QWEN = dict(_DELTA, num_experts=4, shared_expert_intermediate_size=16, **_EXPERTS)
_RULE = dict(steps=0, rules=1)


class Model(NamedTuple):
    """A type of model: its class, the settings of its config, and its layers that are swapped."""

    cls: str
    settings: dict
    layers: int  # modules that are swapped
    steps: int = 1  # calls of our update of a state in a step of decoding, per layer
    scans: int = 0  # calls of a selective scan, per layer
    chunks: int = 0  # calls of a scan in chunks, per layer
    rules: int = 0  # calls of a delta rule, per layer


MODELS = {
    "mamba": Model("MambaForCausalLM", _MAMBA, 2, scans=1),
    "falcon_mamba": Model("FalconMambaForCausalLM", _MAMBA, 2, scans=1),
    "jamba": Model(
        "JambaForCausalLM",
        dict(
            _SMALL, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2,
            expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4,
            experts_implementation="eager",
        ),
        1, scans=1,
    ),
    "zamba": Model(
        "ZambaForCausalLM",
        dict(
            _SMALL | dict(num_key_value_heads=4, num_hidden_layers=3), mamba_d_state=8,
            mamba_dt_rank=4, layers_block_type=["mamba", "hybrid", "hybrid"],
            attention_hidden_size=64, attention_head_dim=16,
        ),
        3, steps=2, scans=2,
    ),
    "mamba2": Model(
        "Mamba2ForCausalLM",
        dict(_MAMBA, num_heads=8, head_dim=8, n_groups=2, state_size=16, chunk_size=4), 2,
        chunks=1,
    ),
    "bamba": Model("BambaForCausalLM", dict(_MAMBA2, attn_layer_indices=[1]), 1, chunks=1),
    "falcon_h1": Model("FalconH1ForCausalLM", dict(_MAMBA2, mamba_d_ssm=64), 2, chunks=1),
    "granitemoehybrid": Model(
        "GraniteMoeHybridForCausalLM",
        dict(
            _MAMBA2, layer_types=["mamba", "attention"], num_local_experts=2,
            shared_intermediate_size=16, experts_implementation="eager",
        ),
        1, chunks=1,
    ),
    "nemotron_h": Model(
        "NemotronHForCausalLM",
        dict(
            _SMALL, layers_block_type=["mamba", "attention", "mlp"], ssm_state_size=16,
            mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=4,
        ),
        1, chunks=1,
    ),
    "zamba2": Model(
        "Zamba2ForCausalLM",
        dict(
            _SMALL | dict(num_key_value_heads=4), layers_block_type=["mamba", "hybrid"],
            n_mamba_heads=8, mamba_d_state=16, mamba_ngroups=2, chunk_size=4, mamba_headdim=8,
            adapter_rank=4,
        ),
        2, chunks=1,
    ),
    "lfm2": Model(
        "Lfm2ForCausalLM", dict(_SMALL, layer_types=["conv", "full_attention"]), 1, steps=0
    ),
    "lfm2_moe": Model(
        "Lfm2MoeForCausalLM",
        dict(
            _SMALL, **_EXPERTS, layer_types=["conv", "full_attention"], num_experts=4,
            num_dense_layers=1,
        ),
        1, steps=0,
    ),
    "inkling": Model(
        "InklingForCausalLM",
        dict(
            _SMALL, **_EXPERTS, swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=8, sliding_window_size=5, d_rel=4, rel_extent=16, n_routed_experts=4,
            n_shared_experts=1, unpadded_vocab_size=32,
        ),
        8, steps=0,
    ),
    "inkling2": Model(
        "Inkling2ForCausalLM",
        dict(
            _SMALL, **_EXPERTS, swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=8, sliding_window_size=5, d_rel=4, rel_extent=16, n_routed_experts=4,
            unpadded_vocab_size=32,
        ),
        8, steps=0,
    ),
    "qwen3_next": Model("Qwen3NextForCausalLM", dict(_QWEN, layer_types=_MIXED), 1, **_RULE),
    "qwen3_5": Model("Qwen3_5ForCausalLM", dict(_DELTA, layer_types=_MIXED), 1, **_RULE),
    "qwen3_5_moe": Model("Qwen3_5MoeForCausalLM", dict(_QWEN, layer_types=_MIXED), 1, **_RULE),
    "qwen4_exp": Model(
        "Qwen4ExpForCausalLM",
        dict(
            _QWEN, layer_types=_MIXED, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
            indexer_budget=8, indexer_compress_ratio=2, hc_lowrank=4, hc_count=2,
        ),
        1, **_RULE,
    ),
    "olmo_hybrid": Model("OlmoHybridForCausalLM", dict(_DELTA, layer_types=_MIXED), 1, **_RULE),
    "kimi_linear": Model(
        "KimiLinearForCausalLM",
        dict(_LATENT, linear_head_dim=8, linear_num_heads=4, layer_types=_MIXED), 1,
        **_RULE,
    ),
    "bailing_hybrid": Model(
        "BailingHybridForCausalLM", dict(_LATENT, layer_types=_MIXED), 1, **_RULE
    ),
    "glm5_next": Model(
        "Glm5NextTextModel",
        dict(
            _LATENT, n_routed_experts=4, q_lora_rank=16, layer_types=_MIXED, linear_head_dim=8,
            linear_num_heads=4, index_topk=4, index_kpool=2, index_n_heads=2, index_head_dim=8,
            qk_rope_head_dim=0,
        ),
        1, **_RULE,
    ),
}  # fmt: skip


def build(name: str):
    """A model in eval mode, the same one each time."""
    cls = getattr(transformers, MODELS[name].cls)
    torch.manual_seed(0)
    model = cls(cls.config_class(**MODELS[name].settings)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in key:
                parameter.copy_(0.7 * parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def in_dtype(model, dtype: torch.dtype):
    """The model, but for parts that transformers keeps in float32."""
    kept = [
        name for m in model.modules() for name in getattr(m, "_keep_in_fp32_modules_strict", ())
    ]
    wide = {id(p) for name, p in model.named_parameters() if any(part in name for part in kept)}
    return model._apply(lambda x: x.to(dtype) if x.is_floating_point() and id(x) not in wide else x)


class InDouble(TorchFunctionMode):
    """Casts to float32 become casts to float64: forwards of a model in float64 are then exact."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)
