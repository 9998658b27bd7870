# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Builds the tree of the fork: the files of the pinned upstream release, the declared edits applied, our modules added.

Upstream's files come from an installed distribution, whose RECORD is compared with the pin and whose files are compared
with its RECORD. Nothing is imported from it, and nothing is written before everything has been checked.
"""

import argparse
import base64
import csv
import hashlib
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from packaging.version import Version

from .codemod import Edit, EditError, ReplaceStatement, apply_edits
from .edits import EDITS


REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "transformers"
OVERLAY = REPOSITORY / "src" / PACKAGE
PIN_FILE = Path(__file__).with_name("upstream.toml")
NOTICE = (
    "# Changed by the prefill-once fork: edited as declared in its utils/fork/edits.py. Original: transformers {}."
)

# What installers add to a wheel's files, or write anew
WRITTEN_BY_INSTALLERS = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json"}


class BuildError(ValueError):
    """What lies in the build environment, or in our own tree, is not what the fork is built from."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """
    The upstream release that the overlay is made for.

    Args:
        version (`str`): Upstream's version.
        local (`str`): The fork's own part of the version, after the `+`.
        record_sha256 (`str`): Digest of the release's RECORD, see [`record_digest`].
    """

    version: str
    local: str
    record_sha256: str

    @property
    def fork_version(self) -> str:
        return f"{self.version}+{self.local}"


def read_pin() -> Pin:
    """Reads the pin of this repository."""
    return Pin(**tomllib.loads(PIN_FILE.read_text(encoding="utf-8")))


def find_upstream(pristine: Path | None = None) -> Distribution:
    """
    Finds upstream's distribution: in the running Python's environment, or the one that `pristine`, a directory of the
    package `transformers`, was installed with.

    Raises:
        `BuildError`: There is none.
    """
    where = {} if pristine is None else {"path": [str(pristine.parent)]}
    upstream = next(iter(Distribution.discover(name=PACKAGE, **where)), None)
    if upstream is None:
        place = "the build environment" if pristine is None else pristine.parent
        raise BuildError(f"{place} holds no distribution of {PACKAGE}: it must hold {PACKAGE}=={read_pin().version}")
    return upstream


def read_record(upstream: Distribution) -> dict[str, str]:
    """
    Reads the files that the wheel of a distribution brought, with their hashes, from its RECORD.

    Returns:
        `dict[str, str]`: Path relative to the directory of installed packages -> `sha256=...`. The same for pip and uv.
    """
    rows = csv.reader((upstream.read_text("RECORD") or "").splitlines())
    tops = (PACKAGE, f"{PACKAGE}-{upstream.version}.dist-info")
    record = {}
    for path, digest, _ in rows:
        parts = PurePosixPath(path).parts
        installed_anew = "__pycache__" in parts or (parts[0] != PACKAGE and parts[-1] in WRITTEN_BY_INSTALLERS)
        if parts[0] in tops and not installed_anew:
            record[path] = digest
    return record


def record_digest(record: Mapping[str, str]) -> str:
    """SHA-256 over the sorted `path,hash` lines of a RECORD."""
    lines = "".join(f"{path},{digest}\n" for path, digest in sorted(record.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_upstream(upstream: Distribution, pin: Pin) -> dict[str, Path]:
    """
    Checks that a distribution is the pinned release, file by file.

    Returns:
        `dict[str, Path]`: The files of the package: path relative to the package -> where it lies.

    Raises:
        `BuildError`: It is the fork itself or another release, its RECORD isn't the pinned one, or a file differs.
    """
    found, place = Version(upstream.version), upstream.locate_file("")
    if (found.local or "").partition(".")[0] == pin.local.partition(".")[0]:
        raise BuildError(
            f"{place} holds the fork itself ({PACKAGE} {upstream.version}); it is built from {PACKAGE}=={pin.version} "
            "as upstream released it: build with isolation, or uninstall the fork first"
        )
    if upstream.version != pin.version:
        raise BuildError(
            f"{place} holds {PACKAGE} {upstream.version}; the overlay is made for {PACKAGE}=={pin.version}"
        )
    record = read_record(upstream)
    digest = record_digest(record)
    if digest != pin.record_sha256:
        raise BuildError(
            f"the RECORD of {PACKAGE} {pin.version} in {place} has the digest {digest}; the pin in {PIN_FILE.name} "
            f"says {pin.record_sha256}"
        )
    for path, expected in record.items():
        check_file(Path(upstream.locate_file(path)), expected)
    prefix = f"{PACKAGE}/"
    return {path.removeprefix(prefix): Path(upstream.locate_file(path)) for path in record if path.startswith(prefix)}


def check_file(file: Path, expected: str) -> None:
    """
    Compares a file with its hash in RECORD (`sha256=` and URL-safe base64 without padding).

    Raises:
        `BuildError`: The file is missing or differs.
    """
    if not file.is_file():
        raise BuildError(f"{file} is missing, though RECORD lists it")
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    if expected != f"sha256={digest}":
        raise BuildError(f"{file} has been changed: its hash is sha256={digest}, RECORD says {expected}")


def find_overlay(overlay: Path, upstream_files: Mapping[str, Path]) -> dict[str, Path]:
    """
    Lists our modules: path relative to the package -> where the file lies.

    Raises:
        `BuildError`: One of them would replace a file of upstream's.
    """
    modules = {
        file.relative_to(overlay).as_posix(): file
        for file in sorted(overlay.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    replaced = sorted(modules.keys() & upstream_files.keys())
    if replaced:
        raise BuildError(f"the overlay may only add files, but upstream has these too: {', '.join(replaced)}")
    return modules


def mark_edits(pin: Pin) -> list[Edit]:
    """The edits that tell the fork's package from upstream's. They are no part of a change that upstream could take."""
    return [
        ReplaceStatement(
            path="__init__.py",
            old=f'__version__ = "{pin.version}"',
            new=f'__version__ = "{pin.fork_version}"',
            reason="a report of a problem must show that it comes from the fork",
        ),
        ReplaceStatement(
            path="cli/transformers.py",
            scope="main",
            old='check_cli_update("transformers")',
            new="pass  # a release of upstream's is no update of the fork",
            reason="the check takes any other version for a newer one and advises to install it",
        ),
    ]


def edit_files(upstream_files: Mapping[str, Path], edits: Sequence[Edit]) -> dict[str, str]:
    """
    Applies edits to upstream's files.

    Returns:
        `dict[str, str]`: Path relative to the package -> the whole new text of the file.

    Raises:
        `EditError`: An edit doesn't apply, or upstream has no file of that name.
    """
    by_path = defaultdict(list)
    for edit in edits:
        if edit.path not in upstream_files:
            raise EditError(f"{edit}: upstream has no such file")
        by_path[edit.path].append(edit)
    # Decoded here, since reading as text would change line ends
    return {
        path: apply_edits(upstream_files[path].read_bytes().decode("utf-8"), of_file)
        for path, of_file in by_path.items()
    }


def add_notice(source: str, pin: Pin) -> str:
    """Says on the file's first line, or after a `#!` line, that it was changed (Apache License 2.0, section 4b)."""
    shebang, rest = source.split("\n", 1) if source.startswith("#!") else ("", source)
    return f"{shebang}\n{NOTICE.format(pin.version)}\n{rest}".removeprefix("\n")


def build_tree(
    upstream: Distribution,
    output: Path,
    *,
    link: bool = False,
    marks: bool = True,
    pin: Pin | None = None,
    edits: Sequence[Edit] = EDITS,
    overlay: Path = OVERLAY,
) -> Path:
    """
    Builds the fork's package, in place of one that is there.

    Args:
        upstream (`Distribution`): The pinned release, installed.
        output (`Path`): The directory that gets the package `transformers`.
        link (`bool`, *optional*, defaults to `False`): Whether our modules are links, so that changes of them are live.
        marks (`bool`, *optional*, defaults to `True`): Whether edited files say so and `__version__` is the fork's.
        pin (`Pin`, *optional*): The release to expect, by default that of this repository.
        edits (`Sequence[Edit]`, *optional*): What to change in upstream's files, by default all declared edits.
        overlay (`Path`, *optional*): The directory of our modules, by default that of this repository.

    Returns:
        `Path`: The package.

    Raises:
        `BuildError`: `upstream` is not the pinned release, or the overlay would replace a file of it.
        `EditError`: An edit doesn't apply to exactly one place, or changes nothing.
    """
    pin = pin or read_pin()
    upstream_files = check_upstream(upstream, pin)
    modules = find_overlay(overlay, upstream_files)
    edited = edit_files(upstream_files, [*edits, *mark_edits(pin)] if marks else edits)
    package = output / PACKAGE
    for source in (Path(upstream.locate_file(PACKAGE)), overlay):
        if package.resolve() == source.resolve():
            raise BuildError(f"{package} is what the fork is built from; it can't be replaced by the result")

    shutil.rmtree(package, ignore_errors=True)
    for path, file in upstream_files.items():
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in edited:
            text = add_notice(edited[path], pin) if marks else edited[path]
            target.write_bytes(text.encode("utf-8"))
        else:
            shutil.copyfile(file, target)
    for path, file in modules.items():
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file) if link else shutil.copyfile(file, target)
    return package


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.build", description="Builds the tree of the fork.")
    parser.add_argument("--output", type=Path, required=True, help="directory that gets the package `transformers`")
    parser.add_argument("--pristine", type=Path, help="upstream's installed package (default: of the running Python)")
    parser.add_argument("--link", action="store_true", help="link our modules, so that changes of them are live")
    parser.add_argument("--no-marks", action="store_true", help="no notices in edited files, upstream's version")
    arguments = parser.parse_args()
    try:
        upstream = find_upstream(arguments.pristine)
        print(build_tree(upstream, arguments.output, link=arguments.link, marks=not arguments.no_marks))
    except (BuildError, EditError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
