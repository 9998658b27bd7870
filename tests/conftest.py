# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
import pytest
from hypothesis import HealthCheck, settings

from transformers.prefix_sharing import caches


# The same examples in each run of the tests; new ones in each `make fuzz`
_LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_LIMITS)
settings.register_profile("long", max_examples=2000, **_LIMITS)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def share_at_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models, whose keys are cheaper to copy, share them in tests, but for those with the mark `cost_rule`."""
    if "cost_rule" not in request.keywords:
        monkeypatch.setattr(caches, "why_not_pays", lambda *args: None)
