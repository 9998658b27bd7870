# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Six beams over one prompt, with upstream's order and with the prompt computed once. Needs no download.

    python examples/quickstart.py
"""

import torch

from transformers import LlamaConfig, LlamaForCausalLM


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    model = build_model()
    prompt = torch.randint(3, 100, (1, 200))
    results = {}
    for mode in ("recompute", "auto"):
        shapes = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs, shapes=shapes: shapes.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        results[mode] = model.generate(prompt, num_beams=6, max_new_tokens=15, prompt_expansion=mode)
        hook.remove()
        print(f"{mode}: rows and tokens of the first forward: {shapes[0]}")
    print("same tokens:", torch.equal(results["recompute"], results["auto"]))


if __name__ == "__main__":
    main()
