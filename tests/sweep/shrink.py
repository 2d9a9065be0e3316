"""Tiny random models of every text model type that transformers knows, cut down from the default configs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, INNER, POSITIONS, WINDOW, EXPERTS, TOP = 97, 32, 4, 2, 64, 32, 16, 4, 2
INIT = 0.3  # with the usual 0.02 attention is nearly uniform, and errors in positions hide

# Small values of attributes, set where the default config has the attribute.
_GROUPS: list[tuple[float, str]] = [
    (
        VOCAB,
        "vocab_size decoder_vocab_size vocab_size_per_layer_input entity_vocab_size pronunciation_vocab_size"
        " shape_vocab_size audio_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    ),
    (
        HIDDEN,
        "embedding_size input_embedding_size output_embedding_size word_embed_proj_dim d_latents lru_width"
        " attention_hidden_size embedding_dim entity_emb_size pronunciation_embed_dim shape_embed_dim"
        " pooler_hidden_size true_hidden_size backbone_hidden_size out_hidden_size hidden_size_global"
        " prediction_head_size vision_output_dim projector_input_dim projector_output_dim input_size"
        " image_size output_channels nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"
        " num_position_embeddings position_embedding_size output_proj_dims router_hidden_size num_filters",
    ),
    (
        HEADS,
        "num_attention_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads"
        " num_decoder_attention_heads attention_heads swa_num_attention_heads num_self_attention_heads num_heads"
        " num_cross_attention_heads conf_num_attention_heads linear_num_heads linear_num_value_heads"
        " index_n_heads num_attention_heads_per_layer mamba_num_heads n_mamba_heads",
    ),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads linear_num_key_heads"),
    (
        2,
        "num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers depth num_codebooks"
        " num_self_attends_per_block num_blocks conf_num_hidden_layers num_global_layers",
    ),
    (
        INNER,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim dim_ff dff d_inner d_ff hidden_dim mlp_dim"
        " ffn_hidden_size feed_forward_size expert_ffn_hidden_size moe_intermediate_size dense_intermediate_size"
        " shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"
        " intermediate_size_mlp prompt_mid_dim codebook_size mamba_d_ssm",
    ),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (TOP, "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k"),
    (
        1,
        "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups o_groups n_shared_experts"
        " num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers num_layers_per_stack",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions"
        " context_length model_max_length max_2d_position_embeddings",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size local_attention attention_window attention_window_size window_size"
        " attention_chunk_size original_max_position_embeddings patch_size",
    ),
    (INIT, "initializer_range init_std initializer_factor embed_init_std embedding_initializer_range"),
    (16, "kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim v_head_dim mamba_head_dim hc_lowrank index_head_dim"),
    (
        8,
        "qk_rope_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state state_size"
        " ssm_state_size adapter_rank laurel_rank hidden_size_per_layer_input d_rel embedding_rank mamba_chunk_size"
        " chunk_size block_size time_step_rank mamba_dt_rank mamba_n_heads mamba_d_head"
        " d_head d_kv dim_head attention_head_size swa_head_dim kv_channels",
    ),
]
SMALL = {name: value for value, names in _GROUPS for name in names.split()}
# Attributes which follow from others if left alone; the default config holds them resolved for the large sizes.
RESOLVED = ("num_key_value_heads", "head_dim", "rotary_dim")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "mask_token_id": 3}
TOKEN_IDS |= {"cls_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 2, "forced_bos_token_id": 1}

# What the rules above cannot know, by model type of the (sub-)config.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},  # its cache asks for it
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0}},  # the model asks for them
    "deepseek_v2": {"num_experts_per_tok": TOP},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "flint": {"mlp_only_layers": [0]},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1]},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "mimo_v2_flash": {"head_dim": 24},  # of which 0.334 are rotated: 8
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "perceiver": {"d_model": HIDDEN, "num_latents": 16, "initializer_range": 0.1},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "w_init_variance_scale": 1.0},
    "reformer": {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"]},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
}
# Layers to keep where the first of each kind are not enough: those which share keys, or a block, with an earlier one.
KEPT = {"gemma3n_text": [0, 4, 20, 24], "zamba": [0, 2, 7]}
# Without these arguments the default config does not hold.
NEEDED = {"gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}}


def head_of(model_type: str) -> str:
    """Name of the head class: of the causal LM, but of the masked LM for types of encoders (BERT and kin)."""
    if model_type in CAUSAL and (model_type not in MASKED or CONFIG_MAPPING[model_type]().is_encoder_decoder):
        return CAUSAL[model_type]
    return MASKED[model_type]


def class_of(model_type: str) -> Any:
    """The class of a type's models: with its head, if transformers lists one or its owner registered one."""
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model type {model_type!r}; --register imports a module that adds it")
    if model_type in {*CAUSAL, *MASKED}:
        return getattr(transformers, head_of(model_type))
    config = CONFIG_MAPPING[model_type]
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING)
    heads = [mapping[config] for mapping in mappings if config in mapping]
    return heads[0] if heads else None


def is_causal(model_type: str) -> bool:
    if model_type in {*CAUSAL, *MASKED}:
        return head_of(model_type) == CAUSAL.get(model_type)
    return CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of a type, made small; with all its sub-configs."""
    return _shrunk(CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {})), is_causal(model_type))


PLAIN = {"rope_type": "default"}
SCALED: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": POSITIONS // 2}
SCALED |= {"mscale": 1.0, "mscale_all_dim": 0.7}
"""A RoPE that was scaled when the model was trained; with options that some attention layers read by themselves."""


def tiny_model(model_type: str, seed: int = 0, rope: dict[str, Any] | None = None) -> PreTrainedModel:
    """A tiny random model of a type, fp32 in eval mode; the same weights for the same seed.

    `rope`: what its RoPE is like, besides its theta and the part of a head that rotates.
    """
    model_class = class_of(model_type)
    config = tiny_config(model_type)
    if not isinstance(config, model_class.config_class):  # the head of a part, such as the text model of llama4
        parts = [part for part in vars(config).values() if isinstance(part, model_class.config_class)]
        config = parts[0]
    if rope is not None:
        text = config.get_text_config()
        kept = ("rope_theta", "partial_rotary_factor", "mrope_section")
        text.rope_parameters = {k: v for k, v in text.rope_parameters.items() if k in kept} | rope
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".temp"):  # zero would make all keys alike
                weight.fill_(1.0)
            if weight.dim() > 1 and weight.square().mean() < 0.05**2:  # fixed near zero, it hides what passes through
                weight.normal_(std=INIT)
    return model


def _shrunk(default: PreTrainedConfig, causal: bool) -> PreTrainedConfig:
    """A small config of the same class, built anew so that what follows from the sizes is worked out again."""
    default.allow_global_per_layer_attribute_access = True
    layers = KEPT.get(default.model_type) or _layers(default)
    rotated = _rotated(default)
    head_dim = 8 if rotated >= 0.5 else 16 if rotated >= 0.25 else 32  # at least two frequencies
    small = {**SMALL, "hidden_size": HEADS * head_dim, "head_dim": head_dim, "num_hidden_layers": len(layers)}
    small["rotary_dim"] = int(head_dim * rotated)
    generic = {own: name for name, own in default.attribute_map.items()}
    changes: dict[str, Any] = {}
    for field in fields(default):
        name, value = field.name, getattr(default, field.name, None)
        key = generic.get(name, name)
        key = key if key in small else name
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrunk(value, causal)
        elif name == "rope_parameters":
            changes[name] = _rope(value)
        elif _per_layer(value, default):
            changes[name] = [small.get(key, value[layer]) for layer in layers]
        elif name in TOKEN_IDS and value is not None:
            changes[name] = value if value in (0, 1, 2) else TOKEN_IDS[name]
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
        elif key == "head_dim" or (key in small and value is not None and (name in RESOLVED or field.default)):
            changes[name] = min(value, small[key]) if isinstance(value, int) else small[key]
        elif name == "is_decoder":
            changes[name] = causal
    if getattr(default, "kv_lora_rank", None) and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = HEADS  # latent attention has no groups
    changes |= EXCEPTIONS.get(default.model_type, {})
    return type(default)(**changes)


def _per_layer(value: Any, config: PreTrainedConfig) -> bool:
    """Whether a value is a list with one entry per layer."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(value, (list, tuple)) or len(value) != count or count <= 2:
        return False
    return list(value) != list(range(count))  # which are indices of layers


def _layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the layers to keep: two, or as many as show each kind of layer once."""
    lists = [value for value in vars(config).values() if _per_layer(value, config)]
    kept = {value.index(kind) for value in lists for kind in value}
    for layer in (0, 1):
        if len(kept) < 2:
            kept.add(layer)
    return sorted(kept)


def _rotated(config: PreTrainedConfig) -> float:
    """The least share of a head that rotary embeddings turn."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    share = min(part.get("partial_rotary_factor", 1.0) for part in parts)
    if getattr(config, "rotary_dim", None):
        share = config.rotary_dim / (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
    return share


def _rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """The same kind of rotary embedding, stretched from half the positions where it is a stretched one."""
    if not rope:
        return rope
    rope = {key: _rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if "original_max_position_embeddings" in rope:
        rope |= {"original_max_position_embeddings": POSITIONS // 2, "factor": 2.0}
    if "max_position_embeddings" in rope:
        rope["max_position_embeddings"] = POSITIONS
    return rope
