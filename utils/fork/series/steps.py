# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The steps of the series, in order."""

from . import prefill_once
from .step import Step


STEPS: list[Step] = [prefill_once.STEP]
