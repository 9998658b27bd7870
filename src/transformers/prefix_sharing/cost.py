# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Where sharing pays.

Sharing reads the prompt's keys and values once for all rows, and copies none of them, but makes more calls in each layer and
step than copying does. So it pays from an amount of keys on, which was measured for one layer's step
(`benchmark/attention_step.py`), and, with all that a layer adds, for whole models (`make bench-overhead`); the tables are in
benchmark/LOG.md. Where few steps follow, the calls are outweighed by the prompts that would be computed once per row.
"""

from dataclasses import dataclass

import torch


# Number of elements of keys that copying would store for a layer, from which on sharing was as fast on one and two threads
BREAK_EVEN = {"self": 2**18, "cross, reordered": 2**18, "cross, many rows": 2**19, "cross": 2**20}
MANY_ROWS = 8
# The calls of a step cost a layer about as much as this number of a prompt's tokens, in the smallest models
TOKENS_PER_STEP = 128
# For devices without measurements: the rule of vLLM's cascade attention (`use_cascade_attention` in its flash_attn.py)
UNMEASURED_TOKENS, UNMEASURED_ROWS = 256, 8


@dataclass(frozen=True)
class Decoding:
    """
    What follows on a prefill.

    Args:
        steps (`int`): Number of decoding steps at most.
        reorders (`bool`): Whether rows are reordered after each step, as beams are.
    """

    steps: int
    reorders: bool


def why_not_pays(states: torch.Tensor, repeats: int, kind: str, decoding: Decoding) -> str | None:
    """
    Tells whether a layer's keys should rather be copied than shared.

    Args:
        states (`torch.Tensor` of shape `(B, K, L, D)`): The keys of the prompt.
        repeats (`int`): Number N of rows per batch item.
        kind (`str`): `"self"` or `"cross"`: the kind of attention.
        decoding ([`Decoding`]): What follows.

    Returns:
        `str` or `None`: The reason to copy, `None` if sharing pays.
    """
    items, _, length, _ = states.shape
    rows = items * repeats
    if states.device.type != "cpu":
        if length >= UNMEASURED_TOKENS and rows >= UNMEASURED_ROWS:
            return None
        return f"less than {UNMEASURED_TOKENS} tokens or {UNMEASURED_ROWS} rows, on a device without measurements"
    if kind == "self":
        name = kind
    else:
        name = "cross, reordered" if decoding.reorders else "cross, many rows" if rows >= MANY_ROWS else "cross"
    elements = states.numel() * repeats
    if elements >= BREAK_EVEN[name] or (
        kind == "self" and (rows - items) * length >= TOKENS_PER_STEP * decoding.steps
    ):
        return None
    return f"{rows} rows of {length} tokens are {elements} elements of keys a layer, less than {BREAK_EVEN[name]}"
