# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Configurations of a few thousand parameters for any architecture: the library's defaults with every size shrunk."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .overrides import COMPOSITES, DROP, OVERRIDES


VOCABULARY_SIZE = 128
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
# Ids of image, audio, ... placeholders start here: prompts take their text tokens from below
FIRST_SPECIAL_TOKEN_ID = 100


def _sizes(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Field name -> tiny value, taken where the default is a number
SIZES = {
    **_sizes(
        64, "hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim d_embed emb_dim model_dim dim"
    ),
    **_sizes(
        64, "embedding_dim decoder_hidden_size hidden_dim encoder_hidden_dim text_hidden_size vision_hidden_size"
    ),
    **_sizes(
        64, "audio_hidden_size attention_hidden_size out_hidden_size projection_dim projector_hidden_size lru_width"
    ),
    **_sizes(64, "intermediate_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size n_inner"),
    **_sizes(64, "encoder_intermediate_size decoder_intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff"),
    **_sizes(64, "ffn_hidden_size feed_forward_size inner_hidden_size dim_ff dff"),
    **_sizes(
        32, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size expert_dim"
    ),
    **_sizes(32, "expert_ffn_hidden_size q_lora_rank mamba_d_head mamba_head_dim mamba_headdim"),
    **_sizes(
        16, "kv_lora_rank v_head_dim index_head_dim d_kv global_head_dim linear_key_head_dim linear_value_head_dim"
    ),
    **_sizes(16, "mamba_d_state ssm_state_size state_size num_mel_bins n_mels adapter_dim image_size"),
    **_sizes(16, "hidden_size_per_layer_input"),
    **_sizes(8, "qk_rope_head_dim qk_nope_head_dim index_topk laurel_rank rotary_dim relative_attention_num_buckets"),
    **_sizes(8, "sliding_window sliding_window_size attention_window attention_window_size attention_chunk_size"),
    **_sizes(8, "window_size local_attention mamba_chunk_size chunk_size patch_size"),
    **_sizes(4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads mamba_n_heads"),
    **_sizes(4, "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads mamba_num_heads"),
    **_sizes(
        4, "encoder_num_attention_heads decoder_num_attention_heads swa_num_attention_heads linear_num_value_heads"
    ),
    **_sizes(4, "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts"),
    **_sizes(3, "num_channels"),
    **_sizes(2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers"),
    **_sizes(2, "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth vision_depth"),
    **_sizes(
        2, "num_experts_per_tok top_k_experts moe_topk moe_top_k num_experts_per_token num_selected_experts moe_k"
    ),
    **_sizes(
        2, "zero_expert_num index_n_heads index_heads linear_num_key_heads n_mamba_heads num_global_key_value_heads"
    ),
    **_sizes(1, "n_group topk_group num_expert_groups num_expert_group topk_groups moe_n_group n_shared_experts"),
    **_sizes(1, "first_k_dense_replace"),
    **_sizes(256, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len max_source_positions"),
    **_sizes(256, "max_target_positions num_position_embeddings"),
    **_sizes(
        64, "alignment_intermediate_size mlp_dim speech_encoder_intermediate_size adapter_out_dim adapter_in_dim"
    ),
    **_sizes(64, "adapter_input_size projection_hidden_dim downsample_hidden_size output_dim"),
    **_sizes(32, "base_channels latent_channels output_channels num_embeddings codebook_size"),
    **_sizes(16, "linear_head_dim"),
    **_sizes(4, "linear_num_heads speech_encoder_attention_heads"),
    **_sizes(2, "speech_encoder_layers"),
    **_sizes(VOCABULARY_SIZE, "vocab_size_per_layer_input"),
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "decoder_start_token_id": BOS_TOKEN_ID,
}
KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "swa_num_key_value_heads",
)
HEAD_DIMENSIONS = ("head_dim", "swa_head_dim", "attention_head_dim", "kv_channels")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The tiny configuration of a model type: shrunk defaults, with what `OVERRIDES` says about this type."""
    if model_type in COMPOSITES:
        return COMPOSITES[model_type]()
    config_class = CONFIG_MAPPING[model_type]
    fields = _merge(shrink(config_class()), OVERRIDES.get(model_type, {}))
    return config_class(**fields)


def _merge(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        if value is DROP:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), dict) and not name.startswith("rope_"):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields, sub-configurations included, that make a default configuration tiny."""
    defaults = vars(config)
    standard_names = {own: standard for standard, own in config.attribute_map.items()}
    fields = {}
    for name, value in defaults.items():
        small = _tiny_value(name, value, defaults)
        if small is None and name in standard_names:
            small = _tiny_value(standard_names[name], value, defaults)
        if small is not None:
            fields[name] = small
    fields.update(_layer_patterns(defaults))
    for name in type(config).sub_configs:
        sub_config = defaults.get(name)
        if isinstance(sub_config, PreTrainedConfig):
            fields[name] = shrink(sub_config)
            if sub_config.model_type:
                fields[name]["model_type"] = sub_config.model_type
    return fields


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tiny_value(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """The tiny value of a field by its name and the kind of its default, `None` to leave the default."""
    if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        return SIZES[name]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 3, 3]}
    if isinstance(value, (list, tuple)):
        lists = {
            "deepstack_visual_indexes": [0, 1],
            "fullatt_block_indexes": [1],
            "attention_window": [8, 8],
            "channel_multiplier": [1, 1],
            "conv_dim": [32] * len(value),
        }
        return lists.get(name)
    if name == "use_mamba_kernels":
        return False
    if not _is_number(value):
        return None
    if name.endswith("vocab_size"):
        return VOCABULARY_SIZE
    if name.endswith(("_token_id", "_token_index")):
        return FIRST_SPECIAL_TOKEN_ID + sum(map(ord, name)) % 25
    if name in KEY_VALUE_HEADS:
        heads = next(
            (defaults[n] for n in ("num_attention_heads", "n_head", "num_heads", "n_heads") if n in defaults), 0
        )
        return 4 if value == heads else min(value, 2)
    if name in HEAD_DIMENSIONS:
        return 8 if name == "head_dim" and "qk_rope_head_dim" in defaults else 16
    return SIZES.get(name)


def _layer_patterns(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least two in all."""
    fields: dict[str, Any] = {}
    num_layers = 2
    layer_types = defaults.get("layer_types")
    if isinstance(layer_types, (list, tuple)) and layer_types and isinstance(layer_types[0], str):
        kinds = list(dict.fromkeys(layer_types))
        num_layers = max(len(kinds), 2)
        if len(kinds) > 1:
            fields["layer_types"] = kinds
        fields.update(
            {name: num_layers for name in ("num_hidden_layers", "n_layer", "num_layers") if name in defaults}
        )
    mlp_layer_types = defaults.get("mlp_layer_types")
    if isinstance(mlp_layer_types, (list, tuple)) and mlp_layer_types:
        kinds = list(dict.fromkeys(mlp_layer_types))
        fields["mlp_layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]
    return fields
