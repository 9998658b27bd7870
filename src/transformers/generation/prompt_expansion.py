# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""How a prompt of B rows becomes B * N rows: the `prompt_expansion` knob of [`GenerationConfig`]."""

PROMPT_EXPANSIONS = ("auto", "recompute", "copy", "share")


def validate_prompt_expansion(prompt_expansion: str | None) -> None:
    """
    Refuses a value that the knob doesn't have. `None` stands for the default, `"auto"`.

    Raises:
        `ValueError`: If `prompt_expansion` is none of `PROMPT_EXPANSIONS`.
    """
    if prompt_expansion is not None and prompt_expansion not in PROMPT_EXPANSIONS:
        raise ValueError(f"`prompt_expansion` must be one of {PROMPT_EXPANSIONS}, but is {prompt_expansion!r}.")
