# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Writes the series for upstream as patches that `git am` takes, each on top of those before it.

Edits of upstream's tests need a checkout of its repository, since its wheel holds no tests. Without one they are left
out, and each patch says so.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from ..build import BuildError, check_upstream, edit_files, find_upstream, read_pin
from ..codemod import EditError
from ..patch import DIFF_OPTIONS, apply_style, edits_for_upstream, run_git
from .step import Step
from .steps import STEPS


SOURCES = "src/transformers"
# Whoever sends a patch signs it: `git am`, then `git commit --amend --reset-author`
AUTHOR = {"user.name": "Nobody yet", "user.email": "nobody@invalid"}
DATE = "2026-01-01T00:00:00Z"
WITHOUT_TESTS = (
    "The tests of this patch are left out: they are made from a checkout of the repository (UPSTREAM=path)."
)


def base_files(upstream: Distribution, steps: Sequence[Step], checkout: Path | None) -> dict[str, Path]:
    """
    Collects the files that the series starts from.

    Args:
        upstream (`Distribution`): The pinned release, installed.
        steps (`Sequence[Step]`): The series.
        checkout (`Path`, *optional*): Upstream's repository, whose tests are edited.

    Returns:
        `dict[str, Path]`: Path in upstream's repository -> where the file lies.

    Raises:
        `BuildError`: `upstream` is not the pinned release, or the checkout lacks a test that a step edits.
    """
    files = {f"{SOURCES}/{path}": file for path, file in check_upstream(upstream, read_pin()).items()}
    if checkout is not None:
        tests = {edit.path: checkout / edit.path for step in steps for edit in step.test_edits}
        if missing := sorted(path for path, file in tests.items() if not file.is_file()):
            raise BuildError(f"{checkout} is no checkout of upstream's repository: it lacks {', '.join(missing)}")
        files |= tests
    return files


def apply_step(step: Step, files: Mapping[str, Path], with_tests: bool) -> dict[str, bytes]:
    """
    Applies a step's edits.

    Args:
        step (`Step`): The step.
        files (`Mapping[str, Path]`): Path in upstream's repository -> where the file lies, the steps before applied.
        with_tests (`bool`): Whether tests are edited too.

    Returns:
        `dict[str, bytes]`: Path in upstream's repository -> the whole new content.

    Raises:
        `EditError`: An edit doesn't apply to exactly one place, or changes nothing.
    """
    package = {
        path.removeprefix(f"{SOURCES}/"): file for path, file in files.items() if path.startswith(f"{SOURCES}/")
    }
    edited = edit_files(package, edits_for_upstream(step.edits, package))
    contents = {f"{SOURCES}/{path}": text for path, text in edited.items()}
    if with_tests:
        contents |= edit_files(files, step.test_edits)
    return {path: text.encode("utf-8") for path, text in contents.items()}


def message(step: Step, with_tests: bool) -> str:
    notes = [] if with_tests or not step.test_edits else [WITHOUT_TESTS]
    return "\n\n".join([step.subject, step.description.strip(), *notes]) + "\n"


def commit(repository: Path, text: str) -> None:
    run_git("add", "--all", folder=repository)
    settings = [argument for name, value in AUTHOR.items() for argument in ("-c", f"{name}={value}")]
    run_git(*settings, "commit", "--quiet", "--date", DATE, "--message", text, folder=repository)


def make_series(
    upstream: Distribution, repository: Path, steps: Sequence[Step] = STEPS, checkout: Path | None = None
) -> None:
    """
    Makes a git repository of the series: a commit with the files that it changes, as the pinned release has them, then
    one commit for each step.

    Args:
        upstream (`Distribution`): The pinned release, installed.
        repository (`Path`): An empty directory.
        steps (`Sequence[Step]`, *optional*): The series.
        checkout (`Path`, *optional*): Upstream's repository, whose tests are edited. Without one no tests are.

    Raises:
        `BuildError`: `upstream` is not the pinned release, or the checkout lacks a test that a step edits.
        `EditError`: An edit doesn't apply to exactly one place, or changes nothing.
    """
    files, with_tests = base_files(upstream, steps, checkout), checkout is not None
    contents: list[dict[str, bytes]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            # In upstream's style, so that the next step starts from what the patch leaves
            changed = apply_step(step, files, with_tests)
            write(Path(scratch), changed)
            apply_style(Path(scratch), changed)
            contents.append({path: (Path(scratch) / path).read_bytes() for path in changed})
            files |= {path: Path(scratch) / path for path in changed}
    pristine = base_files(upstream, steps, checkout)
    run_git("init", "--quiet", folder=repository)
    write(repository, {path: pristine[path].read_bytes() for step in contents for path in step})
    commit(repository, f"transformers {upstream.version}")
    for step, changed in zip(steps, contents, strict=True):
        write(repository, changed)
        commit(repository, message(step, with_tests))


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def write_patches(repository: Path, output: Path, steps: Sequence[Step] = STEPS) -> list[Path]:
    """
    Writes the commits of [`make_series`] as patches, in place of those that are there.

    Returns:
        `list[Path]`: The patches, in order.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    options = [*DIFF_OPTIONS, "--unified=3", "--stat=120", "--zero-commit", "--no-signature", "--no-numbered"]
    target = f"--output-directory={output.resolve()}"
    run_git("format-patch", "--quiet", *options, target, f"HEAD~{len(steps)}", folder=repository)
    return sorted(output.glob("*.patch"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.series.patches", description=__doc__)
    parser.add_argument("--pristine", type=Path, help="upstream's installed package (default: of the running Python)")
    parser.add_argument("--upstream", type=Path, help="a checkout of upstream's repository, for its tests")
    parser.add_argument("--output", type=Path, required=True, help="the directory to write the patches to")
    parser.add_argument("--tree", type=Path, help="a directory that gets the package with the series applied")
    parser.add_argument("--steps", type=int, default=len(STEPS), help="only so many steps")
    arguments = parser.parse_args()
    if not 1 <= arguments.steps <= len(STEPS):
        parser.error(f"`steps` must be between 1 and {len(STEPS)}, but is {arguments.steps}")
    steps = STEPS[: arguments.steps]
    with tempfile.TemporaryDirectory() as name:
        try:
            upstream = find_upstream(arguments.pristine)
            make_series(upstream, Path(name), steps, arguments.upstream)
        except (BuildError, EditError) as error:
            parser.exit(1, f"error: {error}\n")
        patches = write_patches(Path(name), arguments.output, steps)
        print(run_git("log", "--reverse", "--format=%n%s", "--stat=120", f"HEAD~{len(steps)}..", folder=Path(name)))
        if arguments.tree is not None:
            package = arguments.tree / "transformers"
            shutil.rmtree(package, ignore_errors=True)
            shutil.copytree(Path(upstream.locate_file("transformers")), package)
            shutil.copytree(Path(name) / SOURCES, package, dirs_exist_ok=True)
    print(*patches, sep="\n")
    if arguments.upstream is None:
        print("Without upstream's tests: give a checkout of its repository (UPSTREAM=path) for patches with tests.")


if __name__ == "__main__":
    main()
