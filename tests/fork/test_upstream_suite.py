# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The run of upstream's own tests, on a checkout of a few lines in place of upstream's."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generation.oracle import oracle_path
from utils.fork.build import PACKAGE, REPOSITORY, read_pin
from utils.upstream_suite import find_checkout, find_tests


VERSION, FORK_VERSION = read_pin().version, read_pin().fork_version

LLAMA = "tests/models/llama/test_modeling_llama.py"

GENERATION = """
import random, unittest
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(find_spec("transformers").origin)
FORK = "+prefill" in PACKAGE.read_text()

class GenerationTest(unittest.TestCase):
    def test_both(self):
        with Path("runs").open("a") as file:
            file.write("x")

    def test_pristine(self):
        self.assertFalse(FORK, "this is the fork")

    def test_fork(self):
        self.assertTrue(FORK)

    def test_compiled(self):
        raise AssertionError

    @unittest.skip("always")
    def test_skipped(self):
        pass

    def test_random(self):
        with Path("random").open("a") as file:
            file.write(str(random.random()))

    def test_source(self):
        self.assertTrue(Path("src/transformers/__init__.py").samefile(PACKAGE))
"""
SHORT = """
FORK = False

def test_both():
    pass
"""
MODEL = """
import os
import pytest
from ...generation.test_utils import FORK

def test_generate():
    pass

@pytest.mark.generate
def test_marked():
    with pytest.raises(ZeroDivisionError):
        1 / 0

def test_forward():
    raise AssertionError

def test_cache_crash():
    if FORK:
        os._exit(7)
"""


def write_checkout(path: Path) -> Path:
    """Writes a checkout with tests of generation, of a model, and of one that can't be imported."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['generate']\n",
        "src/transformers/__init__.py": f'__version__ = "{VERSION}"\nraise ImportError("not to be imported")\n',
        "tests/__init__.py": "",
        "tests/generation/__init__.py": "",
        "tests/generation/test_utils.py": GENERATION,
        "tests/models/__init__.py": "",
        "tests/models/gpt2/__init__.py": "",
        "tests/models/gpt2/test_modeling_gpt2.py": MODEL,
        "tests/models/llama/test_modeling_llama.py": "import no_such_module\n",
        "tests/models/clip/test_image_processing_clip.py": "",
    }
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def run(upstream: Path | str, output: Path, *options: str) -> subprocess.CompletedProcess:
    """Runs the command. What it prints comes without repeated spaces and without times."""
    command = [sys.executable, "-m", "utils.upstream_suite", str(upstream), "--output", str(output), *options]
    result = subprocess.run(
        [*command, "--oracle", str(oracle_path())],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    result.stdout = re.sub(r" \d+\.\d s ", " ", re.sub(r" +", " ", result.stdout))
    return result


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return write_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def result(checkout, output) -> subprocess.CompletedProcess:
    return run(checkout, output, "--models", "gpt2", "--jobs", "2")


class TestRun:
    @pytest.fixture
    def copy(self, result, output, tmp_path) -> Path:
        """A copy of what the run left, to go on from."""
        return shutil.copytree(output, tmp_path / "output", symlinks=True)

    def test_counts_what_passes_on_each_side(self, result):
        assert f"\npristine 7 passed 1 failed 1 skipped {PACKAGE} {VERSION}\n" in result.stdout, result.stdout
        assert f"\nfork 6 passed 2 failed 1 skipped {PACKAGE} {FORK_VERSION}\n" in result.stdout, result.stdout

    def test_tells_what_passes_on_one_side_only(self, result, output):
        tests = "tests/generation/test_utils.py::GenerationTest"
        (log,) = set(re.findall(r"\(too slow or crashed\): (.*)", result.stdout))
        assert Path(log).parent == output / "logs"
        assert result.stdout.endswith(
            "\nPassing on pristine only: 2\n"
            f" {tests}::test_pristine\n failed on fork: AssertionError: True is not false : this is the fork\n"
            " tests/models/gpt2/test_modeling_gpt2.py::test_cache_crash\n"
            f" failed on fork: the process ended with status 7 (too slow or crashed): {log}\n"
            "Passing on the fork only: 1\n"
            f" {tests}::test_fork\n failed on pristine: AssertionError: False is not true\n"
        ), result.stdout
        assert result.returncode == 1

    def test_prints_each_file(self, result):
        lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
        assert sorted(line.split("] ")[1] for line in lines) == [
            "fork 2 passed 1 failed 0 skipped tests/models/gpt2/test_modeling_gpt2.py",
            "fork 4 passed 1 failed 1 skipped tests/generation/test_utils.py",
            "pristine 3 passed 0 failed 0 skipped tests/models/gpt2/test_modeling_gpt2.py",
            "pristine 4 passed 1 failed 1 skipped tests/generation/test_utils.py",
        ]
        assert [line.split("]")[0].strip("[ ") for line in lines] == ["1/4", "2/4", "3/4", "4/4"]

    def test_random_numbers_are_the_same(self, result, output):
        one, other = [(output / side / "random").read_text() for side in ("pristine", "fork")]
        assert one == other

    def test_leaves_the_checkout_alone(self, result, checkout):
        assert not {"runs", "random", "__pycache__"} & {file.name for file in checkout.rglob("*")}

    def test_does_not_run_again_what_has_a_result(self, result, copy, checkout):
        again = run(checkout, copy, "--models", "gpt2,llama")
        lines = [line.split("] ")[1] for line in again.stdout.splitlines() if line.startswith("[")]
        assert lines == [f"{side} 0 passed 1 failed 0 skipped {LLAMA}" for side in ("pristine", "fork")], again.stdout
        assert "\npristine 7 passed 2 failed 1 skipped" in again.stdout
        assert "\nfork 6 passed 3 failed 1 skipped" in again.stdout
        assert not (copy / "pristine" / "runs").exists()

    def test_goes_on_after_an_interruption(self, result, copy, checkout):
        record = copy / "pristine.jsonl"
        lines = record.read_text().splitlines(keepends=True)
        (start,) = [number for number, line in enumerate(lines) if '"start"' in line and "test_pristine" in line]
        kept = [line for line in lines[: start + 1] if "gpt2" not in line]
        record.write_text("".join(kept))
        again = run(checkout, copy, "--models", "gpt2")
        assert again.stdout.splitlines()[-10:] == result.stdout.splitlines()[-10:]
        assert not (copy / "pristine" / "runs").exists()  # of the test before
        assert (copy / "pristine" / "random").exists()  # of one after
        assert not (copy / "fork" / "random").exists()

    def test_starts_anew_with_other_tests(self, result, copy, tmp_path):
        changed = write_checkout(tmp_path / "changed")
        (changed / "src/transformers/__init__.py").write_text('__version__ = "1.2.3"\n')
        (changed / "tests/generation/test_utils.py").write_text(SHORT)
        again = run(changed, copy, "--models", "gpt2")
        assert f"warning: the tests are of {PACKAGE} 1.2.3, not of {VERSION}" in again.stdout, again.stdout
        assert "pristine: the record of another package or other tests is thrown away" in again.stdout
        assert "\npristine 4 passed 0 failed 0 skipped" in again.stdout
        assert again.stdout.endswith("\nPassing on pristine only: 0\nPassing on the fork only: 0\n")
        assert again.returncode == 0

    def test_nothing_passing_is_no_success(self, tmp_path):
        checkout = write_checkout(tmp_path / "checkout")
        (checkout / "tests/generation/test_utils.py").write_text("def test_both():\n    raise AssertionError\n")
        result = run(checkout, tmp_path / "output", "--models", "llama")
        assert result.returncode == 1
        assert "no test passes on pristine, so nothing has been compared" in result.stdout

    def test_another_package_is_an_error(self, tmp_path):
        checkout = write_checkout(tmp_path / "checkout")
        other = tmp_path / "other" / PACKAGE
        change = (
            f"import sys, types\nsys.modules['{PACKAGE}'] = types.SimpleNamespace(__file__='{other}/__init__.py')\n"
        )
        (checkout / "tests/generation/test_utils.py").write_text(change + SHORT)
        result = run(checkout, tmp_path / "output", "--models", "llama")
        assert result.returncode == 1
        package = oracle_path().resolve() / PACKAGE
        assert f"the tests of the pristine side must use {package}, but used {other}\n" in result.stdout


class TestArguments:
    def test_a_path_without_tests(self, tmp_path):
        result = run(tmp_path, tmp_path / "output")
        assert result.returncode == 2
        message = f"`upstream` must be a checkout of {PACKAGE} with tests/generation in it, but is '{tmp_path}'"
        assert message in result.stdout
        assert not (tmp_path / "output").exists()

    def test_a_model_without_tests(self, tmp_path):
        message = "`models` must be directories of tests/models with model tests, but one is 'clip'"
        with pytest.raises(ValueError, match=message):
            find_tests(write_checkout(tmp_path), ["gpt2", "clip"])

    def test_a_url_without_a_tag(self, tmp_path):
        message = "must name a tag or branch after its URL, as in URL@v5.24.0, but is 'https://example.com/upstream'"
        with pytest.raises(ValueError, match=message):
            find_checkout("https://example.com/upstream", tmp_path)

    def test_a_side_that_is_no_such_release(self, tmp_path):
        checkout = write_checkout(tmp_path / "checkout")
        command = [sys.executable, "-m", "utils.upstream_suite", str(checkout), "--oracle", str(checkout / "src")]
        (checkout / "src/transformers/__init__.py").write_text('__version__ = "1.2.3"\n')
        result = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
        assert result.returncode == 2
        assert (
            f"the pristine side must be {PACKAGE} {VERSION}, but {checkout / 'src' / PACKAGE} is 1.2.3"
            in result.stderr
        )

    def test_clones_a_tag(self, tmp_path):
        source = write_checkout(tmp_path / "source")
        git = ["git", "-C", str(source), "-c", "user.name=test", "-c", "user.email=test@example.com"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "tests"], ["tag", "v1"]):
            subprocess.run([*git, *command], check=True)
        (source / "tests/generation/test_utils.py").unlink()
        for _ in range(2):
            checkout = find_checkout(f"file://{source}@v1", tmp_path / "clones")
            assert checkout == tmp_path / "clones" / "v1"
            assert find_tests(checkout, ["gpt2"]) == [
                "tests/generation/test_utils.py",
                "tests/models/gpt2/test_modeling_gpt2.py",
            ]
