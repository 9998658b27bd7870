# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What a step of the series for upstream is."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..codemod import Edit


@dataclass(frozen=True, kw_only=True)
class Step:
    """
    A change that upstream could take by itself: one pull request. It builds on the steps before it.

    Args:
        subject (`str`): First line of the commit message.
        description (`str`): The rest of it, and the description of the pull request.
        edits (`Sequence[Edit]`): What changes in the package. Paths are relative to it.
        test_edits (`Sequence[Edit]`): What changes in upstream's tests. Paths are relative to its repository.
    """

    subject: str
    description: str
    edits: Sequence[Edit]
    test_edits: Sequence[Edit]
