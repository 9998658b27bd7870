# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Stands for upstream's test modules, which are not in its wheel: the names that the tests of the series use, and the classes
and methods which they are added to. `test_series.py` adds them and runs the result.
"""

import unittest
from unittest.mock import patch  # noqa: F401

import pytest  # noqa: F401
import torch

from transformers import (  # noqa: F401
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    StaticCache,
    set_seed,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.models.minimax.modeling_minimax import MiniMaxForCausalLM  # noqa: F401
from transformers.testing_utils import (  # noqa: F401
    set_config_for_less_flaky_test,
    set_model_for_less_flaky_test,
    torch_device,
)


def assert_similar_generate_outputs(output_1, output_2, atol=1e-5, rtol=1e-5):
    assert output_1.sequences.tolist() == output_2.sequences.tolist()
    for score_1, score_2 in zip(output_1.scores, output_2.scores, strict=True):
        torch.testing.assert_close(score_1, score_2, atol=atol, rtol=rtol)


class GenerationTesterMixin:
    config: dict = {}
    max_new_tokens = 3

    @property
    def all_generative_model_classes(self):
        config = AutoConfig.for_model(**self.config)
        encodes = config.is_encoder_decoder
        mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if encodes else MODEL_FOR_CAUSAL_LM_MAPPING
        return [mapping[type(config)]]

    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        config = AutoConfig.for_model(**self.config)
        config.eos_token_id, config.pad_token_id = None, 0
        torch.manual_seed(0)
        return config, {"input_ids": torch.randint(5, 32, (batch_size, 6))}

    def _generate(self, model, inputs_dict, beam_kwargs=None, **kwargs):
        set_seed(42)
        new_tokens = {"max_new_tokens": self.max_new_tokens, "min_new_tokens": self.max_new_tokens}
        return model.generate(**inputs_dict, **new_tokens, **(beam_kwargs or {}), **kwargs)

    def _sample_generate(self, model, inputs_dict, **kwargs):
        return self._generate(model, inputs_dict, do_sample=True, **kwargs)

    def _beam_search_generate(self, model, inputs_dict, beam_kwargs, **kwargs):
        return self._generate(model, inputs_dict, beam_kwargs, do_sample=False, **kwargs)

    def _beam_sample_generate(self, model, inputs_dict, beam_kwargs, **kwargs):
        return self._generate(model, inputs_dict, beam_kwargs, do_sample=True, **kwargs)

    def test_sample_generate_dict_output(self):
        pass


class LlamaModelTest(GenerationTesterMixin, unittest.TestCase):
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}


class BartModelTest(GenerationTesterMixin, unittest.TestCase):
    config = {
        "model_type": "bart",
        "vocab_size": 32,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }


class MiniMaxModelTest(GenerationTesterMixin, unittest.TestCase):
    config = {
        "model_type": "minimax",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "block_size": 3,
    }

    def test_load_balancing_loss(self):
        pass


class GenerationIntegrationTests(unittest.TestCase):
    def test_generation_config_defaults(self):
        pass


class CacheTest(unittest.TestCase):
    def test_static_cache_mha_mqa_gqa(self):
        pass
