# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Fuyu reads its image at every step if there is no cache, from features that follow the rows."""

import unittest
from typing import Any

import torch
from parameterized import parameterized

from transformers import FuyuConfig, FuyuForCausalLM

from .runs import ALL_OUTPUTS, MODES, forwarded, oracle


BATCH_SIZE, PATCHES, TEXT_LENGTH = 2, 2, 7
IMAGE, EOS, PAD, VOCABULARY = 1, 2, 10, 99


def build_fuyu() -> FuyuForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    tokens = {"vocab_size": VOCABULARY, "image_token_id": IMAGE, "eos_token_id": EOS, "pad_token_id": PAD}
    return FuyuForCausalLM(FuyuConfig(**sizes, **tokens, patch_size=4)).eval()


def run_fuyu(patches_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Generates for prompts of an image and text each. Returns tokens, scores and the rows of the first forward."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(PAD + 1, VOCABULARY, (BATCH_SIZE, PATCHES + TEXT_LENGTH), generator=generator)
    input_ids[:, :PATCHES] = IMAGE
    patches = torch.randn((BATCH_SIZE, PATCHES, 3 * 4**2), generator=generator)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), patches_name: patches}
    model = build_fuyu()
    torch.manual_seed(1)
    with forwarded(model) as shapes:
        output = model.generate(**inputs, **arguments, **ALL_OUTPUTS, max_new_tokens=5)
    return {"sequences": output.sequences, "scores": torch.stack(output.scores), "rows": shapes[0][0]}


class FuyuTest(unittest.TestCase):
    @parameterized.expand([(mode, use_cache) for mode in MODES for use_cache in (True, False)])
    def test_agrees_with_upstream(self, mode: str, use_cache: bool):
        arguments = {**MODES[mode](3), "use_cache": use_cache}
        # The name by which upstream doesn't encode the image before it expands the rows
        expected = oracle().run(run_fuyu, "image_patches", arguments)
        # The other name, with which upstream refuses several sequences per prompt
        for name in ("image_patches", "pixel_values"):
            found = run_fuyu(name, arguments)
            self.assertEqual((found["rows"], expected["rows"]), (BATCH_SIZE, BATCH_SIZE * 3))
            torch.testing.assert_close(found["sequences"], expected["sequences"], rtol=0, atol=0)
            torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-5, atol=1e-5)
