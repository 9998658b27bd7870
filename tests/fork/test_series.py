# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The series for upstream: each patch applies on those before it, its tests pass with it and not without it, and upstream's
checks find nothing that they don't find in the pristine release. Checks that lie in upstream's repository alone run if
`UPSTREAM` names a checkout of it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from utils.fork.build import PACKAGE, BuildError
from utils.fork.codemod import AddDefinitions, EditError, apply_edits
from utils.fork.patch import STYLE, run_git
from utils.fork.series.patches import SOURCES, WITHOUT_TESTS, make_series, write_patches
from utils.fork.series.steps import STEPS


STUB = Path(__file__).with_name("upstream_tests_stub.py")
TYPES = STYLE.with_name("upstream_types.toml")
NUMBERS = range(1, len(STEPS) + 1)
CHECKOUT = Path(os.environ["UPSTREAM"]) if "UPSTREAM" in os.environ else None
needs_checkout = pytest.mark.skipif(CHECKOUT is None, reason="UPSTREAM names no checkout of upstream's repository")


class Series:
    """
    The patches, and trees of the package with some of them applied.

    Args:
        upstream (`Distribution`): The pinned release, installed.
        folder (`Path`): Where all of it goes.
    """

    def __init__(self, upstream: Distribution, folder: Path):
        self.folder, self.package = folder, Path(str(upstream.locate_file(PACKAGE)))
        (folder / "made").mkdir()
        make_series(upstream, folder / "made", checkout=CHECKOUT)
        self.patches = write_patches(folder / "made", folder / "patches")
        self.trees: dict[int, Path] = {}

    def tree(self, number: int) -> Path:
        """A repository with the first `number` patches applied by git, to all files of the pristine release."""
        if number not in self.trees:
            tree = self.trees[number] = self.folder / f"tree_{number}"
            shutil.copytree(self.package, tree / SOURCES, ignore=shutil.ignore_patterns("__pycache__"))
            for edit in [edit for step in STEPS for edit in step.test_edits if CHECKOUT is not None]:
                (tree / edit.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(CHECKOUT / edit.path, tree / edit.path)
            run_git("init", "--quiet", folder=tree)
            for file in self.patches[:number]:
                run_git("apply", "--check", "--whitespace=error", str(file), folder=tree)
                run_git("apply", str(file), folder=tree)
        return self.trees[number]

    def paths(self, number: int) -> list[str]:
        """The files that a patch changes."""
        text = self.patches[number - 1].read_text(encoding="utf-8")
        return re.findall(r"^diff --git a/(\S+) b/\1$", text, re.MULTILINE)

    def changed_lines(self, number: int, folder: str) -> list[str]:
        """The lines that a patch adds or removes in a folder, blank ones too."""
        text = self.patches[number - 1].read_text(encoding="utf-8")
        files = re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)[1:]
        lines = [
            line for file in files if file.startswith(f"diff --git a/{folder}/") for line in file.splitlines()[4:]
        ]
        return [line for line in lines if line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))]


@pytest.fixture(scope="module")
def series(upstream: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Series:
    return Series(upstream, tmp_path_factory.mktemp("series"))


def run_python(*arguments: str, tree: Path, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def check_style(tree: Path, paths: Sequence[str], *command: str) -> Counter[str]:
    """Counts what ruff finds, without line numbers."""
    arguments = ["-m", "ruff", *command, "--no-cache", "--config", str(STYLE), *paths]
    result = run_python(*arguments, tree=tree, folder=tree)
    assert result.returncode in (0, 1), result.stderr
    return Counter(re.sub(r":\d+:\d+:", ":", line) for line in result.stdout.splitlines() if line.strip())


def check_types(tree: Path) -> Counter[str]:
    """Counts what ty finds, without line numbers, in what upstream checks and the series touches. Caches it skips."""
    arguments = ["--python", sys.prefix, "--config-file", str(TYPES), "--error-on-warning", "--output-format=concise"]
    roots = [f"{SOURCES}/{path}" for path in ("_typing.py", "generation", "modeling_utils.py")]
    result = run_python("-m", "ty", "check", *arguments, *roots, tree=tree, folder=tree)
    assert result.returncode in (0, 1), result.stderr
    found = [line for line in result.stdout.splitlines() if re.search(r":\d+:\d+: ", line)]
    return Counter(re.sub(r":\d+:\d+:", ":", line) for line in found)


def run_step_tests(series: Series, number: int, tree: Path, folder: Path) -> tuple[Counter[str], str]:
    """Runs the tests of a step, added to the stub, on a tree. Returns their outcomes and what was printed."""
    edits = [edit for edit in STEPS[number - 1].test_edits if isinstance(edit, AddDefinitions)]
    file = folder / f"test_step_{number}.py"
    file.write_text(apply_edits(STUB.read_text(encoding="utf-8"), edits), encoding="utf-8")
    names = [name for edit in edits for name in re.findall(r"^ *def (test_\w+)", edit.code, re.MULTILINE)]
    assert names
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), "-k", " or ".join(names)]
    result = run_python("-m", "pytest", *options, str(file), tree=tree, folder=folder)
    report = result.stdout + result.stderr
    return Counter(re.findall(r"^(PASSED|FAILED|ERROR) ", report, re.MULTILINE)), report


class TestPatches:
    @pytest.mark.parametrize("number", NUMBERS)
    def test_applies_on_those_before(self, series, number):
        assert series.tree(number)
        assert all((series.tree(number) / path).is_file() for path in series.paths(number))

    def test_git_am_takes_them(self, series, upstream, tmp_path):
        for path in {path for number in NUMBERS for path in series.paths(number)}:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            source = series.package / Path(path).relative_to(SOURCES) if path.startswith(SOURCES) else CHECKOUT / path
            shutil.copyfile(source, tmp_path / path)
        someone = ["-c", "user.name=Someone", "-c", "user.email=someone@invalid"]
        run_git("init", "--quiet", folder=tmp_path)
        run_git("add", "--all", folder=tmp_path)
        run_git(*someone, "commit", "--quiet", "--message", "base", folder=tmp_path)
        run_git(*someone, "am", "--quiet", *map(str, series.patches), folder=tmp_path)
        subjects = run_git("log", "--reverse", "--format=%s", folder=tmp_path).splitlines()
        assert subjects == ["base", *(step.subject for step in STEPS)]

    def test_first_step_is_small(self, series):
        assert series.paths(1)[0] == f"{SOURCES}/generation/utils.py"
        assert 0 < len(series.changed_lines(1, "src")) <= 100
        tests = [line for edit in STEPS[0].test_edits for line in edit.code.strip().splitlines()]
        # Each definition is followed by a blank line
        assert len(tests) + len(STEPS[0].test_edits) <= 60
        assert CHECKOUT is None or len(series.changed_lines(1, "tests")) <= 60

    @pytest.mark.parametrize("number", NUMBERS)
    def test_nothing_of_the_fork_goes_along(self, series, number):
        text = series.patches[number - 1].read_text(encoding="utf-8")
        added = [line for line in text.splitlines() if not line.startswith((" ", "-"))]
        assert [line for line in added if re.search(r"\b(fork|upstream|prefill-once authors)\b", line)] == []
        assert "TODO" not in text
        for path in series.paths(number):
            assert path.startswith(("src/transformers/", "tests/"))

    def test_left_out_tests_are_named(self, upstream, tmp_path):
        make_series(upstream, tmp_path, STEPS[:1])
        assert WITHOUT_TESTS in run_git("log", "-1", "--format=%B", folder=tmp_path)
        assert not (tmp_path / "tests").exists()

    def test_a_folder_without_tests_is_refused(self, upstream, tmp_path):
        with pytest.raises(BuildError, match="is no checkout of upstream's repository: it lacks tests/"):
            make_series(upstream, tmp_path / "made", checkout=tmp_path)

    def test_a_step_without_those_before_is_refused(self, upstream, tmp_path):
        steps = [step for step in STEPS if "encoder outputs" in step.subject]
        with pytest.raises(EditError, match="found 0 times"):
            make_series(upstream, tmp_path, steps)


class TestBehavior:
    @pytest.mark.parametrize("number", NUMBERS)
    def test_its_tests_pass_with_it_alone(self, series, number, tmp_path):
        outcomes, report = run_step_tests(series, number, series.tree(number), tmp_path)
        assert outcomes["PASSED"] >= 1, report
        assert outcomes.keys() == {"PASSED"}, report

    @pytest.mark.parametrize("number", NUMBERS)
    def test_its_tests_fail_without_it(self, series, number, tmp_path):
        outcomes, report = run_step_tests(series, number, series.tree(number - 1), tmp_path)
        assert outcomes["FAILED"] >= 1, report
        assert outcomes["ERROR"] == 0, report


class TestUpstreamsChecks:
    @pytest.mark.parametrize("number", NUMBERS)
    def test_style(self, series, number):
        paths = series.paths(number)
        for command in (["check", "--output-format=concise", "--quiet"], ["format", "--check", "--quiet"]):
            new = check_style(series.tree(number), paths, *command) - check_style(series.tree(0), paths, *command)
            assert new == Counter()

    def test_types(self, series):
        before = check_types(series.tree(0))
        assert before  # without a finding at all, nothing may have been checked
        for number in NUMBERS:
            assert check_types(series.tree(number)) - before == Counter()

    @needs_checkout
    @pytest.mark.parametrize("number", NUMBERS)
    def test_modular_files_generate_what_lies_beside_them(self, series, number):
        modular = [path for path in series.paths(number) if "/modular_" in path]
        if not modular:
            pytest.skip("the step changes no modular file")
        differences = [convert(series.tree(state), modular) for state in (0, number)]
        assert differences[1] == differences[0]

    @needs_checkout
    @pytest.mark.parametrize(
        "script", ["check_import_complexity.py", "check_noisy_comments.py", "check_docstrings.py"]
    )
    def test_script(self, series, script):
        if not (CHECKOUT / "utils" / script).is_file():
            pytest.skip(f"the checkout has no utils/{script}")
        results = []
        for number in (0, len(STEPS)):
            tree = series.tree(number)
            shutil.copytree(CHECKOUT / "utils", tree / "utils", dirs_exist_ok=True)
            result = run_python(f"utils/{script}", tree=tree, folder=tree)
            results.append((result.returncode, (result.stdout + result.stderr).replace(str(tree), "")))
        assert results[1] == results[0]


def convert(tree: Path, modular: Sequence[str]) -> str:
    """Runs upstream's converter. Returns the difference between what it generates and what lies there."""
    shutil.copytree(CHECKOUT / "utils", tree / "utils", dirs_exist_ok=True)
    generated = [path.replace("/modular_", "/modeling_") for path in modular]
    before = {path: (tree / path).read_bytes() for path in generated}
    result = run_python("utils/modular_model_converter.py", *modular, "--num_workers=1", tree=tree, folder=tree)
    assert result.returncode == 0, result.stdout + result.stderr
    difference = ""
    for path, text in before.items():
        (tree / "expected.py").write_bytes(text)
        command = ["git", "diff", "--no-index", "--unified=0", "expected.py", path]
        output = subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout
        difference += "\n".join(line for line in output.splitlines() if re.match(r"[+-](?![+-])", line))
        (tree / path).write_bytes(text)
    return difference
