# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The repository holds only what its authors wrote: no file shares a run of lines with upstream's."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from utils.fork.build import PACKAGE, REPOSITORY, check_upstream, read_pin


# This many lines in a row that say something are too many to be a coincidence
LONGEST_RUN = 5
# Lines that say nothing by themselves: short ones, imports, and those with no more than one word
TRIVIAL = re.compile(r"(from\s+\S+\s+)?import\s.*|\W*\w*\W*")
SHORTEST_LINE = 8
# The licence is upstream's too, and must be
EXCEPTIONS = {"LICENSE"}


def telling_lines(text: str) -> list[str]:
    """The lines that say something, without their indentation."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if len(line) >= SHORTEST_LINE and not TRIVIAL.fullmatch(line)]


def runs(lines: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(lines[start : start + length]) for start in range(len(lines) - length + 1))


def shared_runs(
    ours: dict[str, list[str]], theirs: Iterable[tuple[str, list[str]]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """
    Finds runs of more than `LONGEST_RUN` lines that stand in a file of ours and in one of theirs.

    Returns:
        `dict[tuple[str, str], tuple[str, ...]]`: Our file and theirs -> the last run, cut to `LONGEST_RUN` + 1 lines.
    """
    length = LONGEST_RUN + 1
    files_of_run = {}
    for path, lines in ours.items():
        for run in runs(lines, length):
            files_of_run.setdefault(run, path)
    our_lines = {line for lines in ours.values() for line in lines}
    found = {}
    for path, lines in theirs:
        start = 0  # of the current run of lines that stand in ours too, in whatever order
        for end, line in enumerate(lines, 1):
            if line not in our_lines:
                start = end
            elif end - start >= length and (run := tuple(lines[end - length : end])) in files_of_run:
                found[files_of_run[run], path] = run
    return found


def repository_files() -> list[str]:
    """Files that are tracked, or will be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    return [path for path in listing.split("\0") if path and (REPOSITORY / path).is_file()]


def read_lines(file: Path) -> list[str]:
    return telling_lines(file.read_bytes().decode("utf-8", errors="replace"))


class TestSharedRuns:
    SIX = [f"line number {i} says something" for i in range(6)]

    def test_finds_a_run_of_six(self):
        ours = {"a.py": ["ours alone", *self.SIX], "b.py": self.SIX[:5]}
        theirs = [("x.py", ["theirs alone", *self.SIX, "theirs again"]), ("y.py", self.SIX[1:])]
        assert shared_runs(ours, theirs) == {("a.py", "x.py"): tuple(self.SIX)}

    def test_lets_five_pass_and_six_in_another_order(self):
        ours = {"a.py": self.SIX}
        assert shared_runs(ours, [("x.py", self.SIX[:5]), ("y.py", self.SIX[::-1])]) == {}

    @pytest.mark.parametrize("line", ["", ")", "import torch", "from torch import nn", "return", "else:", "),", '"""'])
    def test_trivial_lines_do_not_count(self, line):
        assert telling_lines(f"    {line}\n    first_line = 1\n") == ["first_line = 1"]


def test_no_file_of_ours_holds_upstream_code(upstream):
    ours = {path: read_lines(REPOSITORY / path) for path in repository_files() if path not in EXCEPTIONS}
    assert f"src/{PACKAGE}/generation/prefill.py" in ours
    files = check_upstream(upstream, read_pin())
    shared = shared_runs(ours, ((path, read_lines(file)) for path, file in files.items()))
    texts = [f"{our} and upstream's {their}:\n  " + "\n  ".join(run) for (our, their), run in shared.items()]
    assert not shared, "\n".join(texts)
