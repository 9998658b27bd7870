# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
from hypothesis import HealthCheck, settings


# The same examples in each run of the tests; new ones in each `make fuzz`
_LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_LIMITS)
settings.register_profile("long", max_examples=2000, **_LIMITS)
settings.load_profile("ci")
