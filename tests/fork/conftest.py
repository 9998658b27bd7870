# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.generation.oracle import oracle_path
from utils.fork.build import BuildError, build_tree, find_upstream


@pytest.fixture(scope="session")
def upstream() -> Distribution:
    """The pinned release as `make develop` lays it down: with all of its files and metadata."""
    try:
        return find_upstream(oracle_path() / "transformers")
    except BuildError as error:
        pytest.fail(f"{error} (`make develop` puts it there)")


@pytest.fixture(scope="session")
def tree(upstream: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fork's package, built."""
    return build_tree(upstream, tmp_path_factory.mktemp("tree"))
