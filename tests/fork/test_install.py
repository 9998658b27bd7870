# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The package as pip and uv build and install it, in an environment of its own. These tests need the package index."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.generation.oracle import oracle_path
from utils.fork.build import PACKAGE, REPOSITORY, check_upstream, find_overlay, find_upstream, read_pin

from .test_sources import repository_files


pytestmark = pytest.mark.slow

FORK_VERSION = read_pin().fork_version
INFO = f"{PACKAGE}-{FORK_VERSION}.dist-info"
WHEEL_NAME = f"{PACKAGE}-{FORK_VERSION}-py3-none-any.whl"


def run(*command: str | Path, **arguments) -> str:
    """Runs a command and returns what it prints. Its environment has no path of Python's in it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_COMPILE"] = "0"  # most of the time of an installation
    environment.update(arguments.pop("env", {}))
    result = subprocess.run(
        [str(part) for part in command], env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT, **arguments
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}"
    return result.stdout


def build(checkout: Path, kind: str, target: Path) -> Path:
    """Calls the build backend without isolation, upstream's files being at hand. `kind` is `sdist` or `wheel`."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run(sys.executable, "-c", code, cwd=checkout, env={"PYTHONPATH": str(oracle_path())})
    (result,) = target.iterdir()
    return result


def add_edit(checkout: Path, old: str, new: str) -> None:
    """Declares one more edit in a copy of the repository."""
    with (checkout / "utils" / "fork" / "edits.py").open("a") as file:
        file.write("\nfrom . import codemod\n")
        edit = f"codemod.ReplaceExpression(path='cli/transformers.py', old={old!r}, new={new!r}, reason='a test')"
        file.write(f"EDITS.append({edit})\n")


class Environment:
    """A virtual environment, to be filled by the pip that runs the tests."""

    def __init__(self, path: Path):
        venv.create(path)
        self.path, self.python = path, path / "bin" / "python"

    def pip(self, *arguments: str | Path) -> str:
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def evaluate(self, expression: str) -> str:
        """The value of an expression in which `transformers` is imported, from a directory without one."""
        code = f"import importlib.metadata, {PACKAGE}; print({expression})"
        return run(self.python, "-c", code, cwd=self.path).splitlines()[-1]  # after what transformers warns of

    @property
    def site_packages(self) -> Path:
        (path,) = self.path.glob("lib/python*/site-packages")
        return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, without what git ignores."""
    checkout = tmp_path_factory.mktemp("checkout")
    for path in repository_files():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, checkout / path)
    return checkout


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the source distribution, in isolation."""
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", target, sdist)
    return target / WHEEL_NAME


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment into which the wheel was installed with its requirements."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.pip("install", wheel)
    return environment


def read_record(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        rows = csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines())
        return {path: digest for path, digest, _ in rows}


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"{INFO}/METADATA"))


def test_sdist_holds_our_files_only(sdist):
    root = f"{PACKAGE}-{FORK_VERSION}/"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(root) for member in archive.getmembers() if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg", f"build/{PACKAGE}.egg-info/SOURCES.txt"}
    assert names - generated <= set(repository_files())
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "setup.py"} < names
    needed = {path for path in repository_files() if path.startswith(("src/", "utils/fork/"))}
    assert needed < names


class TestWheel:
    def test_holds_all_files_of_upstream_and_ours(self, wheel, upstream):
        upstream_files = check_upstream(upstream, read_pin())
        ours = find_overlay(REPOSITORY / "src" / PACKAGE, upstream_files)
        assert any(not path.endswith(".py") for path in upstream_files)  # package data
        of_package = {path for path in read_record(wheel) if path.startswith(f"{PACKAGE}/")}
        assert of_package == {f"{PACKAGE}/{path}" for path in [*upstream_files, *ours]}

    def test_holds_all_licences(self, wheel, upstream):
        licences = {path.removeprefix(f"{INFO}/licenses/") for path in read_record(wheel) if "/licenses/" in path}
        assert licences == {"LICENSE", "NOTICE", "upstream/LICENSE"}
        assert set(read_metadata(wheel).get_all("License-File")) == licences
        theirs = Path(upstream.locate_file(f"{PACKAGE}-{upstream.version}.dist-info/licenses/LICENSE"))
        with zipfile.ZipFile(wheel) as archive:
            assert archive.read(f"{INFO}/licenses/upstream/LICENSE") == theirs.read_bytes()
            assert archive.read(f"{INFO}/licenses/NOTICE") == (REPOSITORY / "NOTICE").read_bytes()

    @pytest.mark.parametrize(
        "field",
        ["Classifier", "Keywords", "License", "Name", "Provides-Extra", "Requires-Dist", "Requires-Python"],
    )
    def test_takes_over_metadata(self, wheel, upstream, field):
        expected = upstream.metadata.get_all(field)
        assert expected
        assert read_metadata(wheel).get_all(field) == expected

    def test_takes_over_console_scripts(self, wheel, upstream):
        with zipfile.ZipFile(wheel) as archive:
            entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
        assert entry_points.split() == upstream.read_text("entry_points.txt").split()

    def test_does_not_depend_on_what_earlier_builds_left(self, wheel, checkout, tmp_path):
        for folder in ("build/lib/transformers", "build/lib/other", "build/editable/transformers"):
            (checkout / folder).mkdir(parents=True, exist_ok=True)
            (checkout / folder / "stale.py").write_text("")
        again = build(checkout, "wheel", tmp_path)
        assert again.name == WHEEL_NAME
        first, second = read_record(wheel), read_record(again)
        assert second == first


class TestEnvironment:
    """In order: each test may replace what the ones before have installed."""

    def test_is_complete(self, environment):
        assert environment.evaluate(f"{PACKAGE}.__version__") == FORK_VERSION
        assert environment.evaluate(f"importlib.metadata.version('{PACKAGE}')") == FORK_VERSION
        assert environment.evaluate(f"{PACKAGE}.__file__").startswith(str(environment.site_packages))
        assert environment.pip("check").strip() == "No broken requirements found."

    def test_command_runs_and_does_not_offer_upstream_as_an_update(self, environment, tmp_path):
        output = run(environment.path / "bin" / "transformers", "env", env={"HF_HOME": str(tmp_path)})
        assert f"- `transformers` version: {FORK_VERSION}" in output
        assert "is available!" not in output

    def test_satisfies_packages_that_require_transformers(self, environment, tmp_path):
        report = tmp_path / "report.json"
        torch = next(line for line in (REPOSITORY / "requirements-dev.txt").read_text().split() if "torch==" in line)
        environment.pip("install", "--dry-run", "--report", report, "peft", torch, f"{PACKAGE}>=5")
        planned = {item["metadata"]["name"].lower(): item for item in json.loads(report.read_text())["install"]}
        assert "peft" in planned
        assert any(line.startswith(PACKAGE) for line in planned["peft"]["metadata"]["requires_dist"])
        assert PACKAGE not in planned

    def test_editable_install_is_live(self, environment, checkout):
        module = checkout / "src" / PACKAGE / "live_module.py"
        module.write_text("VALUE = 'before'\n")
        environment.pip("install", "--no-deps", "--editable", checkout)
        tree = checkout / "build" / "editable" / PACKAGE
        assert environment.evaluate(f"{PACKAGE}.__file__") == str(tree / "__init__.py")
        assert environment.evaluate(f"importlib.metadata.version('{PACKAGE}')") == FORK_VERSION
        value = f"importlib.import_module('{PACKAGE}.live_module').VALUE"
        assert environment.evaluate(value) == "before"
        module.write_text("VALUE = 'after a change'\n")
        assert environment.evaluate(value) == "after a change"

    def test_a_changed_edit_needs_one_command(self, environment, checkout):
        command = environment.path / "bin" / "transformers"
        assert "Edited help" not in run(command, "--help")
        add_edit(checkout, old='"Transformers CLI"', new='"Edited help"')
        oracle = oracle_path()
        done = [".venv/.dev", oracle / f".transformers-{read_pin().version}"]  # those parts of the target take minutes
        old = [argument for file in done for argument in ("--old-file", file)]
        run("make", *old, "develop", f"PY={sys.executable}", f"ORACLE={oracle}", cwd=checkout)
        assert "Edited help" in run(command, "--help")

    def test_a_broken_edit_stops_an_editable_build(self, checkout, tmp_path):
        # setuptools goes on when it can't build the modules of an editable install
        add_edit(checkout, old='"no such text"', new="1")
        with pytest.raises(AssertionError, match='expression `"no such text"` found 0 times'):
            build(checkout, "editable", tmp_path)

    def test_uv_installs_it_too(self, environment, sdist):
        environment.pip("uninstall", "--yes", PACKAGE)
        run(sys.executable, "-m", "uv", "pip", "install", "--python", environment.python, "--no-deps", sdist)
        assert environment.evaluate(f"importlib.metadata.version('{PACKAGE}')") == FORK_VERSION
        assert environment.evaluate(f"{PACKAGE}.__file__").startswith(str(environment.site_packages))

    def test_upstream_comes_back(self, environment):
        environment.pip("uninstall", "--yes", PACKAGE)
        assert not (environment.site_packages / PACKAGE).exists()
        environment.pip("install", "--no-deps", f"{PACKAGE}=={read_pin().version}")
        check_upstream(find_upstream(environment.site_packages / PACKAGE), read_pin())
        assert not (environment.site_packages / PACKAGE / "generation" / "prefill.py").exists()
