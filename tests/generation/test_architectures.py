# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The architecture sweep: every architecture of the auto mappings for generation that can be built tiny returns what
upstream returns, sampling and with beams, after a prefill of one row per prompt.
"""

import pytest

from .architectures.comparison import compare
from .architectures.registry import all_cases
from .oracle import OracleError
from .runs import oracle


CASES = all_cases()
SWEPT = [case for case in CASES if case.excluded is None]
EXCLUDED = [case for case in CASES if case.excluded is not None]


@pytest.mark.parametrize("case", SWEPT, ids=lambda case: case.name)
def test_same_as_upstream_after_a_prefill_of_one_row_per_prompt(case):
    assert compare(case, oracle()).problems == []


@pytest.mark.parametrize("case", EXCLUDED, ids=lambda case: case.name)
def test_excluded_architectures_do_not_run_in_upstream(case):
    with pytest.raises(OracleError):
        compare(case, oracle())
