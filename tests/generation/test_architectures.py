# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The architecture sweep: every architecture of the auto mappings for generation that can be built tiny returns what
upstream returns, sampling and with beams, after a prefill of one row per prompt.
"""

import pytest

from .architectures.comparison import compare
from .architectures.registry import all_cases
from .architectures.table import markdown_row, row
from .oracle import REPOSITORY, OracleError
from .runs import oracle


PAGE = REPOSITORY / "docs" / "source" / "en" / "prefill_support.md"
WRITE_PAGE = f"write it anew: python -m tests.generation.architectures.table {PAGE.relative_to(REPOSITORY)}"
CASES = all_cases()
SWEPT = [case for case in CASES if case.excluded is None]
EXCLUDED = [case for case in CASES if case.excluded is not None]


@pytest.mark.parametrize("case", SWEPT, ids=lambda case: case.name)
def test_same_as_upstream_after_a_prefill_of_one_row_per_prompt(case):
    outcome = compare(case, oracle())
    assert outcome.problems == []
    assert markdown_row(row(case, outcome)) in PAGE.read_text(), WRITE_PAGE


@pytest.mark.parametrize("case", EXCLUDED, ids=lambda case: case.name)
def test_excluded_architectures_do_not_run_in_upstream(case):
    with pytest.raises(OracleError):
        compare(case, oracle())


def test_page_names_every_case():
    cells = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [(first.removeprefix("| ").strip("`"), kind) for first, kind, *_ in cells]
    assert named == [(case.model_type, case.kind) for case in CASES], WRITE_PAGE
    assert all(markdown_row(row(case, None)) in PAGE.read_text() for case in EXCLUDED), WRITE_PAGE
