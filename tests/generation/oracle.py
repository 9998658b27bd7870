# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The oracle of the tests: see `utils.oracle`."""

from utils.oracle import REPOSITORY, UPSTREAM_VERSION, Oracle, OracleError, oracle_path


__all__ = ["REPOSITORY", "UPSTREAM_VERSION", "Oracle", "OracleError", "oracle_path"]
