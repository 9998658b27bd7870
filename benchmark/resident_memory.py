# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Resident memory of this process, and its peak, as Linux tells it. Needs the standard library alone."""

import ctypes
import sys
from pathlib import Path


STATUS = Path("/proc/self/status")


def forget_peak() -> int | None:
    """Begins a new peak, and returns the resident bytes; None where the system doesn't tell."""
    if sys.platform != "linux":
        return None
    # What the allocator kept from the call before would not be missed now
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def resident_bytes(peak: bool = False) -> int:
    """The resident bytes: now, or the most since `forget_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name))
