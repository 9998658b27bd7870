# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Runs upstream's own tests of generation, caches and models, once against pristine upstream and once against the fork, and
tells which of them pass on one side only. See docs/fork.md.

The two sides are never in one process. Both use the running interpreter with its packages; what is tested is the
package `transformers` that comes first on the path, here the oracle of our tests, there the installed fork, and nothing
else differs between them. The tests themselves run from a copy for each side, in which `src/transformers` is a link to
the side's package: left in the checkout, they would find upstream's sources there and import those on both sides.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .fork.build import PACKAGE, REPOSITORY, read_pin
from .upstream_plugin import EVERYTHING, RECORD, file_of


GENERATION_TESTS = ("tests/generation/test_*.py", "tests/utils/test_cache_utils.py")
COPIED = ("tests", "utils", "conftest.py", "pyproject.toml")
OUTCOMES = ("passed", "failed", "skipped")
# Each process has to import torch and transformers, and a crash costs a new one
FILES_PER_PROCESS = 8


def find_checkout(upstream: str, clones: Path) -> Path:
    """
    Finds upstream's checkout.

    Args:
        upstream (`str`): A path, or a git URL with `@` and a tag or branch, which is cloned once.
        clones (`Path`): The directory that gets the clone.

    Raises:
        `ValueError`: The path isn't a checkout with tests, or the URL names no tag.
    """
    checkout = Path(upstream)
    if "://" in upstream:
        url, _, tag = upstream.rpartition("@")
        if "://" not in url or not tag:
            raise ValueError(
                f"`upstream` must name a tag or branch after its URL, as in URL@v5.24.0, but is {upstream!r}"
            )
        checkout = clones / tag
        if not checkout.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth=1", "--branch", tag, url, str(checkout)], check=True)
    if not (checkout / "tests" / "generation").is_dir():
        raise ValueError(
            f"`upstream` must be a checkout of {PACKAGE} with tests/generation in it, but is {upstream!r}"
        )
    return checkout.resolve()


def find_tests(checkout: Path, models: Sequence[str] = ()) -> list[str]:
    """
    Lists the files to run, relative to the checkout: those of generation and caches, then those of models.

    Args:
        checkout (`Path`): Upstream's checkout.
        models (`Sequence[str]`, *optional*): Directories under tests/models, by default all.

    Raises:
        `ValueError`: One of `models` has no tests.
    """
    patterns = list(GENERATION_TESTS)
    for model in models or ["*"]:
        patterns.append(f"tests/models/{model}/test_modeling_*.py")
        if not any(checkout.glob(patterns[-1])):
            raise ValueError(f"`models` must be directories of tests/models with model tests, but one is {model!r}")
    found = [sorted(checkout.glob(pattern)) for pattern in patterns]
    return list(dict.fromkeys(file.relative_to(checkout).as_posix() for files in found for file in files))


def version_of(package: Path) -> str | None:
    """The version that a package's `__init__.py` gives, without importing it."""
    init = package / "__init__.py"
    match = re.search(r'^__version__ = "(.+)"$', init.read_text(encoding="utf-8"), re.M) if init.is_file() else None
    return match[1] if match else None


def fingerprint(*directories: Path) -> str:
    """SHA-256 over the Python files of some directories. Links are followed where they are files."""
    digest = hashlib.sha256()
    for directory in directories:
        for file in sorted(directory.rglob("*.py")):
            digest.update(f"{file.relative_to(directory)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def lay_out(checkout: Path, package: Path, target: Path) -> None:
    """Copies what the tests need of a checkout, in place of an earlier copy, with `package` where its sources were."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "src").mkdir(parents=True)
    (target / "src" / PACKAGE).symlink_to(package)
    for name in COPIED:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copyfile(source, target / name)


@dataclass
class Side:
    """
    One of the two packages, and what the tests gave with it.

    Args:
        name (`str`): What the report calls it.
        package (`Path`): The directory of its package `transformers`.
        output (`Path`): The directory for the copy of the tests, the record and the logs.
        everything (`bool`, *optional*, defaults to `False`): Whether the costly tests run too.
    """

    name: str
    package: Path
    output: Path
    everything: bool = False
    tests: dict[str, dict] = field(default_factory=dict)  # what has an outcome
    started: set[str] = field(default_factory=set)
    through: set[str] = field(default_factory=set)  # files
    position: int = 0  # in the record: what is before has been read

    @property
    def suite(self) -> Path:
        return self.output / self.name

    @property
    def record(self) -> Path:
        return self.output / f"{self.name}.jsonl"

    def prepare(self, checkout: Path) -> None:
        """Copies the tests, and reads the record of an earlier run if that was of the same tests and package."""
        lay_out(checkout, self.package, self.suite)
        of = {"of": fingerprint(self.package, self.suite / "tests"), "everything": self.everything}
        first = json.dumps(of) + "\n"
        if self.record.exists() and not self.record.read_text(encoding="utf-8").startswith(first):
            print(f"{self.name}: the record of another package or other tests is thrown away", flush=True)
            self.record.unlink()
        if not self.record.exists():
            self.record.write_text(first, encoding="utf-8")
        self.read()
        self.started.clear()  # what was under way when the earlier run ended is no crash of this one

    def append(self, **line) -> None:
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> None:
        """
        Reads the lines that the record has got since the last call.

        Raises:
            `RuntimeError`: Tests have used another package than the side's.
        """
        tested = str(self.package.resolve())
        with self.record.open("rb") as file:
            file.seek(self.position)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # a line may still be in writing
        self.position += len(text)
        for line in map(json.loads, text.splitlines()):
            if "start" in line:
                self.started.add(line["start"])
            elif "test" in line:
                self.tests[line["test"]] = line
            elif "file" in line:
                self.through.add(line["file"])
            elif line.get("package", tested) != tested:
                raise RuntimeError(f"the tests of the {self.name} side must use {tested}, but used {line['package']}")

    def of_files(self, files: Iterable[str]) -> list[dict]:
        files = set(files)
        return [test for nodeid, test in self.tests.items() if file_of(nodeid) in files]


class Process:
    """pytest on some files of one side, under way."""

    def __init__(self, side: Side, files: Sequence[str], timeout: float):
        self.side, self.files = side, files
        self.log = side.output / "logs" / f"{side.name}-{time.time_ns()}.log"
        self.log.parent.mkdir(exist_ok=True)
        paths = [side.package.parent, Path(__file__).parent, os.environ.get("PYTHONPATH")]
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            RECORD: str(side.record),
        }
        if side.everything:
            environment[EVERYTHING] = "1"
        options = [f"faulthandler_timeout={timeout}", "faulthandler_exit_on_timeout=true", "log_cli=false"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
        command += [*(f"--override-ini={option}" for option in options), "--continue-on-collection-errors", *files]
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                command, cwd=side.suite, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def settle(self) -> list[list[str]]:
        """Looks at how the process ended. Returns what has to run again, as lists of files for a process each."""
        status, side = self.child.returncode, self.side
        side.read()
        left = [file for file in self.files if file not in side.through]
        broken = [test for test in side.started - side.tests.keys() if file_of(test) in left]
        for test in broken:
            message = f"the process ended with status {status} (too slow or crashed): {self.log}"
            side.append(test=test, outcome="failed", seconds=0, message=message)
        if broken:
            return [left]
        if status not in (0, 1, 5) and len(left) > 1:
            return [[file] for file in left]
        for file in left:  # of no selected test, or one that can't be imported
            if status not in (0, 1, 5):
                message = f"pytest ended with status {status}: {self.log}"
                side.append(test=file, outcome="failed", seconds=0, message=message)
            side.append(file=file)
        return []


def run(sides: Sequence[Side], files: Sequence[str], jobs: int, timeout: float) -> None:
    """Runs what hasn't come through on each side, and prints a line for each file that does."""
    total = len(files) * len(sides)
    queue = deque()
    for first in range(0, len(files), FILES_PER_PROCESS):
        for side in sides:
            chunk = [file for file in files[first : first + FILES_PER_PROCESS] if file not in side.through]
            queue.extend([(side, chunk)] if chunk else [])
    processes, shown = [], [side.through.intersection(files) for side in sides]
    try:
        while queue or processes:
            while queue and len(processes) < jobs:
                processes.append(Process(*queue.popleft(), timeout))
            time.sleep(0.1)
            for process in [process for process in processes if process.child.poll() is not None]:
                processes.remove(process)
                queue.extendleft((process.side, again) for again in process.settle())
            for side, before in zip(sides, shown):
                side.read()
                for file in sorted(side.through.intersection(files) - before):
                    before.add(file)
                    done = sum(map(len, shown))
                    print(f"[{done:4}/{total}] {side.name:8} {tally(side.of_files([file]))}  {file}", flush=True)
    finally:
        for process in processes:
            process.child.terminate()


def tally(tests: Sequence[dict]) -> str:
    counts = Counter(test["outcome"] for test in tests)
    seconds = sum(test["seconds"] for test in tests)
    return "  ".join(f"{counts[outcome]:5} {outcome}" for outcome in OUTCOMES) + f"  {seconds:7.1f} s"


def compare(one: Side, other: Side, files: Sequence[str]) -> list[str]:
    """Lists the tests that pass on `one` and not on `other`, each with what it gave there instead."""
    lines = []
    for test in one.of_files(files):
        instead = other.tests.get(test["test"], {"outcome": "absent", "message": ""})
        if test["outcome"] == "passed" != instead["outcome"]:
            lines.append(f"  {test['test']}\n      {instead['outcome']} on {other.name}: {instead['message']}")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.upstream_suite", description=__doc__)
    parser.add_argument("upstream", help="a checkout of upstream, or a git URL with @ and a tag")
    parser.add_argument("--models", default="", help="only these directories of tests/models, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a test may take")
    parser.add_argument("--everything", action="store_true", help="also what compiles, and statistics of watermarks")
    parser.add_argument("--oracle", type=Path, default=REPOSITORY / "build" / "oracle", help="where upstream lies")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "upstream-tests", help="records, logs")
    arguments = parser.parse_args()
    output, pin = arguments.output.resolve(), read_pin()
    try:
        if arguments.jobs < 1:
            raise ValueError(f"`jobs` must be at least 1, but is {arguments.jobs}")
        checkout = find_checkout(arguments.upstream, REPOSITORY / "build" / "upstream")
        files = find_tests(checkout, [model for model in arguments.models.split(",") if model])
        spec = importlib.util.find_spec(PACKAGE)
        packages = {
            "pristine": arguments.oracle.resolve() / PACKAGE,
            "fork": Path(spec.origin).parent if spec else None,
        }
        for name, version in (("pristine", pin.version), ("fork", pin.fork_version)):
            found = packages[name] and version_of(packages[name])
            if found != version:
                raise ValueError(f"the {name} side must be {PACKAGE} {version}, but {packages[name]} is {found}")
    except ValueError as error:
        parser.error(str(error))

    tested = version_of(checkout / "src" / PACKAGE)
    if tested != pin.version:
        print(f"warning: the tests are of {PACKAGE} {tested or '(unknown)'}, not of {pin.version}: some fail for that")
    sides = [Side(name, package, output, arguments.everything) for name, package in packages.items()]
    for side in sides:
        side.prepare(checkout)
    run(sides, files, arguments.jobs, arguments.timeout)

    print()
    for side in sides:
        print(f"{side.name:8}  {tally(side.of_files(files))}  {PACKAGE} {version_of(side.package)}")
    pristine, fork = sides
    lost, gained = compare(pristine, fork, files), compare(fork, pristine, files)
    print(
        "\n".join(
            [f"Passing on pristine only: {len(lost)}", *lost, f"Passing on the fork only: {len(gained)}", *gained]
        )
    )
    if not any(test["outcome"] == "passed" for test in pristine.of_files(files)):
        sys.exit(f"no test passes on pristine, so nothing has been compared; see {output / 'logs'}")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
