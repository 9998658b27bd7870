# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The whole fork as one patch: what it holds, and that it applies to the pristine release and works there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from safetensors.torch import load, load_file

from tests.generation.runs import ALL_OUTPUTS, MODES, assert_same, oracle, run
from utils.fork import patch
from utils.fork.build import PACKAGE, REPOSITORY, check_upstream, read_pin
from utils.fork.codemod import ReplaceStatement
from utils.fork.edits import EDITS
from utils.fork.patch import (
    INHERITING,
    STYLE,
    PatchError,
    edits_for_upstream,
    imported_by,
    leave_out_section,
    make_patch,
    run_git,
    upstream_place,
    upstream_tests,
)
from utils.fork.proposals import FULL, UPSTREAM_PACKAGES, Proposal


MODULE = "generation/prompt_expansion.py"
EDIT = ReplaceStatement(
    path="generation/configuration_utils.py",
    scope="GenerationConfig.validate",
    old="minor_issues = {}",
    new="minor_issues = {}\nvalidate_prompt_expansion(self.prompt_expansion)",
    reason="a test",
)
# Tests that are quick, by parts of their names
SOME = "LoopContractTest or same_as_upstream_0 or (BatchExpansionTest and dynamic) or SharedSlidingWindowTest"
# Model, mode
CASES = [("llama", "beam"), ("gemma3", "sample"), ("bart", "beam_sample")]
ARGUMENTS = {mode: {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 6} for _, mode in CASES}
# Importing the library takes most of the time, so that all that is done in a checkout is done in one process
IN_CHECKOUT = f"""
import sys
from pathlib import Path
import pytest
import transformers
from tests.generation.runs import run
from transformers.generation import prefill

print("imported", transformers.__version__, prefill.__file__)
for name, mode in {CASES!r}:
    Path(name).write_bytes(run(name, 2, {ARGUMENTS!r}[mode]))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", {SOME!r}, "tests"]))
"""


def propose(**arguments) -> Proposal:
    arguments = {"edits": [EDIT], "modules": [MODULE], "tests": [], **arguments}
    return Proposal(subject="Subject", description="Description.", **arguments)


def run_python(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs Python in a checkout, which is all that it finds there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@dataclass
class Checkout:
    """The pristine release as upstream's repository has it, with a patch applied."""

    folder: Path
    text: str

    @cached_property
    def report(self) -> str:
        """What the process in the checkout has printed."""
        result = run_python("-c", IN_CHECKOUT, folder=self.folder)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    @property
    def paths(self) -> list[str]:
        return re.findall(r"^diff --git a/(\S+) b/\1$", self.text, re.MULTILINE)

    def added_lines(self, *folders: str) -> list[str]:
        """The lines, with the path in front, that the patch adds to files in the folders."""
        lines, path = [], ""
        for line in self.text.splitlines():
            if line.startswith("diff --git "):
                path = line.rpartition(" b/")[2]
            elif line.startswith("+") and not line.startswith("+++ ") and path.startswith(folders):
                lines.append(f"{path}: {line[1:]}")
        return lines


@pytest.fixture(scope="module", autouse=True)
def upstream_is_checked_once():
    """Each check reads all files of the release."""
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(patch, "check_upstream", cache(check_upstream))
        yield


@pytest.fixture(scope="module")
def checkout(upstream: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The whole fork, applied."""
    return make_checkout(FULL, upstream, tmp_path_factory.mktemp("full"))


def make_checkout(proposal: Proposal, upstream: Distribution, folder: Path) -> Checkout:
    text, diffstat = make_patch(upstream, proposal)
    assert diffstat in text
    file = folder / "proposed.patch"
    file.write_bytes(text.encode("utf-8"))
    checkout = Checkout(folder / "checkout", text)
    for path, source in patch.check_upstream(upstream, read_pin()).items():
        target = checkout.folder / "src" / PACKAGE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for path in UPSTREAM_PACKAGES:
        (checkout.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout.folder / path).write_text("")
    run_git("init", "--quiet", folder=checkout.folder)
    # A patch that reformats what it doesn't change would be hard to read
    assert_in_style([path for path in checkout.paths if (checkout.folder / path).exists()], checkout.folder)
    run_git("apply", "--check", "--whitespace=error", str(file), folder=checkout.folder)
    run_git("apply", str(file), folder=checkout.folder)
    return checkout


def assert_in_style(paths: list[str], folder: Path) -> None:
    files = [path for path in paths if path.endswith(".py")]
    assert files
    for command in (["format", "--check"], ["check"]):
        result = run_python("-m", "ruff", *command, "--no-cache", "--config", str(STYLE), *files, folder=folder)
        assert result.returncode == 0, result.stdout + result.stderr


class TestApplied:
    """The patch in a checkout of the pristine release."""

    def test_every_file_is_in_upstreams_style(self, checkout):
        assert_in_style(checkout.paths, checkout.folder)

    def test_modular_files_say_what_is_generated_from_them(self, checkout):
        modular = [path.replace("/modeling_", "/modular_") for path in checkout.paths if "/modeling_" in path]
        there = {path for path in modular if (checkout.folder / path).exists()}
        assert f"src/{PACKAGE}/models/minimax/modular_minimax.py" in there
        inheriting = {path for path in there if any(f"/{folder}/" in path for folder in INHERITING)}
        assert len(inheriting) == len(INHERITING)
        assert not any("expand_kv" in (checkout.folder / path).read_text() for path in inheriting)
        assert there - inheriting <= set(checkout.paths)

    def test_nothing_of_the_fork_goes_along(self, checkout):
        text = checkout.text.lower()
        for machinery in ("libcst", "utils.fork", "utils/fork", "changed by the prefill-once", read_pin().local):
            assert machinery not in text, machinery
        assert f"src/{PACKAGE}/__init__.py" not in checkout.paths
        message = checkout.text.partition("\n---\n")[0].splitlines()
        lines = [*message, *checkout.added_lines("src/", "docs/")]
        assert [line for line in lines if re.search(r"\b(fork|upstream)", line, re.IGNORECASE)] == []
        assert [line for line in checkout.added_lines("tests/") if re.search(r"\bfork\b", line, re.IGNORECASE)] == []

    def test_is_imported_from_the_checkout(self, checkout):
        file = checkout.folder / "src" / PACKAGE / "generation" / "prefill.py"
        assert checkout.report.startswith(f"imported {read_pin().version} {file}\n")

    @pytest.mark.parametrize(("name", "mode"), CASES)
    def test_generates_what_the_pristine_release_does(self, checkout, name, mode):
        assert checkout.report
        ours, theirs = load_file(checkout.folder / name), load(oracle().run(run, name, 2, ARGUMENTS[mode]))
        assert (ours["rows"], theirs["rows"]) == (2, 6)
        assert_same(ours, theirs)

    def test_our_tests_pass_there(self, checkout):
        """All modules are collected, and some of their tests run."""
        assert int(re.search(r"^(\d+) passed, \d+ deselected", checkout.report, re.MULTILINE)[1]) >= 15


class TestRule:
    """Which tests go along."""

    def test_those_that_need_nothing_of_the_fork(self):
        tests = upstream_tests()
        assert {"tests.generation.test_prefill", "tests.cache.test_batch_expansion"} <= set(tests)
        for name in ("test_architectures", "test_differential", "test_whisper"):
            assert f"tests.generation.{name}" not in tests
        assert "tests.sharing.test_states" not in tests
        assert not any(name.startswith(("tests.fork", "tests.examples")) for name in tests)

    def test_imports_are_followed(self):
        found = imported_by(["tests.cache.test_static_address"])
        assert "tests.generation.architectures.overrides" in found  # through two other modules
        assert "utils.fork" in imported_by(["tests.fork.test_patch"])

    def test_the_oracle_is_another_one(self):
        found = imported_by(["tests.generation.test_prefill"])
        assert {"tests.generation.oracle", "transformers.generation.prefill"} <= found
        assert "socket" not in found

    def test_places(self):
        assert upstream_place("tests/cache/fillings.py") == "tests/utils/fillings.py"
        assert upstream_place("docs/source/en/prefill_once.md") == "docs/source/en/prefill_once.md"
        with pytest.raises(PatchError, match="tests/fork/test_patch.py: upstream has no place"):
            upstream_place("tests/fork/test_patch.py")


class TestMakePatch:
    def test_holds_what_is_declared(self, upstream):
        text, diffstat = make_patch(upstream, propose())
        assert text.startswith(f"Subject: [PATCH] Subject\n\nDescription.\n---\n{diffstat}\ndiff --git a/src/")
        assert Checkout(Path(), text).paths == [f"src/{PACKAGE}/{EDIT.path}", f"src/{PACKAGE}/{MODULE}"]
        assert "2 files changed" in diffstat

    def test_does_not_depend_on_the_users_settings(self, upstream, tmp_path, monkeypatch):
        expected = make_patch(upstream, propose())
        settings = tmp_path / "gitconfig"
        settings.write_text("[diff]\n noprefix = true\n context = 1\n[core]\n autocrlf = true\n")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
        assert make_patch(upstream, propose()) == expected

    @pytest.mark.parametrize(
        ("declared", "path"),
        [
            ({"modules": ["generation/gone.py"]}, f"src/{PACKAGE}/generation/gone.py"),
            ({"tests": ["tests.cache.test_gone"]}, "tests.cache.test_gone"),
            ({"pages": {"docs/source/en/gone.md": ()}}, "docs/source/en/gone.md"),
        ],
    )
    def test_refuses_what_is_not_there(self, upstream, declared, path):
        with pytest.raises(PatchError, match=f"declared, but not there: {re.escape(path)}$"):
            make_patch(upstream, propose(**declared))

    def test_sections_that_stay(self):
        page = "# Page\n\n## One\n\nText.\n\n### More\n\n## Two\n\nText.\n"
        assert leave_out_section(page, "One") == "# Page\n\n## Two\n\nText.\n"
        assert leave_out_section(page, "Two") == page.partition("## Two")[0]
        for title, times in (("Three", 0), ("More", 0)):
            with pytest.raises(PatchError, match=f"section '{title}' found {times} times"):
                leave_out_section(page, title)

    def test_edits_of_modular_files(self, upstream):
        files = patch.check_upstream(upstream, read_pin())
        added = edits_for_upstream(EDITS, files)[len(EDITS) :]
        assert all("/modular_" in edit.path and edit.path in files for edit in added)
        assert len({edit.path for edit in added}) >= 5

    def test_command_line_refuses_in_one_line(self, tmp_path):
        arguments = ["--pristine", str(tmp_path / PACKAGE), "--output", str(tmp_path / "out.patch")]
        result = run_python("-m", "utils.fork.patch", *arguments, folder=REPOSITORY)
        assert result.returncode == 1
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out.patch").exists()
