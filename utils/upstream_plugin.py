# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The part of `utils.upstream_suite` that runs inside pytest: selects tests, seeds them, and writes down what they gave.

It is a module of its own, and imports nothing of the repository, because upstream's checkout has a package `utils` too.
"""

import json
import os
import random
import re
import sys
import zlib
from pathlib import Path

import pytest


RECORD = "UPSTREAM_TESTS_RECORD"
EVERYTHING = "UPSTREAM_TESTS_EVERYTHING"

# The tests of generation and caches in a model's file: those that upstream marks, and those with such a name
GENERATE = re.compile(r"generat|beam|sampl|cache|past_key_values", re.IGNORECASE)
# Most of the time for the least about prefill: what compiles, and the statistics of watermarks
COSTLY = re.compile(r"compil|synthid", re.IGNORECASE)
# They start processes of their own, whose random numbers and results can't be followed
DISTRIBUTED = ("is_training_test", "is_tensor_parallel_test", "is_fsdp_test", "is_expert_parallel_test")


class Recorder:
    """
    Appends to a file of JSON lines: `start` when a test starts, `test` with its outcome, `file` when a file is
    through, and in the end the `package` that was tested.

    Args:
        path (`Path`): The record. Tests that have an outcome in it are not run again.
        everything (`bool`): Whether the costly tests run too.
    """

    def __init__(self, path: Path, everything: bool):
        self.path, self.everything = path, everything
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        self.known = {line["test"] for line in lines if "test" in line}
        self.reports = []

    def append(self, **line) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def selects(self, item) -> bool:
        if item.nodeid in self.known or any(item.get_closest_marker(mark) for mark in DISTRIBUTED):
            return False
        if COSTLY.search(item.name) and not self.everything:
            return False
        of_a_model = item.nodeid.startswith("tests/models/")
        return not of_a_model or bool(item.get_closest_marker("generate") or GENERATE.search(item.name))

    def pytest_collection_modifyitems(self, config, items) -> None:
        config.hook.pytest_deselected(items=[item for item in items if not self.selects(item)])
        items[:] = [item for item in items if self.selects(item)]

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.append(test=report.nodeid, outcome="failed", seconds=0, message=reason(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.append(start=item.nodeid)
        self.reports = []
        result = yield
        report = decisive(self.reports)
        seconds = round(sum(report.duration for report in self.reports), 3)
        self.append(test=item.nodeid, outcome=report.outcome, seconds=seconds, message=reason(report))
        if nextitem is None or nextitem.path != item.path:
            self.append(file=file_of(item.nodeid))
        return result

    def pytest_sessionfinish(self) -> None:
        tested = sys.modules.get("transformers")
        if tested is not None:
            self.append(package=str(Path(tested.__file__).parent.resolve()))

    def pytest_runtest_setup(self, item) -> None:
        seed(item.nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def decisive(reports: list):
    """Of the reports of a test's phases and subtests, the one that gives its outcome."""
    passed = [report for report in reports if report.outcome == "passed" and report.when == "call"]
    failed = [report for report in reports if report.outcome == "failed"]
    return [*failed, *passed, *(report for report in reports if report.outcome == "skipped")][0]


def seed(nodeid: str) -> None:
    """Gives a test the random numbers that follow from its id, whatever ran before it and wherever it runs."""
    number = zlib.crc32(nodeid.encode())
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
    # Upstream's testers draw their inputs from a generator of their own
    common = sys.modules.get("tests.test_modeling_common")
    if hasattr(common, "global_rng"):
        common.global_rng.seed(number)


def reason(report) -> str:
    """Why a test failed or was skipped, on one line."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        text = report.longrepr[2]
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:300]


def pytest_configure(config) -> None:
    recorder = Recorder(Path(os.environ[RECORD]), everything=EVERYTHING in os.environ)
    config.pluginmanager.register(recorder, "upstream_recorder")
