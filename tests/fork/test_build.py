# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Building the tree: what comes out, on a small distribution and on the pinned release, and what is refused."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from utils.fork.build import (
    NOTICE,
    PACKAGE,
    REPOSITORY,
    BuildError,
    Pin,
    build_tree,
    check_upstream,
    find_overlay,
    find_upstream,
    mark_edits,
    read_pin,
    read_record,
    record_digest,
)
from utils.fork.codemod import EditError, ReplaceStatement
from utils.fork.edits import EDITS


CLI = b'def main():\n    check_cli_update("transformers")\n    app()\n'
FILES = {
    "__init__.py": b'"""A package."""\n__version__ = "9.8.0"\n',
    "cli/transformers.py": CLI,
    "generation/utils.py": b"#!/usr/bin/env python\nX = 1\r\ndef f():\n    return 1\n",
    "py.typed": b"",
    "data/table.bin": b"\x00\xff\r\n",
}
EDIT = ReplaceStatement(path="generation/utils.py", scope="f", old="return 1", new="return 2", reason="a test")


@dataclass
class Workplace:
    """A small release of upstream's, installed, an overlay for it, and the place of the result."""

    site_packages: Path
    overlay: Path
    output: Path
    pin: Pin

    @property
    def upstream(self) -> Distribution:
        return find_upstream(self.site_packages / PACKAGE)

    def build(self, **arguments) -> Path:
        arguments = {"edits": [EDIT], "pin": self.pin, "overlay": self.overlay, **arguments}
        return build_tree(self.upstream, self.output, **arguments)

    def refuses(self, message: str, error: type[Exception] = BuildError, **arguments) -> None:
        """The build fails with a message, and has written nothing."""
        with pytest.raises(error, match=re.escape(message)):
            self.build(**arguments)
        assert not self.output.exists()


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def install(site_packages: Path, version: str, files: dict[str, bytes]) -> Path:
    """Lays down a release as an installer would. Returns its RECORD."""
    info = f"{PACKAGE}-{version}.dist-info"
    contents = {f"{PACKAGE}/{path}": content for path, content in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n".encode()
    for path, content in contents.items():
        (site_packages / path).parent.mkdir(parents=True, exist_ok=True)
        (site_packages / path).write_bytes(content)
    record = site_packages / info / "RECORD"
    record.write_text("".join(record_line(*item) for item in contents.items()) + f"{info}/RECORD,,\n")
    return record


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    site_packages, overlay = tmp_path / "site-packages", tmp_path / "src"
    install(site_packages, "9.8.0", FILES)
    (overlay / "generation").mkdir(parents=True)
    (overlay / "generation" / "prefill.py").write_text("ROWS = 1\n")
    digest = record_digest(read_record(find_upstream(site_packages / PACKAGE)))
    pin = Pin(version="9.8.0", local="prefill.7", record_sha256=digest)
    return Workplace(site_packages, overlay, tmp_path / "output", pin)


class TestTree:
    def test_holds_upstream_the_edits_and_the_overlay(self, workplace):
        package = workplace.build()
        assert package == workplace.output / PACKAGE
        notice = NOTICE.format("9.8.0").encode() + b"\n"
        assert {file.relative_to(package).as_posix(): file.read_bytes() for file in package.rglob("*.*")} == {
            "__init__.py": notice + b'"""A package."""\n__version__ = "9.8.0+prefill.7"\n',
            "cli/transformers.py": notice
            + CLI.replace(
                b'check_cli_update("transformers")', b"pass  # a release of upstream's is no update of the fork"
            ),
            "generation/utils.py": b"#!/usr/bin/env python\n" + notice + b"X = 1\r\ndef f():\n    return 2\n",
            "generation/prefill.py": b"ROWS = 1\n",
            "py.typed": b"",
            "data/table.bin": b"\x00\xff\r\n",
        }

    def test_without_marks_differs_by_the_edits_only(self, workplace):
        package = workplace.build(marks=False)
        changed = [path for path, content in FILES.items() if (package / path).read_bytes() != content]
        assert changed == ["generation/utils.py"]
        assert (package / "generation/utils.py").read_bytes() == FILES["generation/utils.py"].replace(
            b"return 1", b"return 2"
        )

    def test_copies_or_links_our_modules(self, workplace):
        ours = workplace.overlay / "generation" / "prefill.py"
        copied = workplace.build() / "generation" / "prefill.py"
        ours.write_text("ROWS = 2\n")
        assert copied.read_text() == "ROWS = 1\n"
        linked = workplace.build(link=True) / "generation" / "prefill.py"
        ours.write_text("ROWS = 3\n")
        assert linked.read_text() == "ROWS = 3\n"

    def test_holds_nothing_else(self, workplace):
        stale = workplace.output / PACKAGE / "stale.py"
        stale.parent.mkdir(parents=True)
        stale.write_text("")
        (workplace.site_packages / PACKAGE / "unrecorded.py").write_text("")
        pycache = workplace.overlay / "__pycache__"
        pycache.mkdir()
        (pycache / "prefill.cpython-311.pyc").write_bytes(b"")
        package = workplace.build()
        assert not (package / "stale.py").exists()
        assert not (package / "unrecorded.py").exists()
        assert not (package / "__pycache__").exists()

    def test_an_earlier_result_stays_when_a_build_fails(self, workplace):
        package = workplace.build()
        with pytest.raises(EditError):
            workplace.build(edits=[EDIT, EDIT])
        assert b"return 2" in (package / "generation/utils.py").read_bytes()


class TestRefusals:
    def test_nothing_installed(self, tmp_path):
        with pytest.raises(BuildError, match="holds no distribution of transformers"):
            find_upstream(tmp_path / PACKAGE)

    def test_another_release(self, workplace):
        pin = Pin(version="9.7.0", local="prefill.7", record_sha256=workplace.pin.record_sha256)
        workplace.refuses("holds transformers 9.8.0; the overlay is made for transformers==9.7.0", pin=pin)

    def test_the_fork_itself(self, tmp_path, workplace):
        workplace.site_packages = tmp_path / "fork"
        install(workplace.site_packages, "9.8.0+prefill.1", FILES)
        workplace.refuses("holds the fork itself (transformers 9.8.0+prefill.1)")

    def test_another_record(self, workplace):
        pin = Pin(version="9.8.0", local="prefill.7", record_sha256="0" * 64)
        workplace.refuses(
            f"has the digest {workplace.pin.record_sha256}; the pin in upstream.toml says {'0' * 64}", pin=pin
        )

    def test_no_record(self, workplace):
        (workplace.site_packages / "transformers-9.8.0.dist-info" / "RECORD").unlink()
        workplace.refuses("the RECORD of transformers 9.8.0")

    def test_a_tampered_file(self, workplace):
        (workplace.site_packages / PACKAGE / "data" / "table.bin").write_bytes(b"\x00\xfe\r\n")
        workplace.refuses("data/table.bin has been changed")

    def test_a_missing_file(self, workplace):
        (workplace.site_packages / PACKAGE / "py.typed").unlink()
        workplace.refuses("py.typed is missing, though RECORD lists it")

    def test_an_anchor_found_zero_times(self, workplace):
        edit = ReplaceStatement(path="generation/utils.py", scope="f", old="return 5", new="return 2", reason="a test")
        message = "ReplaceStatement(generation/utils.py:f): statement `return 5` found 0 times"
        workplace.refuses(message, EditError, edits=[edit])

    def test_an_anchor_found_two_times(self, tmp_path, workplace):
        workplace.site_packages = tmp_path / "twice"
        source = b"def f(x):\n    if x:\n        return 1\n    return 1\n"
        install(workplace.site_packages, "9.8.0", {**FILES, "generation/utils.py": source})
        digest = record_digest(read_record(workplace.upstream))
        pin = Pin(version="9.8.0", local="prefill.7", record_sha256=digest)
        message = "ReplaceStatement(generation/utils.py:f): statement `return 1` found 2 times"
        workplace.refuses(message, EditError, pin=pin)

    def test_an_edit_that_changes_nothing(self, workplace):
        edit = ReplaceStatement(path="generation/utils.py", scope="f", old="return 1", new="return 1", reason="a test")
        workplace.refuses("ReplaceStatement(generation/utils.py:f): changes nothing", EditError, edits=[edit])

    def test_an_edit_of_a_file_that_is_not_there(self, workplace):
        edit = ReplaceStatement(path="generation/no.py", old="x = 1", new="x = 2", reason="a test")
        workplace.refuses("ReplaceStatement(generation/no.py): upstream has no such file", EditError, edits=[edit])

    def test_a_module_of_ours_in_place_of_upstreams(self, workplace):
        (workplace.overlay / "generation" / "utils.py").write_text("")
        workplace.refuses("the overlay may only add files, but upstream has these too: generation/utils.py")

    @pytest.mark.parametrize("which", ["upstream", "overlay"])
    def test_to_replace_what_it_is_built_from(self, workplace, which):
        if which == "overlay":
            workplace.overlay = workplace.overlay.rename(workplace.overlay.with_name(PACKAGE))
        source = workplace.site_packages / PACKAGE if which == "upstream" else workplace.overlay
        workplace.output = source.parent
        with pytest.raises(BuildError, match="it can't be replaced by the result"):
            workplace.build()
        assert (source / "generation").is_dir()


class TestRecord:
    def test_digest_does_not_depend_on_the_installer(self, workplace):
        record = workplace.site_packages / "transformers-9.8.0.dist-info" / "RECORD"
        lines = record.read_text().splitlines(keepends=True)
        info = "transformers-9.8.0.dist-info"
        by_pip = [
            *lines,
            record_line("../../../bin/transformers", b"#!python"),
            record_line(f"{info}/INSTALLER", b"pip\n"),
            record_line(f"{info}/REQUESTED", b""),
            record_line(f"{info}/direct_url.json", b"{}"),
            f"{PACKAGE}/__pycache__/__init__.cpython-311.pyc,,\n",
        ]
        by_uv = [
            *reversed(lines),
            record_line(f"{info}/INSTALLER", b"uv"),
            record_line(f"{info}/uv_cache.json", b"{}"),
        ]
        for written in (by_pip, by_uv):
            record.write_text("".join(written))
            assert record_digest(read_record(workplace.upstream)) == workplace.pin.record_sha256

    def test_digest_depends_on_each_file(self, workplace):
        record = read_record(workplace.upstream)
        assert f"{PACKAGE}/py.typed" in record
        assert "transformers-9.8.0.dist-info/METADATA" in record
        for path in record:
            without = {other: digest for other, digest in record.items() if other != path}
            assert record_digest(without) != workplace.pin.record_sha256
            assert record_digest({**record, path: "sha256=other"}) != workplace.pin.record_sha256


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "utils.fork.build", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


class TestCommandLine:
    def test_refuses_in_one_line(self, workplace):
        result = run_module("--pristine", str(workplace.site_packages / PACKAGE), "--output", str(workplace.output))
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: ")
        assert "holds transformers 9.8.0; the overlay is made for" in result.stderr

    def test_builds(self, upstream, tmp_path):
        pristine = Path(upstream.locate_file(PACKAGE))
        result = run_module("--pristine", str(pristine), "--output", str(tmp_path), "--link", "--no-marks")
        assert result.stdout == f"{tmp_path / PACKAGE}\n", result.stderr
        assert (tmp_path / PACKAGE / "generation" / "prefill.py").is_symlink()
        assert (tmp_path / PACKAGE / "__init__.py").read_bytes() == (pristine / "__init__.py").read_bytes()


class TestPinnedRelease:
    def test_is_the_one_that_is_required_for_a_build(self, upstream):
        pin = read_pin()
        assert upstream.version == pin.version
        requirement = f'"{PACKAGE}=={pin.version}"'
        assert (REPOSITORY / "pyproject.toml").read_text().count(requirement) == 1

    def test_files_are_upstreams_but_for_edits_and_overlay(self, upstream, tree):
        upstream_files = check_upstream(upstream, read_pin())
        ours = find_overlay(REPOSITORY / "src" / PACKAGE, upstream_files)
        built = {
            Path(folder, name).relative_to(tree).as_posix() for folder, _, names in os.walk(tree) for name in names
        }
        assert built == upstream_files.keys() | ours.keys()
        edited = {edit.path for edit in [*EDITS, *mark_edits(read_pin())]}
        differing = {path for path, file in upstream_files.items() if (tree / path).read_bytes() != file.read_bytes()}
        assert differing == edited

    def test_edited_files_say_so(self, tree):
        notice = NOTICE.format(read_pin().version)
        for path in sorted({edit.path for edit in EDITS}):
            assert (tree / path).read_text(encoding="utf-8").splitlines()[:2].count(notice) == 1, path

    def test_our_files_carry_no_notice_of_a_change(self, tree):
        assert NOTICE.format(read_pin().version) not in (tree / "generation" / "prefill.py").read_text()

    def test_imports_as_the_fork(self, tree):
        code = "import transformers; print(transformers.__version__, transformers.__file__)"
        environment = {**os.environ, "PYTHONPATH": str(tree.parent)}
        output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert output.split() == [read_pin().fork_version, str(tree / "__init__.py")]
