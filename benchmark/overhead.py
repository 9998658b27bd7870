# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What the default costs where it can gain little: deep, tiny models, whose time is what calls cost, and short prompts. Pristine
upstream, in a process of its own, takes turns with the fork.

    python -m benchmark.overhead                                            # the whole grid
    python -m benchmark.overhead --models llama --lengths 64 256 --sequences 4
"""

import argparse
import statistics
from itertools import product
from typing import Any

import transformers
from utils.oracle import Oracle

from .tiny_models import MODES, generate


def measure(oracle: Oracle, repeats: int, *cell: Any) -> tuple[list[float], bool]:
    """Returns the ratio fork / upstream of the fastest calls and of the medians, and whether the tokens are the same."""
    seconds: dict[str, list[float]] = {"fork": [], "upstream": []}
    tokens = {}
    for _ in range(repeats):
        for engine, run in (("upstream", oracle.run), ("fork", lambda function, *args: function(*args))):
            taken, tokens[engine] = run(generate, *cell)
            seconds[engine].append(taken)
    ratios = [summary(seconds["fork"]) / summary(seconds["upstream"]) for summary in (min, statistics.median)]
    return ratios, tokens["fork"] == tokens["upstream"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=["llama", "bart", "t5"], default=["llama", "bart", "t5"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["beam"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--sequences", nargs="+", type=int, default=[2, 4, 16])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16])
    parser.add_argument("--repeats", type=int, default=3, help="calls of each engine, in turn (default: 3)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    oracle = Oracle()
    print(
        "| model | mode | new tokens | L | N | fork / upstream, fastest | medians | same tokens |\n"
        + "| --- " * 8
        + "|"
    )
    grid = product(arguments.models, arguments.modes, arguments.tokens, arguments.lengths, arguments.sequences)
    for name, mode, tokens, length, count in grid:
        cell = (name, mode, length, count, tokens)
        measure(oracle, 1, *cell)  # warms up
        (fastest, median), same = measure(oracle, arguments.repeats, *cell)
        same = "yes" if same else "no"
        print(
            f"| {name} | {mode} | {tokens} | {length} | {count} | {fastest:.2f} | {median:.2f} | {same} |", flush=True
        )


if __name__ == "__main__":
    main()
