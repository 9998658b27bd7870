# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
How the benchmark and the process of another engine talk: a JSON line per request on the worker's standard input, a JSON
line per answer on its standard output. Both ends are here, with the standard library alone: workers run in virtual
environments of their own.

The first request is a [`Setup`], answered with a [`Description`]. Each later one is a [`Call`], answered with a
[`Measured`]. An answer `{"error": traceback}` means that the worker could not do it.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..resident_memory import forget_peak, resident_bytes


REPOSITORY = Path(__file__).resolve().parents[2]
ERROR_LINES = 3  # of a log that are told
END_SECONDS = 30  # that a process may take to end


class PeerError(RuntimeError):
    """A peer that can't be measured (any more); the message says why."""


@dataclass(frozen=True)
class Setup:
    """
    What a worker loads.

    Args:
        model (`str`): Folder with the model in upstream's format, float32, and as `model-f16.gguf`.
        cache (`str`): Folder of the peer, for what it makes of the model.
        threads (`int`): Threads to compute with.
        context (`int`): The most tokens of one sequence, prompt included.
        num_sequences (`int`): The most sequences of one call.
    """

    model: str
    cache: str
    threads: int
    context: int
    num_sequences: int


@dataclass(frozen=True)
class Description:
    """The peer's version, and the precision of weights, sums, and keys and values."""

    version: str
    precision: str


@dataclass(frozen=True)
class Call:
    """What to generate: `mode` is `"beam"` or `"sample"`, `prompt` has L tokens."""

    mode: str
    prompt: list[int]
    num_sequences: int
    new_tokens: int
    seed: int


@dataclass(frozen=True)
class Measured:
    """
    What a call took.

    Args:
        seconds (`float`): Time of the call.
        cpu_seconds (`float`): Time that the process had a core in it, summed over its threads.
        peak_memory_bytes (`int`, *optional*): By how much resident memory grew at most, where the system tells. Memory
            that the engine reserved before, such as a pool for keys and values, doesn't count.
        tokens (`list[list[int]]`): The tokens after the prompt, of each sequence, the best one first.
    """

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int | None
    tokens: list[list[int]]


Generate = Callable[[Call], list[list[int]]]


# ---------------------------------------------------------------------------------------------------- in the worker


def serve(load: Callable[[Setup], tuple[Description, Generate]]) -> None:
    """
    Answers requests until the input ends.

    Args:
        load (`Callable`): Loads the model; returns what describes the peer, and the function that generates.
    """
    # What engines print, from any language, goes to the log
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if generate is None:
                answer, generate = load(Setup(**request))
            else:
                answer = timed(generate, Call(**request))
            text = json.dumps(asdict(answer))
        except Exception:
            text = json.dumps({"error": traceback.format_exc()})
        print(text, file=answers, flush=True)


def timed(generate: Generate, call: Call) -> Measured:
    """Runs and times one call, and checks that it gave what was asked for."""
    before = forget_peak()
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = generate(call)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    growth = None if before is None else resident_bytes(peak=True) - before
    shape, expected = [len(row) for row in tokens], [call.new_tokens] * call.num_sequences
    if shape != expected:
        raise RuntimeError(f"sequences of {shape} new tokens were generated, in place of {expected}")
    return Measured(seconds, cpu_seconds, growth, [list(row) for row in tokens])


# ------------------------------------------------------------------------------------------------- in the benchmark


class Worker:
    """
    The process of a peer.

    Args:
        command (`list[str]`): What to run.
        log (`Path`): File for what it prints.
        setup ([`Setup`]): What it loads.
        environment (`dict[str, str]`, *optional*): Variables besides those of this process.

    Raises:
        PeerError: If it can't load. So does `run` if a call fails.
    """

    def __init__(self, command: list[str], log: Path, setup: Setup, environment: dict[str, str] | None = None):
        self._log = log
        # The packages of this process are not the peer's
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=inherited | (environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                encoding="utf-8",
            )
        self.description = Description(**self._ask(setup))

    def run(self, call: Call) -> Measured:
        return Measured(**self._ask(call))

    def close(self) -> None:
        """Ends the input, and waits for the process to end."""
        with suppress(BrokenPipeError):  # a process that is gone read not everything
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: Setup | Call) -> dict[str, Any]:
        try:
            print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            raise PeerError(f"its process ended with exit code {self._process.returncode}: {last_lines(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise PeerError(answer["error"].strip().splitlines()[-1] + f" (traceback in {self._log})")
        return answer


def last_lines(log: Path) -> str:
    """The end of a log, without lines that only underline, and where all of it is."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line for line in lines if any(character.isalnum() for character in line)]
    return " / ".join([*told[-ERROR_LINES:], f"see {log}"])
