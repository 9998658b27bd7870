# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What a run through another library is asked for: its tokens, the rows of the first forward, and the strategy in the log.

A case is a function that runs here, with the fork, and by its name in the oracle, with pristine upstream.
"""

import logging
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.generation.runs import forwarded, oracle
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


LOGGER = "transformers.generation.prefill"
SHARED = "prompt_expansion='share'"
COPIED = "prompt_expansion='copy'"
EQUAL_ROWS = "equal rows are prefilled once"


@contextmanager
def prefill_log() -> Iterator[list[str]]:
    """Collects what the fork says about its prefills. Upstream says nothing."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger, verbosity = logging.getLogger(LOGGER), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    # A message comes once per process, and other tests may have had the same
    transformers_logging.info_once.cache_clear()
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        transformers_logging.set_verbosity(verbosity)


def observe(model: PreTrainedModel, generate: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Runs `generate` after `torch.manual_seed(0)`: its `tokens`, the `rows` of the first forward, and the `log`."""
    torch.manual_seed(0)
    with forwarded(model) as shapes, prefill_log() as log:
        tokens = generate()
    return {"tokens": tokens.tolist(), "rows": shapes[0][0], "log": log}


class EcosystemTest(unittest.TestCase):
    def assert_prefilled_once(
        self, rows: tuple[int, int], strategy: str, case: Callable[..., dict[str, Any]], *args: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Runs a case on both sides: the feature ran, then the tokens agree.

        Args:
            rows (`tuple[int, int]`): Rows of the first forward of the fork, and of upstream.
            strategy (`str`): A part of the fork's log.
            case (`Callable`): The function, which returns what `observe` returns.
            args: Its arguments.

        Returns:
            `tuple[dict, dict]`: What the case has returned here and in the oracle.
        """
        ours, theirs = case(*args), oracle().run(case, *args)
        self.assertEqual((ours["rows"], theirs["rows"]), rows, ours["log"])
        self.assertEqual(theirs["log"], [])
        self.assertIn(strategy, "\n".join(ours["log"]))
        self.assertEqual(ours["tokens"], theirs["tokens"])
        return ours, theirs
