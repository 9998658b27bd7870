# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What single architectures need besides shrunk defaults: their sizes depend on each other or lack a common name."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    PreTrainedConfig,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
    Wav2Vec2Config,
)


# Instead of a value: the shrunk field is not passed at all
DROP = object()


def _mrope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}


MROPE_TEXT = {"text_config": {"rope_parameters": _mrope([2, 3, 3])}}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "num_hidden_layers": DROP,
    "layer_types": DROP,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
VIBEVOICE_TOKENIZER = {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2], "hidden_size": 8}
WINDOWED_VISION = {"window_size": 32}
OMNI_TOKENS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "audio_token_id": 122,
    "vision_start_token_id": 103,
    "vision_end_token_id": 104,
    "audio_start_token_id": 105,
    "audio_end_token_id": 106,
    "position_id_per_seconds": 25,
}
QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 8,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
ONE_TILE = {"image_grid_pinpoints": [[16, 16]]}
DOTS3_NOTE = {
    "text_config": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    }
}
TRANSFORMER = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
# Encoders unless told otherwise: without a cache
DECODERS = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl
"""

OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in DECODERS.split()},
    "apertus1p5": {
        "text_config": {"vocab_size": 256},
        "audio_config": {"codebook_dim": 64},
        "vision_config": {"codebook_size": 32},
        "image_token_offset": 128,
        "audio_token_offset": 160,
    },
    "aria": {"projector_patch_to_query_dict": {4: 4}},
    "audioflamingo3": {"audio_config": {"max_source_positions": 32}},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3, "mamba_d_head": 32, "mamba_n_heads": 4},
    "blip-2": {
        "image_token_index": 101,
        "num_query_tokens": 3,
        "qformer_config": {"encoder_hidden_size": 64, "num_hidden_layers": 2},
        "vision_config": {"hidden_size": 64},
    },
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 100,
        "patcher_config": {"hidden_size": 64, "num_attention_heads": 4},
        "encoder_config": {"hidden_size_global": 128},
        "decoder_config": {"hidden_size_global": 128},
        "global_config": {"hidden_size": 128, "head_dim": 32},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 100, **{f"IMGIMG{letter}Z": 110 + i for i, letter in enumerate("ABCDEFGH")}},
        "vq_config": {"num_embeddings": 8},
    },
    "cohere_compass": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": _mrope([2, 3, 3]), "full_attention": _mrope([2, 3, 3])},
        }
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": ROPE,
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [32, 64]}},
    },
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "num_hidden_layers": 4,
        "layer_types": ALTERNATING,
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [1]}},
    "dia": {
        "decoder_config": {
            "num_channels": 4,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "cross_head_dim": 16,
            "cross_hidden_size": 64,
        },
        "delay_pattern": [0, 1, 2, 3],
    },
    "diffusion_gemma": {
        "canvas_length": 4,
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": DOTS3_NOTE,
    "dots3_note_text": DOTS3_NOTE["text_config"],
    "emu3": {
        "vocabulary_map": {
            "<image>": 100,
            "<|extra_200|>": 101,
            **{f"<|visual token {i:06}|>": 110 + i for i in range(8)},
        },
        "vq_config": {"codebook_size": 8, "hidden_size": 32, "embed_dim": 4, "latent_channels": 4},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": _mrope([3, 3, 2]),
            "moe_intermediate_size": [32, 32],
            "moe_num_experts": 4,
            "moe_k": 2,
        }
    },
    "evolla": {
        "aligner_num_add_layers": 2,
        "resampler_depth": 1,
        "resampler_num_latents": 4,
        "resampler_heads": 2,
        "resampler_dim_head": 16,
    },
    "exaone4_5": {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "falcon_h1": {"mamba_d_ssm": 128},
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [32, 64],
            "num_heads": [4, 4],
            "num_groups": [4, 4],
            "max_position_embeddings": 16,
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ALTERNATING,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 64,
    },
    "gemma4": {
        "vision_config": {
            **TRANSFORMER,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "patch_size": 8,
            "position_embedding_size": 32,
        }
    },
    "gemma4_unified": {
        "vision_config": {"patch_size": 8, "mm_embed_dim": 64, "mm_posemb_size": 32, "output_proj_dims": 64}
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 2,
            "layer_types": ALTERNATING[:2],
        },
        "backbone_hidden_size": 64,
        "num_centroids": 16,
    },
    "glm46v": MROPE_TEXT,
    "glm4v": MROPE_TEXT,
    "glm4v_moe": {"text_config": {"rope_parameters": _mrope([1, 1, 2], partial_rotary_factor=0.5)}},
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0}},
    "glm_ocr": MROPE_TEXT,
    "glmga": MROPE_TEXT,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", **ONE_TILE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "granite_speech": {"projector_config": {"encoder_hidden_size": 64}, "window_size": 15},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 64}, "window_size": 15},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
    },
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2, "moe_topk": [2, 2], "num_experts": 4},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 16,
            "num_key_value_heads": 2,
            "rope_parameters": _mrope([2, 2, 2, 2], rope_dim=3),
        },
        "vision_config": {"max_vit_seq_len": 256, "max_image_size": 128},
    },
    "hy_v4_vl": {"text_config": {"rope_parameters": _mrope([1, 1, 2])}},
    "hyperclovax_vision_v2": {"vision_config": WINDOWED_VISION},
    "idefics": {
        "vision_config": {
            "embed_dim": 64,
            "image_size": 16,
            "patch_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
        "cross_layer_interval": 1,
        "additional_vocab_size": 8,
        "use_resampler": False,
        "perceiver_config": {},
    },
    "instructblip": {
        "image_token_index": 101,
        "num_query_tokens": 3,
        "qformer_config": {"encoder_hidden_size": 64, "num_hidden_layers": 2},
    },
    "instructblipvideo": {
        "image_token_index": 101,
        "video_token_index": 101,
        "num_query_tokens": 3,
        "qformer_config": {"encoder_hidden_size": 64, "num_hidden_layers": 2},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_hidden_layers": 3},
    "kimi_k25": {"projection_hidden_size": 64},
    "kosmos-2.5": {"latent_query_num": 4, "vision_config": {"patch_embed_hidden_size": 192}},
    "kosmos-2": {"latent_query_num": 4, "text_config": {"embed_dim": 64}},
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codec_config": {
            "num_filters": 8,
            "upsampling_ratios": [2, 2],
            "num_quantizers": 4,
            "upsample_groups": 64,
            "codebook_size": 32,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
        },
        "codebook_vocab_size": 33,
        "audio_bos_token_id": 32,
        "audio_pad_token_id": 33,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "llama4": {
        "vision_config": {
            "hidden_size": 64,
            "image_size": 16,
            "patch_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "pixel_shuffle_ratio": 0.5,
        }
    },
    "llava_next": ONE_TILE,
    "llava_next_video": ONE_TILE,
    "llava_onevision": ONE_TILE,
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "moss_transcribe_diarize": {"audio_config": {"max_source_positions": 32}},
    "musicflamingo": {"audio_config": {"max_source_positions": 32}},
    "mistral4": {"head_dim": DROP},
    "mllama": {
        "vision_config": {
            "image_size": 16,
            "patch_size": 8,
            "max_num_tiles": 2,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 128,
            "hidden_size": 64,
            "attention_heads": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        "text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "vocab_size": 128},
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "molmo2": {
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 4},
        "adapter_config": {"vision_feature_layer": [0, 1]},
    },
    "minicpm_ocr": {"image_token_id": 100, "video_token_id": 101},
    "minicpmv4_6": {"image_token_id": 100, "video_token_id": 101},
    "minicpmv4_7": {"image_token_id": 100, "video_token_id": 101},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {
        "out_hidden_size": 256,
        "text_config": {"moe_hidden_size": 64},
        "audio_config": {"patch_sizes": [8, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    },
    "nemo_speechlm": {"text_config": NEMOTRON_H},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_omni": {
        "image_token_id": 100,
        "video_token_id": 101,
        "audio_token_id": 102,
        "text_config": NEMOTRON_H,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "paddleocr_vl": MROPE_TEXT,
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 32,
            "num_blocks": 2,
        }
    },
    "pix2struct": {
        "vision_config": {"patch_embed_hidden_size": 32, "d_kv": 16, "seq_len": 16},
        "text_config": {"encoder_hidden_size": 64},
    },
    "pp_formulanet": {
        "vision_config": {"post_conv_in_channels": 32, "post_conv_mid_channels": 32, "post_conv_out_channels": 64}
    },
    "pop2piano": {"composer_vocab_size": 3},
    "qwen2_5_omni_thinker": {
        **OMNI_TOKENS,
        "text_config": {"rope_parameters": _mrope([2, 3, 3])},
        "vision_config": WINDOWED_VISION,
    },
    "qwen2_audio": {"audio_config": {"max_source_positions": 32}},
    "qwen2_5_vl": {**MROPE_TEXT, "vision_config": WINDOWED_VISION},
    "qwen2_vl": MROPE_TEXT,
    "qwen3_omni_moe_thinker": OMNI_TOKENS,
    "qwen3_vl": MROPE_TEXT,
    "qwen3_vl_moe": MROPE_TEXT,
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "num_buckets": 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        # LSH attention draws its hashes anew in each forward pass otherwise
        "hash_seed": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    },
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "switch_transformers": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "decoder_sparse_step": 1,
        "encoder_sparse_step": 1,
    },
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}, "image_token_index": 101},
    "udop": {"relative_attention_num_buckets": 32},
    "vibevoice": {"audio_config": VIBEVOICE_TOKENIZER, "semantic_model_config": VIBEVOICE_TOKENIZER},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": VIBEVOICE_TOKENIZER,
        "semantic_tokenizer_encoder_config": VIBEVOICE_TOKENIZER,
    },
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [32, 64]}}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral": {"audio_config": {"max_source_positions": 32}, "audio_token_id": 100},
    "whisper": {"max_source_positions": 32, "max_target_positions": 64},
    "xlstm": {"qk_dim_factor": 1.0, "num_heads": 4, "chunk_size": 8},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "n_mamba_heads": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_ngroups": 1,
        "use_mem_rope": True,
        **dict.fromkeys(
            [
                "mamba_headdim",
                "attention_head_dim",
                "kv_channels",
                "head_dim",
                "num_query_groups",
                "attention_hidden_size",
            ],
            DROP,
        ),
    },
}


def _with_bert_decoder(config_class: type[PreTrainedConfig], encoder: PreTrainedConfig) -> PreTrainedConfig:
    decoder = BertConfig(**TRANSFORMER, vocab_size=128, is_decoder=True, add_cross_attention=True)
    config = config_class.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = 1
    config.pad_token_id = 0
    return config


def _encoder_decoder() -> PreTrainedConfig:
    return _with_bert_decoder(EncoderDecoderConfig, BertConfig(**TRANSFORMER, vocab_size=128))


def _vision_encoder_decoder() -> PreTrainedConfig:
    return _with_bert_decoder(VisionEncoderDecoderConfig, ViTConfig(**TRANSFORMER, image_size=16, patch_size=8))


def _speech_encoder_decoder() -> PreTrainedConfig:
    encoder = Wav2Vec2Config(
        **TRANSFORMER,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    return _with_bert_decoder(SpeechEncoderDecoderConfig, encoder)


# Architectures whose configuration has no defaults: it is put together from two others
COMPOSITES: dict[str, Callable[[], PreTrainedConfig]] = {
    "encoder-decoder": _encoder_decoder,
    "vision-encoder-decoder": _vision_encoder_decoder,
    "speech-encoder-decoder": _speech_encoder_decoder,
}
