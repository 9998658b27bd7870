# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Deep, tiny models with random weights, whose time is what calls cost. The oracle imports this module, too."""

import time
from functools import lru_cache
from typing import Any

import torch

import transformers


VOCABULARY = 61
MODES = {
    "beam": lambda count: {"num_beams": count, "num_return_sequences": count},
    "sample": lambda count: {"do_sample": True, "num_return_sequences": count},
}
DECODER = {"vocab_size": VOCABULARY, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}


@lru_cache
def build_model(name: str) -> Any:
    """A model with random weights: 24 layers of llama, or 12 decoder layers of bart or t5."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "llama":
        config = transformers.LlamaConfig(
            **DECODER,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
        return transformers.LlamaForCausalLM(config).eval()
    if name == "bart":
        config = transformers.BartConfig(
            **DECODER,
            d_model=64,
            encoder_layers=2,
            decoder_layers=12,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=8192,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
        return transformers.BartForConditionalGeneration(config).eval()
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=96,
        # Upstream makes as many layers of the decoder's cache
        num_layers=12,
        num_decoder_layers=12,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def generate(name: str, mode: str, length: int, count: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds of one call, and its tokens."""
    model = build_model(name)
    prompt = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    torch.manual_seed(0)
    start = time.perf_counter()
    sequences = model.generate(prompt, **MODES[mode](count), max_new_tokens=tokens, min_new_tokens=tokens)
    return time.perf_counter() - start, sequences.tolist()
