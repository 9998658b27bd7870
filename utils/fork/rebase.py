# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Says what another upstream release would mean for the fork, without building anything: which relied-upon functions
changed, which edits don't apply, and whether upstream has taken a file name of ours. See docs/fork.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import libcst as cst

from .build import (
    OVERLAY,
    PACKAGE,
    REPOSITORY,
    BuildError,
    find_overlay,
    find_upstream,
    mark_edits,
    read_pin,
    read_record,
    record_digest,
)
from .codemod import Edit, EditError
from .drift import DRIFT_FILE, compare, digests
from .edits import EDITS
from .patch import edits_for_upstream
from .series.steps import STEPS


SCRATCH = REPOSITORY / "build" / "rebase"


def download(version: str) -> Path:
    """Gets a release's wheel with pip and unpacks it. Returns its package."""
    target = SCRATCH / version
    shutil.rmtree(target, ignore_errors=True)
    wheels = target / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*command, f"{PACKAGE}=={version}"], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target / PACKAGE


def failing_edits(upstream_files: Mapping[str, Path], edits: Sequence[Edit]) -> list[str]:
    """Tries edits one by one, those of one file each on what the ones before have left. Returns why some don't apply."""
    modules, failures = {}, []
    for edit in edits:
        try:
            if edit.path not in upstream_files:
                raise EditError(f"{edit}: upstream has no such file")
            if edit.path not in modules:
                modules[edit.path] = cst.parse_module(upstream_files[edit.path].read_bytes())
            modules[edit.path] = edit.apply(modules[edit.path])
        except EditError as error:
            failures.append(str(error))
    return failures


def report_steps(upstream_files: Mapping[str, Path]) -> list[str]:
    """Says for each step of the series whether its edits apply, and if not, why."""
    lines, before = [], []
    for number, step in enumerate(STEPS, start=1):
        edits = edits_for_upstream(step.edits, upstream_files)
        failures = failing_edits(upstream_files, [*before, *edits])
        # Those of the steps before have been reported
        known = set(failing_edits(upstream_files, before)) if failures else set()
        new = [failure for failure in failures if failure not in known]
        lines += [f"  {number}. {'applies' if not new else 'does not apply'}: {step.subject}"]
        lines += [f"       {failure}" for failure in new]
        before += edits
    return lines


def report(package: Path) -> tuple[list[str], bool]:
    """
    Compares a release with the pinned one.

    Args:
        package (`Path`): The release's package `transformers`, with its metadata beside it.

    Returns:
        `tuple[list[str], bool]`: The lines of the report, and whether the fork could take the release as it is.
    """
    upstream, pin = find_upstream(package), read_pin()
    record = read_record(upstream)
    files = {path.removeprefix(f"{PACKAGE}/"): Path(upstream.locate_file(path)) for path in record}
    recorded, found = json.loads(DRIFT_FILE.read_text(encoding="utf-8")), digests(package)
    differences = compare(recorded, found)
    edits = [*EDITS, *mark_edits(replace(pin, version=upstream.version))]
    failures = failing_edits(files, edits)
    try:
        find_overlay(OVERLAY, files)
        collisions = []
    except BuildError as error:
        collisions = [str(error)]
    lines = [
        f"{PACKAGE} {upstream.version}, compared with {pin.version}",
        "",
        f"Functions that the fork relies on: {sum(map(len, recorded.values()))}, different: {len(differences)}",
        *(f"  {line}" for line in differences),
        f"Edits: {len(edits)}, failing: {len(failures)}",
        *(f"  {line}" for line in failures),
        f"Files of ours: {len(find_overlay(OVERLAY, {}))}, replacing upstream's: {len(collisions)}",
        *(f"  {line}" for line in collisions),
        "",
        "Steps of the series for upstream, each on the ones before it (sources alone):",
        *report_steps(files),
        "",
        "The pin would be:",
        f'  version = "{upstream.version}"',
        f'  record_sha256 = "{record_digest(record)}"',
    ]
    return lines, not (differences or failures or collisions)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.rebase", description=__doc__)
    parser.add_argument("version", help="the upstream release to look at")
    package = download(parser.parse_args().version)
    lines, fits = report(package)
    print("\n".join(lines))
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
