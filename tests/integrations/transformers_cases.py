"""Small models of transformers with random weights, and their inputs."""

import pytest
import torch

from onepass import _dispatch_log, numerics

transformers = pytest.importorskip("transformers")

SEQ = 12
IDS = (torch.arange(2 * SEQ).reshape(2, SEQ) * 7) % 29 + 2
PADDING = {"none": None, "right": torch.ones(2, SEQ), "left": torch.ones(2, SEQ)}
PADDING["right"][1, 8:] = 0
PADDING["left"][1, :4] = 0

_SMALL = dict(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
_GROUPED = dict(_SMALL, num_key_value_heads=2)
_VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
    patch_size=4,
)  # fmt: skip
_SEQ_TO_SEQ = dict(
    vocab_size=32, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
    bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
)  # fmt: skip
_T5 = dict(
    vocab_size=32, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0,
    decoder_start_token_id=0, dropout_rate=0.0,
)  # fmt: skip
_LATENT = dict(
    _SMALL, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
    topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, experts_implementation="eager",
)  # fmt: skip

_WINDOWED = dict(_GROUPED, head_dim=8, sliding_window=5)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager")
_COMPRESSED = ["compressed_sparse_attention", "heavily_compressed_attention"]

# name: (class of the model, settings of its config); models that run on "sdpa", one for each way in
# which they call it
MODELS = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ),
    "mistral": ("MistralForCausalLM", dict(_GROUPED, sliding_window=5)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        dict(_LATENT, index_topk=4, index_n_heads=2, index_head_dim=16),
    ),
    "bert": ("BertForMaskedLM", _SMALL),
    "t5": ("T5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _SEQ_TO_SEQ),
    "whisper": (
        "WhisperForConditionalGeneration",
        dict(_SEQ_TO_SEQ, num_mel_bins=8, max_source_positions=10, suppress_tokens=None),
    ),
    "vit": ("ViTModel", _VISION),
    "clip": ("CLIPModel", dict(text_config=dict(_SMALL, eos_token_id=1), vision_config=_VISION)),
    "siglip": ("SiglipModel", dict(text_config=_SMALL, vision_config=_VISION)),
}
# models that transformers runs on "eager" alone
EAGER = {
    "gemma2": ("Gemma2ForCausalLM", dict(_WINDOWED, attn_logit_softcapping=2.0)),
    "gpt_oss": ("GptOssForCausalLM", dict(_WINDOWED, **_EXPERTS, num_local_experts=4)),
    "vaultgemma": ("VaultGemmaForCausalLM", dict(_WINDOWED, attn_logit_softcapping=2.0)),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        dict(
            encoder=dict(_WINDOWED, attn_logit_softcapping=2.0),
            decoder=dict(_WINDOWED, attn_logit_softcapping=2.0), vocab_size=32, pad_token_id=0,
        ),
    ),
    "flint": ("FlintForCausalLM", dict(_WINDOWED, **_EXPERTS, num_experts=4)),
    "granite_swa": ("GraniteSWAForCausalLM", _WINDOWED),
    "granitemoe_swa": (
        "GraniteMoeSWAForCausalLM",
        dict(_WINDOWED, **_EXPERTS, num_local_experts=4),
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        dict(
            _WINDOWED, **_EXPERTS, n_routed_experts=4, v_head_dim=12, swa_num_key_value_heads=4,
            swa_num_attention_heads=4, swa_head_dim=8, swa_v_head_dim=12,
        ),
    ),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterForTokenClassification",
        dict(_WINDOWED, **_EXPERTS, num_local_experts=4),
    ),
    "hy_v4": ("HYV4ForCausalLM", dict(_LATENT, index_topk=4, index_n_heads=2, index_head_dim=16)),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        dict(
            _SMALL, **_EXPERTS, head_dim=16, q_lora_rank=16, n_routed_experts=4, sliding_window=5,
            o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=16, index_topk=2,
            layer_types=_COMPRESSED, compress_rates=dict(zip(_COMPRESSED, (2, 4), strict=True)),
        ),
    ),
    "videoprism_text_model": ("VideoPrismTextModel", _SMALL),
}  # fmt: skip
MODELS.update(EAGER)

# They rotate in ways of their own, and call attention as others do.
ROTATING = {
    "qwen3": ("Qwen3ForCausalLM", dict(_GROUPED, head_dim=8)),
    "phi": ("PhiForCausalLM", _GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "glm": ("GlmForCausalLM", dict(_GROUPED, head_dim=8)),
    "olmo": ("OlmoForCausalLM", _GROUPED),
}
# Draws of gradients: one is too few for so small a model, eight too few for a scale of one number.
DRAWS = (8, 40)
ENCODER_DECODER = ("t5", "umt5", "t5gemma", "bart", "whisper")


def build(name: str, **more):
    """A model in eval mode, the same one each time."""
    cls, settings = (MODELS | ROTATING)[name]
    cls = getattr(transformers, cls)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**settings, **more})).eval()
    with torch.no_grad():  # attention weights far from uniform, and biases with an effect
        for parameter in model.parameters():
            random = torch.randn(parameter.shape)
            if parameter.dim() > 1:
                parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * random)
            else:
                parameter.add_(0.1 * random)
    return model


def inputs(name: str, padding: str = "none") -> dict:
    mask = PADDING[padding]
    batch = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    if name == "vit":
        return {"pixel_values": pixels}
    if name in ("clip", "siglip"):
        return {**batch, "pixel_values": pixels}
    if name == "whisper":
        features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
        return {"input_features": features, "decoder_input_ids": IDS[:, :6]}
    if name in ENCODER_DECODER:
        return {**batch, "decoder_input_ids": IDS[:, :6]}
    return batch


def doubled(batch: dict) -> dict:
    return {k: v.double() if k.endswith(("values", "features")) else v for k, v in batch.items()}


def output(name: str, model, batch: dict) -> torch.Tensor:
    """The compared output, without rows of padding."""
    result = model(**batch)
    if name == "vit":
        return result.last_hidden_state
    if name == "videoprism_text_model":
        return result.pooler_output
    if name in ("clip", "siglip"):
        return torch.cat([result.text_embeds, result.image_embeds], -1)
    mask = batch.get("attention_mask")
    if mask is None or name in ENCODER_DECODER:
        return result.logits
    return result.logits[mask.bool()]


def run(function, *args, **kwargs):
    """(its result, the attention operators that it ran)."""
    with _dispatch_log.record() as calls:
        result = function(*args, **kwargs)
    return result, [call["op"] for call in calls if call["op"].startswith("attention")]


def close(a, b) -> None:
    """The same up to rounding on another path; test_values_and_gradients tests the error."""
    torch.testing.assert_close(a, b)


def implementations(model) -> list[str]:
    """The attention implementations in all configs, sub-configs included."""
    found = {}
    for module in model.modules():
        pending = [module.config] if isinstance(module, transformers.PreTrainedModel) else []
        while pending:
            config = pending.pop()
            found[id(config)] = config._attn_implementation
            pending += [getattr(config, key) for key in config.sub_configs]
    return list(found.values())


def kinds(model):
    return [type(module) for module in model.modules()]


def assert_gradients_close(*batches) -> None:
    """By the numerics rule: the gradients of all parameters in three runs of (model, output) of
    each batch, with ours, in float64, and stock's, for random upstream gradients."""
    draws: list[list[torch.Tensor]] = []
    for count in DRAWS:
        while len(draws) < count:
            runs = batches[len(draws) % len(batches)]
            weights = torch.randn(runs[0][1].shape, dtype=torch.float64)
            draws.append(_gradients(runs, weights))
        pooled = [torch.stack(parameter, 1) for parameter in zip(*draws, strict=True)]
        sizes = [of_ref.abs().max() for _, of_ref, _ in pooled]
        # Relative to the largest of each parameter, except gradients that are zero up to rounding.
        shares = [p / s for p, s in zip(pooled, sizes, strict=True) if s > 1e-3 * max(sizes)]
        assert len(shares) > 8
        found = [torch.cat([share[n].flatten() for share in shares]) for n in range(3)]
        found[0] = found[0].float()
        if numerics.compare(*found).ok:
            return
    numerics.assert_close(*found)


def _gradients(runs, weights: torch.Tensor) -> list[torch.Tensor]:
    """Per parameter that has one, its gradients in all runs of (model, output)."""
    results = []
    for m, y in runs:
        wanted = [parameter for parameter in m.parameters() if parameter.requires_grad]
        loss = (y * weights.to(y)).sum()
        results.append(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    assert [g is None for g in results[0]] == [g is None for g in results[2]]
    return [
        torch.stack([g.double() for g in parameter])
        for parameter in zip(*results, strict=True)
        if parameter[0] is not None
    ]
