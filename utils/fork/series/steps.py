# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The steps of the series, in order."""

from . import encoder_outputs, guidance_beams, minimax_states, prefill_once, prefix_cache, static_address
from .step import Step


STEPS: list[Step] = [
    prefill_once.STEP,
    minimax_states.STEP,
    guidance_beams.STEP,
    encoder_outputs.STEP,
    static_address.STEP,
    prefix_cache.STEP,
]
