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


# Tiny value -> the fields that take it, where their default is a number
_FIELDS = {
    1: """
        first_k_dense_replace moe_n_group n_group n_shared_experts num_expert_group num_expert_groups topk_group
        topk_groups
    """,
    2: """
        decoder_layers decoder_num_hidden_layers depth encoder_layers encoder_num_hidden_layers index_heads
        index_n_heads linear_num_key_heads moe_k moe_top_k moe_topk n_layer n_layers n_mamba_heads
        num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token num_global_key_value_heads
        num_hidden_layers num_layers num_selected_experts speech_encoder_layers top_k_experts vision_depth
        zero_expert_num
    """,
    3: """
        num_channels
    """,
    4: """
        attention_heads decoder_attention_heads decoder_num_attention_heads encoder_attention_heads
        encoder_num_attention_heads linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads
        moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_decoder_attention_heads
        num_encoder_attention_heads num_experts num_heads num_local_experts num_routed_experts
        speech_encoder_attention_heads swa_num_attention_heads
    """,
    8: """
        attention_chunk_size attention_window attention_window_size chunk_size index_topk laurel_rank
        local_attention mamba_chunk_size patch_size qk_nope_head_dim qk_rope_head_dim
        relative_attention_num_buckets rotary_dim sliding_window sliding_window_size window_size
    """,
    16: """
        adapter_dim d_kv global_head_dim hidden_size_per_layer_input image_size index_head_dim kv_lora_rank
        linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state n_mels num_mel_bins ssm_state_size
        state_size v_head_dim
    """,
    32: """
        base_channels codebook_size expert_dim expert_ffn_hidden_size latent_channels mamba_d_head mamba_head_dim
        mamba_headdim moe_intermediate_size moe_shared_expert_intermediate_size num_embeddings output_channels
        q_lora_rank shared_expert_intermediate_size
    """,
    64: """
        adapter_in_dim adapter_input_size adapter_out_dim alignment_intermediate_size attention_hidden_size
        audio_hidden_size d_embed d_ff d_model decoder_ffn_dim decoder_hidden_size decoder_intermediate_size
        dense_intermediate_size dff dim dim_ff downsample_hidden_size emb_dim embed_dim embedding_dim
        embedding_size encoder_ffn_dim encoder_hidden_dim encoder_intermediate_size feed_forward_size ffn_dim
        ffn_hidden_size hidden_dim hidden_size inner_hidden_size intermediate_size intermediate_size_mlp lru_width
        mlp_dim model_dim n_embd n_inner out_hidden_size output_dim projection_dim projection_hidden_dim
        projector_hidden_size shared_intermediate_size speech_encoder_intermediate_size text_hidden_size
        vision_hidden_size word_embed_proj_dim
    """,
    256: """
        max_position_embeddings max_seq_len max_sequence_length max_source_positions max_target_positions n_ctx
        n_positions num_position_embeddings
    """,
}
SIZES = {name: value for value, names in _FIELDS.items() for name in names.split()}
SPECIAL_TOKENS = {
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "decoder_start_token_id": BOS_TOKEN_ID,
}
# Tiny values of fields that are lists by default
LISTS = {
    "attention_window": [8, 8],
    "channel_multiplier": [1, 1],
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
ATTENTION_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
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
    if name in SPECIAL_TOKENS:
        return SPECIAL_TOKENS[name]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 3, 3]}
    if isinstance(value, (list, tuple)):
        return [32] * len(value) if name == "conv_dim" else LISTS.get(name)
    if name == "use_mamba_kernels":
        return False
    if not _is_number(value):
        return None
    if name.endswith("vocab_size") or name == "vocab_size_per_layer_input":
        return VOCABULARY_SIZE
    if name.endswith(("_token_id", "_token_index")):
        # Different for most names
        return FIRST_SPECIAL_TOKEN_ID + sum(map(ord, name)) % 25
    if name in KEY_VALUE_HEADS:
        heads = [defaults[heads] for heads in ATTENTION_HEADS if heads in defaults]
        return 4 if heads and value == heads[0] else min(value, 2)
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
