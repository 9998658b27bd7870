# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""A tokenizer that needs no download: one word for each token of the tiny models."""

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.generation.tiny_models import BOS, EOS, PAD, VOCABULARY
from transformers import PreTrainedTokenizerFast


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}
    vocabulary = {words.get(token, f"w{token}"): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=words[PAD],
        bos_token=words[BOS],
        eos_token=words[EOS],
        unk_token=words[PAD],
        padding_side="left",
    )
