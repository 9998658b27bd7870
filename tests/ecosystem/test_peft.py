# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Adapters of peft: of all kinds, and several of them in one batch."""

import peft
import torch
from parameterized import parameterized

from tests.generation.runs import MODES
from tests.generation.tiny_models import build_inputs, build_model

from .observation import SHARED, EcosystemTest, observe


BATCH, SEQUENCES = 2, 3
TARGETS = ["q_proj", "v_proj"]
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False),
    "prefix": lambda: peft.PrefixTuningConfig(**VIRTUAL),
    "prompt": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "p_tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **VIRTUAL),
}


def adapted(kind: str) -> peft.PeftModel:
    model = build_model("llama")
    torch.manual_seed(1)
    return peft.get_peft_model(model, ADAPTERS[kind]()).eval()


def generate(kind: str, mode: str) -> dict:
    model = adapted(kind)
    arguments = {**build_inputs("llama", BATCH), **MODES[mode](SEQUENCES), "max_new_tokens": 6}
    return observe(model.get_base_model(), lambda: model.generate(**arguments))


def generate_with_several(mode: str) -> dict:
    model = peft.get_peft_model(build_model("llama"), ADAPTERS["lora"](), adapter_name="first")
    torch.manual_seed(2)
    model.add_adapter("second", ADAPTERS["lora"]())
    sequences = SEQUENCES if mode == "beam" else 1
    # peft wants a name for each row of its forwards: beams are named by itself
    arguments = {**build_inputs("llama", BATCH), **MODES[mode](sequences), "max_new_tokens": 6}
    names = ["first", "second"]
    return observe(model.get_base_model(), lambda: model.eval().generate(**arguments, adapter_names=names))


class PeftTest(EcosystemTest):
    @parameterized.expand([(kind, mode) for kind in ADAPTERS for mode in ("beam", "sample")])
    def test_adapter(self, kind: str, mode: str):
        self.assert_prefilled_once((BATCH, BATCH * SEQUENCES), SHARED, generate, kind, mode)

    def test_several_adapters_in_a_batch(self):
        self.assert_prefilled_once(
            (BATCH * SEQUENCES, BATCH * SEQUENCES), "prompt_expansion='recompute'", generate_with_several, "beam"
        )
