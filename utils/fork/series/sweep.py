# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Runs every architecture of the sweep in `tests/generation/architectures` with the package that is imported as
`transformers`, and with the pristine release in a process of its own. Tells how many runs forwarded each prompt once, and
fails if one gives other tokens or scores, or fails on one side only. `make sweep-patches` runs it on the series.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

import transformers
from tests.generation.architectures.comparison import FLOAT32_TOLERANCE, calls_of
from tests.generation.architectures.registry import Case, all_cases
from tests.generation.architectures.runner import Generation, run
from tests.generation.oracle import Oracle


def differences(ours: Generation, theirs: Generation) -> Iterator[str]:
    """Says in what two generations differ. Tokens and beams must be equal, scores nearly so: some routers are float32."""
    if ours.tensors.keys() != theirs.tensors.keys():
        yield f"returns {sorted(ours.tensors)}, pristine {sorted(theirs.tensors)}"
        return
    for name, expected in theirs.tensors.items():
        actual = ours.tensors[name]
        if actual.shape != expected.shape:
            yield f"{name} of shape {tuple(actual.shape)}, pristine {tuple(expected.shape)}"
        elif actual.is_floating_point():
            if not torch.allclose(actual, expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE, equal_nan=True):
                yield f"{name} differ by {(actual - expected).abs().nan_to_num().max():.1e}"
        elif not torch.equal(actual, expected):
            yield f"{name} differ"


def compare(case: Case, oracle: Oracle) -> tuple[dict[str, str], list[str]]:
    """
    Runs a case on both sides.

    Args:
        case (`Case`): The case.
        oracle (`Oracle`): The pristine release.

    Returns:
        `tuple[dict[str, str], list[str]]`: For each mode with several sequences `"once"`, or `"per copy"`. What differs.
    """
    dtype = torch.float32 if case.runs_in_float32 else torch.float64
    arguments = (case.kind, case.model_type, case.class_name, dtype, calls_of(case))
    reference_weights, references = oracle.run(run, *arguments)
    weights, generations = run(*arguments)
    problems = [] if weights == reference_weights else ["the weights differ"]
    rows = references["greedy"].first_rows
    expansions: dict[str, str] = {}
    for mode, generation in generations.items():
        reference = references[mode]
        found = differences(generation, reference)
        problems += (f"{mode}: {difference}" for difference in found)
        if mode != "greedy":
            names: Mapping[int, str] = {reference.first_rows: "per copy", rows: "once"}
            expansions[mode] = names.get(generation.first_rows, f"{generation.first_rows} rows")
    return expansions, problems


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.series.sweep", description=__doc__)
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--at-least", type=int, default=0, help="fail if fewer runs forward each prompt once")
    arguments = parser.parse_args()
    print(f"{transformers.__version__} in {transformers.__file__}")
    oracle, totals, wrong = Oracle(), Counter[tuple[str, str]](), 0
    cases = [case for case in all_cases() if case.excluded is None and arguments.only in case.name]
    for case in cases:
        try:
            expansions, problems = compare(case, oracle)
        except Exception as error:  # noqa: BLE001 (it counts as a difference)
            expansions, problems = {}, [f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"]
        totals.update(expansions.items())
        wrong += bool(problems)
        print(f"{case.name}: {expansions}", *problems, sep="\n  ", flush=True)
    for mode, expansion in sorted(totals):
        print(f"{mode}: {totals[mode, expansion]} {expansion}")
    once = sum(count for (_, expansion), count in totals.items() if expansion == "once")
    print(f"{len(cases)} cases, {totals.total()} runs, {once} once; cases that differ: {wrong}")
    sys.exit(1 if wrong or once < arguments.at_least else 0)


if __name__ == "__main__":
    main()
