# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The oracle of equivalence tests: `generate` with every prompt expanded before its prefill.

A test runs a function as it is, and the same function in the oracle, and compares what they return:

    oracle = Oracle()
    assert tokens(prompt) == oracle.run(tokens, prompt)
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

from transformers.generation import prefill


class Oracle:
    """Runs functions without prefill once: whatever they generate, rows are repeated first."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function` with `args` and `kwargs` and returns its result."""
        reasons = ("the oracle expands first", None, ())
        with mock.patch.object(prefill, "why_not_prefill_once", return_value=reasons):
            return function(*args, **kwargs)
