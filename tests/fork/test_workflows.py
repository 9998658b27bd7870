# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The forge's workflows: they parse, and run targets and files that exist."""

import re
from pathlib import Path

import pytest
import yaml

from utils.fork.build import REPOSITORY


WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: dict) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "rebase.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_are_complete(path: Path):
    workflow = load(path)
    # YAML 1.1 reads the key `on` as true
    assert workflow[True]
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert set(job.get("needs", [])) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_exist(path: Path):
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./-]+):", makefile, re.MULTILINE))
    named = [match for command in commands(load(path)) for match in re.findall(r"\bmake ([\w./-]+)", command)]
    assert named
    assert set(named) <= targets


def test_python_versions_are_upstreams_oldest_and_newest(upstream):
    supported = [
        match[1]
        for classifier in upstream.metadata.get_all("Classifier")
        if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
    ]
    ordered = sorted(supported, key=lambda version: int(version.partition(".")[2]))
    matrix = load(REPOSITORY / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == [ordered[0], ordered[-1]]
