# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What N sequences after one prompt take in other engines, beside upstream's one sequence and the fork's N.

    python -m benchmark.peers                                       # L = 2048, N = 1 and 6, beams and samples
    python -m benchmark.peers --peers ctranslate2 --modes beam
    python -m benchmark.peers --draw build/benchmark/peers.jsonl    # only the tables of these results

Each engine gets the same tokens of SmolLM2-135M-Instruct's prompt, with weights of the same GGUF file, and no results of
earlier calls. It runs in a process and a virtual environment of its own, which the first use makes below `build/peers`.
An engine that doesn't install, load or run is left out, with the reason. Engines take turns within each repeat, after a
warm-up of each on a short prompt. Every call is written to `peers.jsonl` at once; tables are made from that file.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

import transformers
from examples.long_prompt_beams import UsageError, status
from utils.oracle import UPSTREAM_VERSION

from ..measurement import Subject, Workload, prompt
from ..prefill import OUTPUT, WARM_UP_LENGTH, Engines, add_workload_arguments, describe_machine
from .environment import PEERS, Peer
from .export import export_model
from .protocol import Call, PeerError, Setup, Worker
from .tables import OURS, REFERENCE, render_tables


FOLDER = Path("build/peers")
SUBJECT = Subject(None, "cpu", "float32")
VERSIONS = {REFERENCE: UPSTREAM_VERSION, OURS: transformers.__version__}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmark.peers", description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="(default: all)")
    add_workload_arguments(parser, lengths=[2048], sequences=[1, 6])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the results (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only make tables from these results")
    return parser


def workloads(arguments: argparse.Namespace) -> Iterator[Workload]:
    """The workloads of one repeat. One sequence always belongs to them: all is compared with that."""
    for mode, length, count in product(arguments.modes, arguments.lengths, sorted({1, *arguments.sequences})):
        yield Workload(mode, length, count, arguments.new_tokens)


def check_fits(arguments: argparse.Namespace, model: Path) -> None:
    """Refuses prompts that leave no room for the new tokens in the model's context."""
    context = json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    longest = max(arguments.lengths) + arguments.new_tokens
    if longest > context:
        raise UsageError(
            f"--lengths and --new-tokens don't fit the model: {max(arguments.lengths)} + {arguments.new_tokens} = "
            f"{longest} tokens, but its context has {context}"
        )


class Rounds:
    """
    Runs the calls of our engines and of those peers that can be used.

    Args:
        subject ([`Subject`]): The model, for our engines.
        model (`Path`): Folder of the same model, for the peers.
        file (`TextIO`): Where lines of results go.
    """

    def __init__(self, subject: Subject, model: Path, file: TextIO):
        self.subject, self.model, self.file = subject, model, file
        self.engines = Engines(subject)
        self.workers: dict[str, Worker] = {}

    def write(self, **line: Any) -> None:
        print(json.dumps(line), file=self.file, flush=True)

    def leave_out(self, name: str, error: PeerError) -> None:
        """Says and records that a peer is not measured (any more), and why."""
        print(f"\nleft out: {name}: {error}", file=sys.stderr, flush=True)
        self.write(left_out=name, reason=str(error))
        self.workers.pop(name, None)

    def start(self, peers: list[Peer], context: int, num_sequences: int, folder: Path) -> None:
        for peer in peers:
            own = (folder / peer.name).resolve()
            own.mkdir(parents=True, exist_ok=True)
            setup = Setup(str(self.model.resolve()), str(own), torch.get_num_threads(), context, num_sequences)
            try:
                with status(f"starting {peer.name}, logs in {own}"):
                    self.workers[peer.name] = peer.start(own, setup)
            except PeerError as error:
                self.leave_out(peer.name, error)

    def run(self, engine: str, workload: Workload, seed: int) -> dict[str, Any] | None:
        """What the call took, None where the peer failed and is left out from now on."""
        if engine in VERSIONS:
            result = asdict(self.engines.run(workload, engine))
            return {"version": VERSIONS[engine], "precision": self.subject.dtype, **result}
        worker = self.workers[engine]
        tokens = prompt(self.subject, workload.length)[0].tolist()
        try:
            measured = worker.run(Call(workload.mode, tokens, workload.num_sequences, workload.new_tokens, seed))
        except PeerError as error:
            self.leave_out(engine, error)
            return None
        return {**asdict(worker.description), **asdict(measured)}

    def calls(self, workloads: list[Workload]) -> Iterator[tuple[Workload, str]]:
        """The calls of one round, in turn. Peers that fail meanwhile drop out."""
        for workload in workloads:
            for engine in (REFERENCE, OURS, *list(self.workers)):
                used = engine in VERSIONS or engine in self.workers
                if used and (workload.num_sequences == 1 or engine != REFERENCE):
                    yield workload, engine

    def measure(self, workloads: list[Workload], repeats: int) -> None:
        """Runs all calls `repeats` times, after a warm-up, and writes a line per call."""
        count = max(workload.num_sequences for workload in workloads)
        for mode in dict.fromkeys(workload.mode for workload in workloads):
            for workload, engine in self.calls([Workload(mode, WARM_UP_LENGTH, n, 2) for n in sorted({1, count})]):
                self.run(engine, workload, seed=0)
        progress = tqdm(total=repeats * len(list(self.calls(workloads))), unit="call", file=sys.stdout)
        for run in range(repeats):
            for workload, engine in self.calls(workloads):
                progress.set_description(f"{engine} {workload.mode} L={workload.length} N={workload.num_sequences}")
                result = self.run(engine, workload, seed=run)
                if result is not None:
                    self.write(engine=engine, run=run, **asdict(workload), **result, load=os.getloadavg()[0])
                progress.update()
        progress.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def measure(
    arguments: argparse.Namespace, peers: list[Peer], subject: Subject, model: Path, folder: Path, results: Path
) -> bool:
    """
    Measures `peers` on `model`, which is `subject` in a folder, and writes a line per call to `results`. The peers'
    environments and logs are below `folder`. Returns whether any peer ran to the end.
    """
    check_fits(arguments, model)
    grid = list(workloads(arguments))
    with results.open("w", encoding="utf-8") as file:
        rounds = Rounds(subject, model, file)
        rounds.write(machine=describe_machine(subject), model=subject.name or "SmolLM2-135M-Instruct")
        context = max(WARM_UP_LENGTH, *arguments.lengths) + max(2, arguments.new_tokens)
        rounds.start(peers, context, max(workload.num_sequences for workload in grid), folder)
        try:
            rounds.measure(grid, arguments.repeats)
        finally:
            rounds.close()
    return bool(rounds.workers)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    results, any_left = arguments.draw, True
    if results is None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        results = arguments.output / "peers.jsonl"
        peers = [PEERS[name] for name in arguments.peers]
        try:
            any_left = measure(arguments, peers, SUBJECT, export_model(FOLDER), FOLDER, results)
        except UsageError as error:
            parser.error(str(error))
    tables = render_tables([json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()])
    print(tables)
    results.with_suffix(".md").write_text(tables, encoding="utf-8")
    return 0 if any_left else 1


if __name__ == "__main__":
    raise SystemExit(main())
