# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Tiny random models, the same in every process: the code under test and the oracle both build them from here.

Weights are drawn with a large spread, so that no ranking of tokens hinges on rounding.
"""

import torch

import transformers


VOCABULARY = 67
PAD, BOS, EOS = 0, 1, 2

_SIZES = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.35,
    **_SIZES,
}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": BOS,
    "init_std": 0.3,
    **_SIZES,
}


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **_DECODER))


def _qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **_DECODER))


def _gemma3() -> transformers.PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        **_DECODER,
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.35, **_SIZES)
    return transformers.GPT2LMHeadModel(config)


def _gpt_neox() -> transformers.PreTrainedModel:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_DECODER))


def _bart() -> transformers.PreTrainedModel:
    config = transformers.BartConfig(max_position_embeddings=64, forced_eos_token_id=None, **_SEQ2SEQ)
    return transformers.BartForConditionalGeneration(config)


def _t5() -> transformers.PreTrainedModel:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        initializer_factor=1.5,
        decoder_start_token_id=PAD,
        **_SIZES,
    )
    return transformers.T5ForConditionalGeneration(config)


def _whisper() -> transformers.PreTrainedModel:
    config = transformers.WhisperConfig(
        num_mel_bins=8,
        max_source_positions=30,
        max_target_positions=40,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_SEQ2SEQ,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.no_timestamps_token_id = VOCABULARY - 1
    return model


def _mixtral() -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **_DECODER
    )
    return transformers.MixtralForCausalLM(config)


def _deepseek_v3() -> transformers.PreTrainedModel:
    """Latent attention: keys and values are rebuilt after the cache."""
    config = transformers.DeepseekV3Config(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        **_DECODER,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _mamba() -> transformers.PreTrainedModel:
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, state_size=8, conv_kernel=4, initializer_range=0.3, **_SIZES
    )
    return transformers.MambaForCausalLM(config)


def _qwen3_next() -> transformers.PreTrainedModel:
    """Linear and full attention in turn."""
    config = transformers.Qwen3NextConfig(
        num_key_value_heads=2,
        head_dim=8,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **{**_DECODER, "initializer_range": 0.2},
    )
    return transformers.Qwen3NextForCausalLM(config)


def _falcon_h1() -> transformers.PreTrainedModel:
    """State space and attention in the same layer."""
    config = transformers.FalconH1Config(
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=4,
        **_DECODER,
    )
    return transformers.FalconH1ForCausalLM(config)


DECODER_ONLY = {"gpt2": _gpt2, "llama": _llama, "qwen3": _qwen3, "gpt_neox": _gpt_neox, "gemma3": _gemma3}
ENCODER_DECODER = {"bart": _bart, "t5": _t5, "whisper": _whisper}
BUILDERS = {**DECODER_ONLY, **ENCODER_DECODER}
# Other kinds of layers and caches
SPECIAL = {
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "mamba": _mamba,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
}


def build_model(name: str, attn_implementation: str | None = None) -> transformers.PreTrainedModel:
    """Returns the tiny model `name` of `BUILDERS` or `SPECIAL` in evaluation mode, with the weights of a fixed seed."""
    torch.manual_seed(0)
    model = {**BUILDERS, **SPECIAL}[name]().eval()
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    return model


def build_inputs(name: str, batch_size: int, length: int = 9) -> dict[str, torch.Tensor]:
    """
    Returns prompts for the tiny model `name`: `input_ids` and `attention_mask` of shape `(batch_size, length)`, each
    row after the first with two more positions of padding (left, or right for an encoder), or `input_features`.
    """
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(batch_size, 8, 60, generator=generator)}
    input_ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch_size):
        padded = slice(length - 2 * row, None) if name in ENCODER_DECODER else slice(0, 2 * row)
        attention_mask[row, padded] = 0
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}
