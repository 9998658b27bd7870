# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What the tests of a common prefix run here and, by name, in the oracle."""

import torch

import transformers

from .runs import forwarded
from .tiny_models import PAD, VOCABULARY, build_model


NEW = 4
SETTINGS = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}
OTHERS = {
    "opt": ("OPT", {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_head": 4}),
    "mistral": (
        "Mistral",
        {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 6},
    ),
    "gpt_neo": (
        "GPTNeo",
        {"hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    ),
}


def generate(model, inputs: dict, **arguments) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns what is generated, and the (rows, query length) of each forward."""
    torch.manual_seed(0)
    with forwarded(model) as shapes:
        output = model.generate(**inputs, **{**SETTINGS, **arguments})
    return output, shapes


def run_other(name: str, inputs: dict, arguments: dict) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Generates with a tiny model that isn't among the `tiny_models`. Runs in the oracle, too."""
    family, sizes = OTHERS[name]
    heads = {} if name in ("bloom", "gpt_neo") else {"num_attention_heads": 4, "num_hidden_layers": 2}
    heads |= {"n_layer": 2} if name == "bloom" else {"num_heads": 4} if name == "gpt_neo" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        initializer_range=0.35,
        init_std=0.35,
        pad_token_id=PAD,
        bos_token_id=1,
        **heads,
        **sizes,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return generate(model, inputs, **arguments)


def run_adapted(inputs: dict, arguments: dict) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Generates with a LoRA adapter. Runs in the oracle, too."""
    import peft

    model = build_model("llama")
    torch.manual_seed(1)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, adapter).eval()
    torch.manual_seed(0)
    with forwarded(model) as shapes:
        output = adapted.generate(**inputs, **SETTINGS, **arguments)
    return output, shapes
