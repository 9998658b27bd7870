# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The prompt is forwarded on B rows, and everything that `generate` returns is what pristine upstream returns."""

import unittest
from itertools import product

import torch
from parameterized import parameterized

from .runs import ALL_OUTPUTS, MODES, assert_same, run_both
from .tiny_models import BUILDERS, DECODER_ONLY, ENCODER_DECODER


TEXT_MODELS = [name for name in BUILDERS if name != "whisper"]


class PrefillOnceTest(unittest.TestCase):
    """Pristine upstream, in a process of its own, is the oracle."""

    def assert_prefilled_once(self, ours, theirs, batch_size: int, expand_size: int) -> None:
        self.assertEqual(ours["rows"], batch_size)
        self.assertEqual(theirs["rows"], batch_size * expand_size)
        self.assertGreater(ours["prefill_flops"], 0)
        self.assertEqual(ours["prefill_flops"] * expand_size, theirs["prefill_flops"])

    def assert_same_as_upstream(self, name: str, batch_size: int, expand_size: int, mode: str, strategy: str) -> None:
        arguments = {**MODES[mode](expand_size), **ALL_OUTPUTS, "max_new_tokens": 6}
        ours, theirs = run_both(name, batch_size, arguments, fork_arguments={"prompt_expansion": strategy})
        self.assert_prefilled_once(ours, theirs, batch_size, expand_size)
        assert_same(ours, theirs)

    @parameterized.expand(product(TEXT_MODELS, (1, 2), (3, 4), MODES))
    def test_copied_prompt_same_as_upstream(self, name: str, batch_size: int, expand_size: int, mode: str):
        self.assert_same_as_upstream(name, batch_size, expand_size, mode, "copy")

    @parameterized.expand(product(TEXT_MODELS, (1, 2), (3, 4), MODES))
    def test_shared_prompt_same_as_upstream(self, name: str, batch_size: int, expand_size: int, mode: str):
        strategy = (
            "auto" if name == "gpt_neox" else "share"
        )  # the attention of gpt_neox can't share a prompt: it copies
        self.assert_same_as_upstream(name, batch_size, expand_size, mode, strategy)

    @parameterized.expand(product((1, 2), (3, 4)))
    def test_whisper_beams_same_as_upstream(self, batch_size: int, expand_size: int):
        # `num_return_sequences` of Whisper's own `generate` is tested in test_whisper.py
        arguments = {"num_beams": expand_size, "max_new_tokens": 6}
        ours, theirs = run_both("whisper", batch_size, arguments)
        self.assert_prefilled_once(ours, theirs, batch_size, expand_size)
        assert_same(ours, theirs)

    @parameterized.expand(product(TEXT_MODELS, MODES))
    def test_attentions_hidden_states_and_cache(self, name: str, mode: str):
        """Every output field, at every step, the first included, and the returned cache."""
        fields = {"output_attentions": True, "output_hidden_states": True}
        arguments = {**MODES[mode](3), **ALL_OUTPUTS, **fields, "max_new_tokens": 4}
        ours, theirs = run_both(name, 2, arguments, attn_implementation="eager")
        self.assert_prefilled_once(ours, theirs, 2, 3)
        attentions = "decoder_attentions" if name in ENCODER_DECODER else "attentions"
        self.assertEqual(ours[f"{attentions}.0.1"].shape[0], 6)
        self.assertIn(f"{attentions}.3.1", ours)
        # Deep random models amplify rounding: the cache holds values of up to 30
        assert_same(ours, theirs, tolerance=1e-4)

    @parameterized.expand(product(("llama", "bart"), MODES))
    def test_no_cache(self, name: str, mode: str):
        arguments = {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 4, "use_cache": False}
        ours, theirs = run_both(name, 2, arguments)
        self.assert_prefilled_once(ours, theirs, 2, 3)
        assert_same(ours, theirs)

    @parameterized.expand(product(("gemma3", "t5"), MODES))
    def test_streamer_and_stopping_criteria_see_what_they_saw(self, name: str, mode: str):
        arguments = {**MODES[mode](3), "max_new_tokens": 4}
        ours, theirs = run_both(name, 2, arguments, record=True)
        self.assert_prefilled_once(ours, theirs, 2, 3)
        self.assertIn("criteria.3", ours)
        self.assertEqual("streamed.0" in ours, mode == "sample")
        assert_same(ours, theirs)

    @parameterized.expand(
        [
            ("repetition_penalty", {"repetition_penalty": 1.7}),
            ("encoder_repetition_penalty", {"encoder_repetition_penalty": 1.7}),
            ("no_repeat_ngram", {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2}),
            ("lengths", {"min_new_tokens": 3, "length_penalty": -1.0}),
            ("early_stopping", {"early_stopping": True, "eos_token_id": [2, 5, 7]}),
            ("never", {"early_stopping": "never", "length_penalty": 2.0, "eos_token_id": [2, 5, 7, 11]}),
            ("chunks", {"prefill_chunk_size": 4}),
        ]
    )
    def test_options(self, _, options: dict):
        for mode in MODES:
            if "early_stopping" in options and mode == "sample":
                continue
            ours, theirs = run_both("llama", 2, {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 8, **options})
            self.assertEqual(ours["rows"], 2)
            assert_same(ours, theirs)

    @parameterized.expand(product(DECODER_ONLY, MODES))
    def test_prompt_of_one_token(self, name: str, mode: str):
        inputs = {"input_ids": torch.tensor([[5], [9]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
        ours, theirs = run_both(name, 2, {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 4}, inputs=inputs)
        self.assert_prefilled_once(ours, theirs, 2, 3)
        assert_same(ours, theirs)

    @parameterized.expand(MODES)
    def test_one_row_per_prompt_is_left_alone(self, mode: str):
        arguments = {"do_sample": mode != "beam", "max_new_tokens": 4, **ALL_OUTPUTS}
        ours, theirs = run_both("llama", 2, arguments)
        self.assert_prefilled_once(ours, theirs, 2, 1)
        assert_same(ours, theirs)
