# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Writes the fork as a patch for upstream's repository: the edits of its files, and our modules, tests and pages at the
places where upstream keeps such files. Notices, versions and the machinery of the fork stay here.

The patch is a proposed commit message, its diffstat and a diff that `git apply` takes. What it holds is declared in
`proposals.py`.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import Distribution
from importlib.util import resolve_name
from pathlib import Path, PurePosixPath

from .build import OVERLAY, REPOSITORY, BuildError, check_upstream, edit_files, find_overlay, find_upstream, read_pin
from .codemod import Edit, EditError
from .proposals import (
    FORK_ONLY_TESTS,
    FULL,
    PLACES,
    SUBSTITUTES,
    TEST_DATA,
    UPSTREAM_PACKAGES,
    Proposal,
)


# The user's settings don't count: the same files give the same patch on every machine
DIFF_OPTIONS = [
    *("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-indent-heuristic"),
    *("--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/"),
]
STYLE = Path(__file__).with_name("upstream_style.toml")


class PatchError(ValueError):
    """Our own files don't fit what a proposal declares."""


def upstream_place(path: str) -> str:
    """
    Returns where upstream keeps a file of ours.

    Raises:
        `PatchError`: Upstream has no place for it.
    """
    for ours, theirs in PLACES.items():
        if path.startswith(ours):
            return theirs + path.removeprefix(ours)
    raise PatchError(f"{path}: upstream has no place for such a file")


def module_file(module: str) -> str | None:
    """Returns the file of a module of our tests, relative to the repository, `None` for any other module."""
    path = module.replace(".", "/")
    candidates = [f"{path}.py", f"{path}/__init__.py"] if module.startswith("tests.") else []
    return next((candidate for candidate in candidates if (REPOSITORY / candidate).is_file()), None)


@cache
def imported_names(module: str) -> frozenset[str]:
    """Returns the modules that a module of our tests imports or may import, with the packages around them."""
    file = module_file(SUBSTITUTES.get(module, module)) or ""
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in (*names, module)]
    return frozenset(".".join(part[:length]) for part in parts for length in range(1, len(part) + 1))


def imported_by(modules: Sequence[str]) -> set[str]:
    """Returns the modules, and all that they import, by way of our own ones."""
    found, pending = set(), list(modules)
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            if module_file(name) is not None:
                pending.extend(imported_names(name))
    return found


def upstream_tests() -> list[str]:
    """Returns our test modules that make sense there: neither they nor what they import is `FORK_ONLY_TESTS`."""
    folders = [folder for folder in PLACES if folder.startswith("tests/")]
    files = sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("test_*.py"))
    modules = [file.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".") for file in files]
    return [module for module in modules if imported_by([module]).isdisjoint(FORK_ONLY_TESTS)]


def test_files(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the files that test modules need: where each lies here, and where it lies there."""
    for name in sorted(imported_by(modules)):
        file = module_file(name)
        if file is not None and upstream_place(file) not in UPSTREAM_PACKAGES:
            yield module_file(SUBSTITUTES.get(name, name)), upstream_place(file)
        for data in TEST_DATA.get(name, []):
            yield data, upstream_place(data)


def leave_out_section(text: str, title: str) -> str:
    """
    Removes a section from a page, up to the next one of its level.

    Raises:
        `PatchError`: The page doesn't have exactly one such section.
    """
    pattern = rf"^## {re.escape(title)}\n.*?(?=^## |\Z)"
    rest, count = re.subn(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        raise PatchError(f"section {title!r} found {count} times")
    return rest


def our_files(proposal: Proposal, upstream_files: Mapping[str, Path]) -> dict[str, bytes]:
    """
    Collects what a proposal adds.

    Returns:
        `dict[str, bytes]`: Path in upstream's repository -> content.

    Raises:
        `BuildError`: A module would replace a file of upstream's.
        `PatchError`: A declared module, test, page or section isn't there.
    """
    modules = find_overlay(OVERLAY, upstream_files)
    chosen = modules if proposal.modules is None else proposal.modules
    tests = upstream_tests() if proposal.tests is None else proposal.tests
    places = {f"src/transformers/{module}": f"src/transformers/{module}" for module in chosen}
    places |= dict(test_files(tests))
    places |= {page: upstream_place(page) for page in proposal.pages}
    missing = [path for path in places if not (REPOSITORY / path).is_file()]
    missing += [module for module in tests if module_file(module) is None]
    if missing:
        raise PatchError(f"declared, but not there: {', '.join(missing)}")

    contents = {path: (REPOSITORY / path).read_bytes() for path in places}
    for page, sections in proposal.pages.items():
        text = contents[page].decode("utf-8")
        for section in sections:
            text = leave_out_section(text, section)
        contents[page] = text.encode("utf-8")
    return {place: contents[path] for path, place in places.items()}


# Modular files whose classes inherit what an edit changes: upstream's converter takes it from the modular file of the parent
INHERITING = ("models/glm4_moe_lite", "models/hy_v4_vl", "models/youtu")


def edits_for_upstream(edits: Sequence[Edit], upstream_files: Mapping[str, Path]) -> list[Edit]:
    """
    Adds the edits of modular files: upstream generates a `modeling_*.py` from the `modular_*.py` beside it, if there is
    one, and would undo an edit of the former alone.
    """
    twins = []
    for edit in edits:
        path = PurePosixPath(edit.path)
        modular = str(path.with_name(path.name.replace("modeling_", "modular_", 1)))
        inherits = str(path.parent) in INHERITING
        if path.name.startswith("modeling_") and modular in upstream_files and not inherits:
            twins.append(replace(edit, path=modular))
    return [*edits, *twins]


def run_git(*arguments: str, folder: Path) -> str:
    """Runs git in a folder, with none of the user's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def apply_style(repository: Path, paths: Iterable[str]) -> None:
    """Sorts imports and formats files as upstream does. Its own files are in this style, so only edits can change."""
    files = [path for path in paths if path.endswith(".py")]
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", "--config", str(STYLE), *files]
        subprocess.run(arguments, cwd=repository, check=True)


def record_tree(repository: Path, files: Mapping[str, bytes], style: bool = False) -> str:
    """Writes files into a git repository, in upstream's style if so. Returns the tree of all that it holds now."""
    for path, content in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(content)
    if style:
        apply_style(repository, files)
    run_git("add", "--all", folder=repository)
    return run_git("write-tree", folder=repository).strip()


def make_patch(upstream: Distribution, proposal: Proposal) -> tuple[str, str]:
    """
    Makes a patch for the pinned release.

    Args:
        upstream (`Distribution`): The pinned release, installed.
        proposal (`Proposal`): What the patch holds.

    Returns:
        `tuple[str, str]`: The patch and its diffstat.

    Raises:
        `BuildError`: `upstream` is not the pinned release, or one of our modules would replace a file of it.
        `EditError`: An edit doesn't apply to exactly one place, or changes nothing.
        `PatchError`: Our own files don't fit what the proposal declares.
    """
    upstream_files = check_upstream(upstream, read_pin())
    edited = edit_files(upstream_files, edits_for_upstream(proposal.edits, upstream_files))
    added = our_files(proposal, upstream_files)
    before = {f"src/transformers/{path}": upstream_files[path].read_bytes() for path in edited}
    after = {f"src/transformers/{path}": text.encode("utf-8") for path, text in edited.items()}
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name)
        run_git("init", "--quiet", folder=repository)
        trees = [record_tree(repository, before), record_tree(repository, {**after, **added}, style=True)]
        diffstat = run_git("diff", *DIFF_OPTIONS, "--stat=120", *trees, folder=repository)
        diff = run_git("diff", *DIFF_OPTIONS, "--unified=3", "--binary", *trees, folder=repository)
    return f"Subject: [PATCH] {proposal.subject}\n\n{proposal.description.strip()}\n---\n{diffstat}\n{diff}", diffstat


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.patch", description="Writes a patch for upstream.")
    parser.add_argument("--pristine", type=Path, help="upstream's installed package (default: of the running Python)")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    try:
        patch, diffstat = make_patch(find_upstream(arguments.pristine), FULL)
    except (BuildError, EditError, PatchError) as error:
        parser.exit(1, f"error: {error}\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(patch.encode("utf-8"))
    print(f"{diffstat}{arguments.output}")


if __name__ == "__main__":
    main()
