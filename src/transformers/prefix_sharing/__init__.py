# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Keys and values of a prompt that are stored once for all rows that continue it. This package must not import `cache_utils`
or a modeling file on its own import: they import it.
"""

from .operations import map_segments
from .states import SegmentedStates, private_index


__all__ = ["SegmentedStates", "map_segments", "private_index"]
