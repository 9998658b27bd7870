# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What N sequences after one prompt take: pristine upstream, in a process of its own, against the fork's strategies.

    python -m benchmark.prefill                                     # SmolLM2-135M on the CPU, the whole grid
    python -m benchmark.prefill --lengths 2048 --sequences 1 6      # a part of it
    python -m benchmark.prefill --model path/or/hub-name --device cuda --dtype bfloat16
    python -m benchmark.prefill --draw build/benchmark/results.jsonl

Engines take turns within each repeat, after a warm-up of each on a short prompt. Every call is written to
`results.jsonl` at once; tables and pictures are made from that file.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import transformers
from examples.long_prompt_beams import at_least
from utils.oracle import Oracle

from .measurement import MODES, Result, Subject, Workload, generate, prefill_flops
from .report import draw, render_tables, same_tokens


# The argument `prompt_expansion` of each engine; upstream has none
ENGINES = {"upstream": None, "recompute": "recompute", "copy": "copy", "share": "share"}
FORWARDS_ALL_ROWS = ("upstream", "recompute")
WARM_UP_LENGTH = 64
OUTPUT = Path("build/benchmark")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--model", help="a local folder or a hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: all)")
    add_workload_arguments(parser, lengths=[512, 1024, 2048, 4096], sequences=[1, 4, 6, 16, 32])
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--max-prompt-tokens",
        type=at_least(1),
        default=16384,
        metavar="TOKENS",
        help="leave out calls that forward more prompt tokens than these, all rows together (default: 16384)",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the results (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only make tables and pictures from these results")
    return parser


def add_workload_arguments(parser: argparse.ArgumentParser, lengths: list[int], sequences: list[int]) -> None:
    """Adds what a grid of workloads is made of, with these defaults."""
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: all)")
    parser.add_argument("--lengths", nargs="+", type=at_least(1), default=lengths, metavar="L")
    parser.add_argument("--sequences", nargs="+", type=at_least(1), default=sequences, metavar="N")
    parser.add_argument("--new-tokens", type=at_least(1), default=15, metavar="T", help="(default: 15)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="runs of each engine (default: 3)")


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[Workload, str]]:
    """The calls of one repeat, with their engines, which take turns."""
    for mode, length, num_sequences in product(arguments.modes, arguments.lengths, arguments.sequences):
        for engine in arguments.engines:
            forwarded = length * (num_sequences if engine in FORWARDS_ALL_ROWS else 1)
            # One sequence is the same call with every strategy
            repeated = num_sequences == 1 and engine in ("recompute", "copy")
            if forwarded <= arguments.max_prompt_tokens and not repeated:
                yield Workload(mode, length, num_sequences, arguments.new_tokens), engine


class Engines:
    """Runs calls here, with the fork, or in the process of pristine upstream."""

    def __init__(self, subject: Subject):
        self.subject, self._upstream = subject, None

    def run(self, workload: Workload, engine: str) -> Result:
        if engine != "upstream":
            # A call for one sequence has nothing to share, which the strategy's name would have refused
            strategy = ENGINES[engine] if workload.num_sequences > 1 else None
            return generate(self.subject, workload, strategy)
        if self._upstream is None:
            self._upstream = Oracle()
        return self._upstream.run(generate, self.subject, workload, None)


def describe_machine(subject: Subject) -> dict[str, Any]:
    device = torch.cuda.get_device_name(subject.device) if subject.device.startswith("cuda") else platform.processor()
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "device": device if subject.device != "cpu" else (names or [device])[0],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def measure(arguments: argparse.Namespace, results: Path) -> None:
    """Runs the grid, and writes a line per call to `results`."""
    subject = Subject(arguments.model, arguments.device, arguments.dtype)
    engines, calls = Engines(subject), list(workloads(arguments))
    for mode, engine in product(arguments.modes, arguments.engines):
        engines.run(Workload(mode, WARM_UP_LENGTH, max(arguments.sequences), 2), engine)
    flops: dict[tuple[int, int], int] = {}
    with results.open("w", encoding="utf-8") as file:
        print(json.dumps({"machine": describe_machine(subject), "subject": asdict(subject)}), file=file, flush=True)
        progress = tqdm(range(arguments.repeats * len(calls)), unit="call", file=sys.stdout)
        for run, (workload, engine) in product(range(arguments.repeats), calls):
            progress.set_description(f"{engine} {workload.mode} L={workload.length} N={workload.num_sequences}")
            result = engines.run(workload, engine)
            key = (result.rows, workload.length)
            if key not in flops:
                flops[key] = prefill_flops(subject, *key)
            line = {"engine": engine, "run": run, **asdict(workload), **asdict(result), "prefill_flops": flops[key]}
            line["load"] = os.getloadavg()[0]
            print(json.dumps(line), file=file, flush=True)
            progress.update()
        progress.close()


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    results = arguments.draw
    if results is None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        results = arguments.output / "results.jsonl"
        measure(arguments, results)
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    tables = render_tables(lines)
    print(tables)
    (results.parent / "tables.md").write_text(tables, encoding="utf-8")
    for picture in draw(lines, results.parent):
        print(f"wrote {picture}")
    # Tokens that differ are a bug, whatever the times are
    return 0 if same_tokens(lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
