# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Pipelines, with several sequences, beams and batches, and continuous batching."""

import numpy as np
import torch
from parameterized import parameterized

from tests.generation.runs import MODES, oracle
from tests.generation.tiny_models import build_inputs, build_model
from transformers import WhisperFeatureExtractor, pipeline
from transformers.generation import ContinuousBatchingConfig

from .observation import SHARED, EcosystemTest, observe
from .tokenizer import build_tokenizer


BATCH, SEQUENCES = 2, 3


def generate_text(mode: str, batch_size: int) -> dict:
    model = build_model("llama")
    generator = pipeline("text-generation", model=model, tokenizer=build_tokenizer(), device="cpu")
    texts = ["w5 w9 w33 w12 w40", "w21 w8 w17"]
    arguments = {**MODES[mode](SEQUENCES), "max_new_tokens": 6, "batch_size": batch_size}
    texts_of = lambda: [[item["generated_text"] for item in items] for items in generator(texts, **arguments)]  # noqa: E731
    return observe(model, lambda: np.array(texts_of()))


def transcribe(beams: int) -> dict:
    model = build_model("whisper")
    model.generation_config.is_multilingual = False
    speech_tokenizer = build_tokenizer()
    # Of Whisper's tokenizer the pipeline wants this method, which looks for timestamps besides
    speech_tokenizer._decode_asr = lambda outputs, **_: (
        speech_tokenizer.decode([token for output in outputs for token in output["tokens"][0]]),
        {},
    )
    speech = pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=speech_tokenizer,
        feature_extractor=WhisperFeatureExtractor(feature_size=8, chunk_length=0.6, hop_length=160),
        device="cpu",
    )
    audio = np.sin(np.arange(9600) / 7).astype(np.float32)
    arguments = {"num_beams": beams, "max_new_tokens": 6}
    return observe(model, lambda: np.array([speech(audio, generate_kwargs=arguments)["text"]]))


def generate_batch(num_return_sequences: int) -> list[list[int]]:
    model = build_model("llama", "paged|sdpa")
    inputs = [row[row != 0].tolist() for row in build_inputs("llama", BATCH)["input_ids"]]
    config = model.generation_config
    config.update(
        max_new_tokens=6, do_sample=num_return_sequences > 1, top_k=1, num_return_sequences=num_return_sequences
    )
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    outputs = model.generate_batch(inputs, generation_config=config, continuous_batching_config=sizes, warmup=False)
    return sorted(output.generated_tokens for output in outputs.values())


class PipelinesTest(EcosystemTest):
    @parameterized.expand([(mode, size) for mode in ("beam", "sample") for size in (1, BATCH)])
    def test_text(self, mode: str, batch_size: int):
        self.assert_prefilled_once((batch_size, batch_size * SEQUENCES), SHARED, generate_text, mode, batch_size)

    def test_speech(self):
        self.assert_prefilled_once((1, 4), SHARED, transcribe, 4)


class ContinuousBatchingTest(EcosystemTest):
    @parameterized.expand([(1,), (2,)])
    def test_same_tokens(self, num_return_sequences: int):
        """It has a loop of its own, which prefills each request once anyway: nothing is to change."""
        torch.manual_seed(0)
        ours = generate_batch(num_return_sequences)
        self.assertEqual(len(ours), BATCH * num_return_sequences)
        self.assertEqual(ours, oracle().run(generate_batch, num_return_sequences))
