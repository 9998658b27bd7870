# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Runs the architecture sweep and writes what it found, as a page of the documentation:

    python -m tests.generation.architectures.table docs/source/en/prefill_support.md
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from transformers.utils import logging

from ..oracle import UPSTREAM_VERSION, Oracle
from .comparison import NUM_SEQUENCES, Outcome, compare
from .registry import IMAGES_MIXED_UP, SEVERAL_SOUNDS, Case, all_cases


HEAD = f"""\
<!-- Written by `python -m tests.generation.architectures.table`. Change that script, not this page. -->

# Which models compute the prompt once

Every architecture in the auto mappings for generation of transformers {UPSTREAM_VERSION} that can be built tiny, with
random weights, generated from two prompts of different length: with `num_return_sequences={NUM_SEQUENCES}` sampling,
with {NUM_SEQUENCES} beams, and with {NUM_SEQUENCES} beams sampling. "Same" means the same tokens as pristine upstream
in another process, with equal scores where the model computes in float64 (up to 1e-5 in float32), and as many rows in
the first forward pass as there are prompts.

`share` keeps the prompt's keys and values once, `copy` once per sequence; both compute them once. `recompute`
is upstream's order: once per sequence. See [Prefill once](prefill_once) for `prompt_expansion`.
"""
MIXED_UP = f"""\
## Where upstream is no oracle

Upstream mixes up several images of one prompt for {", ".join(f"`{name}`" for name in IMAGES_MIXED_UP)}, and several
sounds of one prompt for {", ".join(f"`{name}`" for name in SEVERAL_SOUNDS)}: it repeats each of them by itself,
[a, b] to [a, a, b, b], where the rows need [a, b, a, b]. There the rows were repeated before upstream's `generate`,
whose own repetition was switched off. Upstream does not reorder the linear attention of `minimax` with the beams: it
ran without a cache. Its beam search with Whisper returns one hypothesis several times: one was compared.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("page", type=Path, help="the page to write")
    page = parser.parse_args().page
    logging.set_verbosity_error()
    oracle = Oracle()
    outcomes = {case: None if case.excluded is not None else compare(case, oracle) for case in all_cases()}
    problems = [f"{case.name}: {problem}" for case, o in outcomes.items() if o is not None for problem in o.problems]
    if problems:
        sys.exit("\n".join([*problems, f"{page} is left as it was"]))
    page.write_text(render(outcomes))


def render(outcomes: dict[Case, Outcome | None]) -> str:
    """The page, from the outcome of each case, `None` for the excluded ones."""
    sections = [HEAD, "## Totals\n", _totals(outcomes)]
    for mapping in dict.fromkeys(case.mapping for case in outcomes):
        rows = [_row(case, outcome) for case, outcome in outcomes.items() if case.mapping == mapping]
        sections += [
            f"## {mapping[0].upper()}{mapping[1:]}\n",
            _markdown_table(["model type", "prompt", "cache", "prompt computed", "strategy", "why"], rows),
        ]
    return "\n".join([*sections, MIXED_UP])


def _totals(outcomes: dict[Case, Outcome | None]) -> str:
    rows = []
    for group in dict.fromkeys((case.mapping, case.kind) for case in outcomes):
        members = [outcome for case, outcome in outcomes.items() if (case.mapping, case.kind) == group]
        swept = [outcome for outcome in members if outcome is not None]
        strategies = Counter(strategy for outcome in swept for strategy in {s for s, _ in _strategies(outcome)})
        rows.append([*group, *map(str, [len(members), len(swept), sum(not outcome.problems for outcome in swept)])])
        rows[-1] += [str(strategies[strategy]) for strategy in ("share", "copy", "recompute")]
    return _markdown_table(
        ["mapping", "prompt", "found", "swept", "same", "`share`", "`copy`", "`recompute` (in some mode)"], rows
    )


def _strategies(outcome: Outcome) -> list[tuple[str, str]]:
    """The strategies taken in the modes with several sequences, with their reasons, each once."""
    taken = [(generation.strategy, generation.reason) for generation in outcome.generations.values()]
    return [pair for pair in dict.fromkeys(taken) if pair[0]]


def _row(case: Case, outcome: Outcome | None) -> list[str]:
    if outcome is None:
        return [f"`{case.model_type}`", case.kind, "", "not swept", "", case.excluded or ""]
    modes = ", ".join(case.expanded_first)
    computed = f"once; {modes}: {NUM_SEQUENCES} times" if modes else "once"
    strategies = _strategies(outcome)
    return [
        f"`{case.model_type}`",
        case.kind,
        outcome.generations["greedy"].cache,
        computed,
        ", ".join(dict.fromkeys(f"`{strategy}`" for strategy, _ in strategies)),
        "; ".join(dict.fromkeys(reason for _, reason in strategies)),
    ]


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
