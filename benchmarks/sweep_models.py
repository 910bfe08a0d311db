"""Architectures for the sweep: of transformers, timm and diffusers, tiny, with random weights.

A config of transformers starts from its class's defaults; the settings that are sizes, known by
their names, become small. SETTINGS holds further settings that a model needs. A batch is made from
the names of forward's arguments. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import sys
import types

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

SEQ, ROWS, VOCAB, WIDTH, IMAGE = 12, 2, 64, 32, 32

# Sizes: their names in configs, and their values here.
_SIZES = (
    (
        VOCAB,
        "vocab_size text_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size "
        "vocab_size_per_layer_input codebook_vocab_size",
    ),
    (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim d_embed "
        "projection_dim text_hidden_size encoder_hidden_size decoder_hidden_size out_hidden_size "
        "word_embed_proj_dim embedding_dim emb_dim n_hidden attention_hidden_size rnn_hidden_dim "
        "lru_width mamba_d_ssm true_hidden_size output_dim "
        "feature_size output_hidden_size",
    ),
    (
        48,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner "
        "dim_feedforward feedforward_size mlp_dim encoder_intermediate_size "
        "decoder_intermediate_size ffn_hidden_size d_intermediate dense_ffn_hidden_size "
        "shared_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "hidden_size_per_layer_input image_proj_dim kv_lora_rank q_lora_rank "
        "num_conv_pos_embeddings bottleneck_dim char_embedding_dim codevector_dim num_mel_bins "
        "conv_dim "
        "mamba_d_state state_size ssm_state_size d_state mamba_state_size linear_key_head_dim "
        "linear_value_head_dim input_feat_per_channel index_head_dim",
    ),
    (
        2,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers "
        "num_blocks text_layers num_conv_pos_embedding_groups d_layers e_layers "
        "mamba_n_groups num_experts_per_tok moe_topk top_k_experts moe_top_k index_n_heads "
        "num_key_value_heads",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads patch_size "
        "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
        "linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_num_heads",
    ),
    (
        8,
        "head_dim d_kv d_head kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "attention_head_dim global_head_dim mamba_head_dim mamba_d_head rotary_dim qk_head_dim "
        "",
    ),
    (IMAGE, "image_size img_size input_image_size"),
    (
        64,
        "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length "
        "max_source_positions max_target_positions max_2d_position_embeddings "
        "max_window_layers num_position_embeddings",
    ),
    (0, "pad_token_id"),
    (
        1,
        "bos_token_id decoder_start_token_id n_group topk_group "
        "first_k_dense_replace num_hidden_groups inner_group_num",
    ),
    (3, "eos_token_id sep_token_id"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
_OFF = ("drop", "mask_time_prob", "mask_feature_prob")  # parts of names of probabilities

# type of model: settings beside the small sizes
SETTINGS: dict[str, dict] = {}
SKIPPED = ("timm_backbone", "timm_wrapper")

_CLASSES = (
    "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL",
)  # fmt: skip


# --- transformers ---


def transformers_names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return [name for name in MODEL_MAPPING_NAMES if name not in SKIPPED]


def _small(config, settings: dict) -> dict:
    """Settings that make a config of this class small, nested configs included."""
    small = {}
    nested = getattr(type(config), "sub_configs", {})
    for name, value in config.to_dict().items():
        if name in nested:
            continue
        if name in _SIZE_OF and isinstance(value, (int, type(None))) and type(value) is not bool:
            if value is None and _SIZE_OF[name] not in (0, 1, 3):
                continue
            small[name] = _SIZE_OF[name]
        elif name in _SIZE_OF and isinstance(value, (list, tuple)) and value:
            if all(isinstance(item, int) for item in value):
                small[name] = type(value)([_SIZE_OF[name]] * len(value))
        elif any(word in name for word in _OFF) and isinstance(value, float):
            small[name] = 0.0
        elif name == "depths":
            small[name] = [1] * len(value)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1 and all(isinstance(kind, str) for kind in kinds):
        small["layer_types"] = (kinds * 2)[:2]
    for name in nested:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            small[name] = _small(inner, {})
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(small.get(name), dict):
            small[name] |= value
        else:
            small[name] = value
    return small


def build_transformers(name: str) -> nn.Module:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    settings = _small(kind(), SETTINGS.get(name, {}))
    config = kind(**settings)
    for mapping in _CLASSES:
        found = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").get(name)
        if found:
            break
    return getattr(transformers, found if isinstance(found, str) else found[0])(config)


def batches(model: nn.Module) -> dict[str, dict]:
    """Inputs by the names of forward's arguments: "plain", and padded "right" and "left" if forward
    takes a mask. For models of text and images, text alone if that runs."""
    last = None
    for with_images in (True, False):
        batch = _batch(model, with_images)
        try:
            with torch.no_grad():
                model(**batch)
            break
        except Exception as error:
            last = last or error
    else:
        raise last
    made = {"plain": batch}
    if "attention_mask" in inspect.signature(model.forward).parameters and "input_ids" in batch:
        for side, masked in (("right", slice(8, None)), ("left", slice(4))):
            mask = torch.ones(ROWS, SEQ, dtype=torch.long)
            mask[1, masked] = 0
            made[side] = {**batch, "attention_mask": mask}
            labels = batch.get("labels")
            if labels is not None and labels.shape == mask.shape:
                seen = mask.bool()
                if side == "left":  # the last row of padding predicts the first token
                    seen = seen & (mask.cumsum(-1) > (mask.amin(-1, keepdim=True) == 0))
                made[side]["labels"] = labels.masked_fill(~seen, -100)
    return made


def _batch(model: nn.Module, with_images: bool) -> dict[str, Tensor]:
    arguments = inspect.signature(model.forward).parameters
    config = model.config
    random = torch.Generator().manual_seed(1)
    ids = torch.arange(ROWS * SEQ).reshape(ROWS, SEQ) * 7 % (VOCAB - 10) + 5
    batch = {}
    if "input_ids" in arguments:
        batch["input_ids"] = ids
        if "labels" in arguments and type(model).__name__.endswith(("LM", "LMHeadModel")):
            batch["labels"] = ids
    if "bbox" in arguments:
        batch["bbox"] = torch.arange(4).expand(ROWS, SEQ, 4).contiguous() * 7
    if "decoder_input_ids" in arguments and getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids[:, :7].contiguous()
        if "labels" in arguments and "input_ids" in arguments:
            batch["labels"] = ids[:, :7].contiguous()
    text = "input_ids" in batch
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    size = getattr(vision, "image_size", None) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if "pixel_values" in arguments and with_images:
        batch["pixel_values"] = torch.randn(ROWS, channels, height, width, generator=random)
    if "input_values" in arguments and not text:
        batch["input_values"] = torch.randn(ROWS, 1600, generator=random)
    if "input_features" in arguments and not text:
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 16)
        shape = (mels, 2 * 64) if hasattr(config, "max_source_positions") else (40, mels)
        batch["input_features"] = torch.randn(ROWS, *shape, generator=random)
    return batch


# --- timm ---

# The smallest model of each architecture, at the smallest image it takes.
TIMM = """
beit_base_patch16_224 beitv2_base_patch16_224 cait_xxs24_224 caformer_s18 coat_tiny
coatnet_0_rw_224 convformer_s18 convit_tiny convmixer_768_32 convnext_atto convnextv2_atto
crossvit_tiny_240 cs3darknet_s davit_tiny deit_tiny_patch16_224 deit3_small_patch16_224 densenet121
dpn68 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvit_b0
efficientvit_m0 eva02_tiny_patch14_224 fastvit_t8 fastvit_sa12 flexivit_small focalnet_tiny_srf
gcvit_xxtiny ghostnet_100 gmixer_24_224 hgnet_tiny hiera_tiny_224 hrnet_w18_small
inception_next_atto levit_128s levit_conv_128s mambaout_femto maxvit_tiny_rw_224
maxxvit_rmlp_nano_rw_256 mixer_s32_224 mobilenetv3_small_050 mobilenetv4_conv_small mobilevit_xxs
mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_gap nest_tiny nextvit_small pit_ti_224
poolformer_s12 poolformerv2_s12 pvt_v2_b0 regnetx_002 regnety_002 repghostnet_050 repvit_m0_9
resmlp_12_224 resnet18 resnetv2_50 rexnet_100 samvit_base_patch16 seresnext26d_32x4d sequencer2d_s
shvit_s1 starnet_s1 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
swinv2_cr_tiny_ns_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_pcpvt_small
twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_224 vit_relpos_small_patch16_224
vit_srelpos_small_patch16_224 vit_base_patch16_rope_224 vit_small_patch16_dinov3 vitamin_small_224
volo_d1_224 xcit_nano_12_p16_224 xception41 vit_base_patch16_siglip_224
vit_betwixt_patch16_reg4_gap_256 vit_little_patch16_reg4_gap_256 vit_pe_core_tiny_patch16_384
vit_so150m_patch16_reg4_gap_256
""".split()
_TIMM_SIZES = (
    {"depth": 2, "img_size": 64},
    {"depths": (1, 1, 1, 1), "img_size": 64},
    {"img_size": 64},
    {"depths": (1, 1, 1, 1)},
    {},
)


def timm_names() -> list[str]:
    return TIMM


def build_timm(name: str) -> nn.Module:
    _stub_torchvision()
    import timm

    random = torch.Generator().manual_seed(1)
    for sizes in _TIMM_SIZES:
        try:
            model = timm.create_model(name, pretrained=False, num_classes=10, **sizes)
        except Exception:
            if not sizes:
                raise
            continue
        for size in (sizes.get("img_size", 64), model.default_cfg["input_size"][-1]):
            model.sweep_batch = (torch.randn(ROWS, 3, size, size, generator=random),)
            with contextlib.suppress(Exception), torch.no_grad():
                model.eval()(*model.sweep_batch)
                return model
    raise RuntimeError(f"{name}: no size of image runs")


def _stub_torchvision() -> None:
    """Replaces torchvision, which brings a torch of its own: timm imports names from it, but models
    run without. Each name in each of its modules is an empty class."""
    if "torchvision" in sys.modules:
        return

    class Anything(type):
        def __getattr__(cls, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name, (), {})

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name, (), {})

    for name in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets"):
        module = Module("torchvision" + name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module


# --- diffusers ---


def _image(channels, size=8):
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(1))


def _text(width, seed=2):
    return torch.randn(ROWS, SEQ, width, generator=torch.Generator().manual_seed(seed))


_STEP = torch.tensor([3, 7])
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}

# name: (settings, function that makes the batch)
DIFFUSERS: dict[str, tuple] = {
    "DiTTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 16},
        lambda: {
            "hidden_states": _image(4),
            "timestep": _STEP,
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 8, "sample_size": 8,
         "cross_attention_dim": 32, "caption_channels": 24, "use_additional_conditions": False},
        lambda: {
            "hidden_states": _image(4),
            "encoder_hidden_states": _text(24),
            "timestep": _STEP,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "patch_size": 2,
         "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 24,
         "pos_embed_max_size": 8},
        lambda: {
            "hidden_states": _image(4),
            "encoder_hidden_states": _text(32),
            "pooled_projections": _text(24)[:, 0],
            "timestep": _STEP,
        },
    ),
    "FluxTransformer2DModel": (
        {**_HEADS, "num_single_layers": 2, "in_channels": 4, "joint_attention_dim": 32,
         "pooled_projection_dim": 24, "axes_dims_rope": [4, 4, 8], "patch_size": 1},
        lambda: {
            "hidden_states": _image(4).flatten(2).transpose(1, 2),
            "encoder_hidden_states": _text(32),
            "pooled_projections": _text(24)[:, 0],
            "timestep": torch.tensor([0.3, 0.7]),
            "txt_ids": torch.zeros(SEQ, 3),
            "img_ids": torch.stack(torch.meshgrid(
                torch.zeros(1), torch.arange(8.0), torch.arange(8.0), indexing="ij"
            ), -1).reshape(64, 3),
        },
    ),
    "Transformer2DModel": (
        {**_HEADS, "in_channels": 32, "cross_attention_dim": 32, "norm_num_groups": 8},
        lambda: {"hidden_states": _image(32), "encoder_hidden_states": _text(32)},
    ),
    "UNet2DConditionModel": (
        {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1,
         "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda: {"sample": _image(4), "timestep": _STEP, "encoder_hidden_states": _text(32)},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
         "num_single_dit_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "caption_projection_dim": 32, "out_channels": 4,
         "pos_embed_max_size": 64},
        lambda: {
            "hidden_states": _image(4),
            "encoder_hidden_states": _text(32),
            "timestep": torch.tensor([0.3, 0.7]),
        },
    ),
    "SanaTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24,
         "sample_size": 8, "patch_size": 1},
        lambda: {
            "hidden_states": _image(4), "encoder_hidden_states": _text(24), "timestep": _STEP,
        },
    ),
    "CogView3PlusTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "patch_size": 2, "text_embed_dim": 24,
         "time_embed_dim": 16, "condition_dim": 8, "pos_embed_max_size": 8, "sample_size": 8},
        lambda: {
            "hidden_states": _image(4),
            "encoder_hidden_states": _text(24),
            "timestep": _STEP,
            "original_size": torch.full((ROWS, 2), 64.0),
            "target_size": torch.full((ROWS, 2), 64.0),
            "crop_coords": torch.zeros(ROWS, 2),
        },
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
         "text_dim": 16, "freq_dim": 32, "ffn_dim": 48, "num_layers": 2},
        lambda: {
            "hidden_states": _image(4)[:, :, None].repeat(1, 1, 2, 1, 1),
            "timestep": _STEP,
            "encoder_hidden_states": _text(16),
        },
    ),
    "LTXVideoTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8, "out_channels": 8,
         "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16},
        lambda: {
            "hidden_states": torch.randn(ROWS, 32, 8, generator=torch.Generator().manual_seed(1)),
            "encoder_hidden_states": _text(16),
            "timestep": _STEP,
            "encoder_attention_mask": torch.ones(ROWS, SEQ, dtype=torch.bool),
            "num_frames": 2, "height": 4, "width": 4,
        },
    ),
    "QwenImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
         "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
         "axes_dims_rope": (8, 4, 4)},
        lambda: {
            "hidden_states": torch.randn(ROWS, 16, 16, generator=torch.Generator().manual_seed(1)),
            "encoder_hidden_states": _text(16),
            "encoder_hidden_states_mask": torch.ones(ROWS, SEQ, dtype=torch.long),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_shapes": [[(1, 4, 4)]] * ROWS,
        },
    ),
    "PriorTransformer": (
        {**_HEADS, "embedding_dim": 16, "num_embeddings": 7, "additional_embeddings": 4},
        lambda: {
            "hidden_states": _text(16)[:, 0],
            "timestep": _STEP,
            "proj_embedding": _text(16, 3)[:, 0],
            "encoder_hidden_states": _text(16)[:, :7],
        },
    ),
}  # fmt: skip


def diffusers_names() -> list[str]:
    return list(DIFFUSERS)


def build_diffusers(name: str) -> nn.Module:
    import diffusers

    settings, batch = DIFFUSERS[name]
    model = getattr(diffusers, name)(**settings)
    model.sweep_batch = batch()
    return model


# --- all ---

FAMILIES = {
    "transformers": (transformers_names, build_transformers),
    "timm": (timm_names, build_timm),
    "diffusers": (diffusers_names, build_diffusers),
}


def build(family: str, name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, dict | tuple]]:
    """(a model whose weights are far from an initialisation's, its batches by name)."""
    if family == "transformers":
        size = 0
        with contextlib.suppress(Exception), torch.device("meta"):
            size = sum(parameter.numel() for parameter in build_transformers(name).parameters())
        if size > MOST_PARAMETERS:
            raise TooBig(f"{size / 1e6:.0f}M parameters")
    for randomised in (True, False):
        torch.manual_seed(0)
        model = FAMILIES[family][1](name).eval()
        if randomised:
            _randomise(model)
        made = getattr(model, "sweep_batch", None)
        made = batches(model) if made is None else {"plain": made}
        model.to(dtype)
        made = pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, made)
        if _moderate(model, made["plain"]):
            return model, made
    raise RuntimeError("its outputs are not finite, or huge")


class TooBig(RuntimeError):
    pass


MOST_PARAMETERS = 8_000_000


def call(model: nn.Module, batch: dict | tuple):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def outputs(result) -> list[Tensor]:
    """The floating-point tensors in what a model returns."""
    result = dict(result) if isinstance(result, dict) else result
    return [leaf for leaf in pytree.tree_leaves(result) if _is_floating(leaf)]


def _is_floating(leaf) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _randomise(model: nn.Module) -> None:
    """Sets weights so that attention is far from uniform, and biases that matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(1.5 * fan_in**-0.5 * random)
            else:
                parameter.add_(0.1 * random)


def _moderate(model: nn.Module, batch: dict | tuple) -> bool:
    """Whether outputs are small enough for gradients: FastViT's, of 1e12, are not."""
    with torch.no_grad():
        found = outputs(call(model, batch))
    return all(bool((tensor.abs() < 1e6).all()) for tensor in found if tensor.numel())
