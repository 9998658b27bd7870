# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What logits processors keep per row must follow the beams, as the model's own cache does."""

from typing import Any

import torch


def reorder_processors(logits_processor: Any, beam_idx: torch.LongTensor) -> None:
    """
    Lets the processors that keep a state per row follow the beams.

    Args:
        logits_processor ([`LogitsProcessorList`]):
            The processors of a beam search. Those derived from [`ReorderedGuidanceMixin`] get the beam indices: a method of
            the same name on a processor of the caller is its own business.
        beam_idx (`torch.LongTensor` of shape `(B * num_beams,)`):
            The row that each row of the next step continues.
    """
    for processor in logits_processor if isinstance(logits_processor, list) else ():
        if isinstance(processor, ReorderedGuidanceMixin):
            processor.reorder_cache(beam_idx)


class ReorderedGuidanceMixin:
    """
    For [`UnbatchedClassifierFreeGuidanceLogitsProcessor`], which runs the model on an unconditional prompt with a
    private cache: without this, the unconditional scores of a beam are those of whatever beam was in its row before.
    """

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the unconditional context for beam search, given the selected beam indices."""
        context = self.unconditional_context
        for name in ("input_ids", "attention_mask"):
            if context[name] is not None:
                context[name] = context[name].index_select(0, beam_idx.to(context[name].device))
        if context["cache"] is not None:
            context["cache"].reorder_cache(beam_idx)
