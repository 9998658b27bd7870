# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Prompts of two rows of different length for tiny models, and what prompts with images or sound are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformers import PreTrainedModel

from .configs import EOS_TOKEN_ID, FIRST_SPECIAL_TOKEN_ID, PAD_TOKEN_ID


BATCH_SIZE = 2
PROMPT_LENGTH = 12
PADDING_LENGTH = 5

Inputs = dict[str, Any]
InputMaker = Callable[[PreTrainedModel], Inputs]


def to_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with every floating-point tensor in `dtype`."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def random_tensor(*shape: int, seed: int = 21) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_tokens(*shape: int, seed: int = 3) -> torch.Tensor:
    """Tokens of ordinary text: no special token, no placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(EOS_TOKEN_ID + 8, FIRST_SPECIAL_TOKEN_ID - 5, shape, generator=generator)


def pad(rows: Sequence[Sequence[int]], left: bool) -> Inputs:
    """`input_ids` and `attention_mask` of shape (rows, L), padded on the left or on the right."""
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), PAD_TOKEN_ID)
    attention_mask = torch.zeros_like(input_ids)
    for i, row in enumerate(rows):
        filled = slice(length - len(row), None) if left else slice(len(row))
        input_ids[i, filled] = torch.tensor(row)
        attention_mask[i, filled] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def text_with_placeholders(groups: Sequence[Sequence[Sequence[int]]], left: bool) -> Inputs:
    """
    Rows of some text, each followed by its groups of placeholders with text in between.

    Args:
        groups (`Sequence[Sequence[Sequence[int]]]`): Per row, the tokens that stand for each of its images or sounds.
        left (`bool`): Whether to pad on the left.
    """
    rows = []
    for i, placeholders in enumerate(groups):
        row = random_tokens(4 + 2 * i, seed=5 + i).tolist()
        for j, tokens in enumerate(placeholders):
            row += [*tokens, *random_tokens(2, seed=10 * i + j).tolist()]
        rows.append(row)
    return pad(rows, left)


def text_inputs(model: PreTrainedModel) -> Inputs:
    """`input_ids` and `attention_mask` of shape (B, L): padded on the left, on the right for an encoder."""
    tokens = random_tokens(BATCH_SIZE, PROMPT_LENGTH)
    if model.config.model_type in ONE_ROW_PER_CODEBOOK:
        # The rows of all codebooks of an item stand together
        return {"input_ids": tokens.repeat_interleave(model.config.num_codebooks, dim=0)}
    rows = tokens.tolist()
    return pad([rows[0][PADDING_LENGTH:], *rows[1:]], left=not model.config.is_encoder_decoder)


# Models of several streams of tokens per item
ONE_ROW_PER_CODEBOOK = ("musicgen_decoder", "musicgen_melody_decoder")
