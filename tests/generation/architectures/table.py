# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Runs the architecture sweep and writes what it found, as a page of the documentation:

    python -m tests.generation.architectures.table docs/source/en/prefill_support.md
"""

import argparse
import multiprocessing
import sys
import textwrap
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from transformers.prefix_sharing import caches
from transformers.utils import logging

from ..oracle import UPSTREAM_VERSION
from ..runs import oracle
from .comparison import COPIED, NUM_SEQUENCES, Outcome, compare
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
is upstream's order: once per sequence. Of layers that share, the number is given out of those that hold keys and
values, with the operation that needed all rows of the others. See [Prefill once](prefill_once) for `prompt_expansion`.
"""
MIXED_UP = "## Where upstream is no oracle\n\n" + "\n".join(
    textwrap.wrap(
        f"Upstream mixes up several images of one prompt for {', '.join(f'`{name}`' for name in IMAGES_MIXED_UP)}, and "
        f"several sounds of one prompt for {', '.join(f'`{name}`' for name in SEVERAL_SOUNDS)}: it repeats each of them by "
        "itself, [a, b] to [a, a, b, b], where the rows need [a, b, a, b]. There the rows were repeated before upstream's "
        "`generate`, whose own repetition was switched off. Upstream does not reorder the linear attention of `minimax` "
        "with the beams: it ran without a cache. Its beam search with Whisper returns one hypothesis several times: one "
        "was compared.",
        width=119,
        break_long_words=False,
        break_on_hyphens=False,
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("page", type=Path, help="the page to write")
    page = parser.parse_args().page
    outcomes = dict.fromkeys(all_cases())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(_compare, [case for case in outcomes if case.excluded is None]):
            print(outcome.case.name, *outcome.problems, sep="\n    ", flush=True)
            outcomes[outcome.case] = outcome
    if any(outcome.problems for outcome in outcomes.values() if outcome is not None):
        sys.exit(f"{page} is left as it was: not all cases agree with upstream")
    page.write_text(render(outcomes))


def _compare(case: Case) -> Outcome:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    # Tiny models share, too: the page tells what can be shared, not where it pays
    with patch.object(caches, "why_not_pays", lambda *args: None):
        outcome = compare(case, oracle())
    # Tensors are of no use to the page, and do not outlive this process
    outcome.generations = {mode: replace(done, tensors={}) for mode, done in outcome.generations.items()}
    return outcome


def render(outcomes: dict[Case, Outcome | None]) -> str:
    """The page, from the outcome of each case, `None` for the excluded ones."""
    sections = [HEAD, "## Totals\n", _totals(outcomes)]
    for mapping in dict.fromkeys(case.mapping for case in outcomes):
        rows = [row(case, outcome) for case, outcome in outcomes.items() if case.mapping == mapping]
        sections += [
            f"## {mapping[0].upper()}{mapping[1:]}\n",
            _markdown_table(
                ["model type", "prompt", "cache", "prompt computed", "strategy", "layers that share", "why"], rows
            ),
        ]
    return "\n".join([*sections, MIXED_UP, ""])


def _totals(outcomes: dict[Case, Outcome | None]) -> str:
    rows = []
    for group in dict.fromkeys((case.mapping, case.kind) for case in outcomes):
        members = [outcome for case, outcome in outcomes.items() if (case.mapping, case.kind) == group]
        swept = [outcome for outcome in members if outcome is not None]
        strategies = Counter(
            strategy for outcome in swept for strategy in {s for s, _ in _strategies(outcome).values()}
        )
        rows.append([*group, *map(str, [len(members), len(swept), sum(not outcome.problems for outcome in swept)])])
        rows[-1] += [str(strategies[strategy]) for strategy in ("share", "copy", "recompute")]
    return _markdown_table(
        ["mapping", "prompt", "found", "swept", "same", "`share`", "`copy`", "`recompute` (in some mode)"], rows
    )


def _strategies(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """The strategies taken in the modes with several sequences, with their reasons."""
    return {
        mode: (
            ("recompute", outcome.case.expanded_first[mode])
            if mode in outcome.case.expanded_first
            else (generation.strategy, generation.reason)
        )
        for mode, generation in outcome.generations.items()
        if mode != "greedy" and not mode.endswith(COPIED)
    }


# How often each strategy computes the prompt
TIMES = {"share": "once", "copy": "once", "recompute": f"{NUM_SEQUENCES} times"}


def row(case: Case, outcome: Outcome | None) -> list[str]:
    """The cells of a case, from its outcome, `None` for an excluded one."""
    if outcome is None:
        return [f"`{case.model_type}`", case.kind, "", "not swept", "", "", case.excluded or ""]
    modes: dict[str, list[str]] = {}
    for mode, (strategy, _) in _strategies(outcome).items():
        modes.setdefault(strategy, []).append(mode)
    # Which modes is only said where they differ
    named = {strategy: f" ({', '.join(names)})" if len(modes) > 1 else "" for strategy, names in modes.items()}
    reasons = [reason for strategy, reason in _strategies(outcome).values() if strategy != "share"]
    return [
        f"`{case.model_type}`",
        case.kind,
        outcome.generations["greedy"].cache,
        "; ".join(f"{TIMES[strategy]}{names}" for strategy, names in named.items()),
        "; ".join(f"`{strategy}`{names}" for strategy, names in named.items()),
        outcome.sharing() or "",
        "; ".join(dict.fromkeys(reasons)),
    ]


def markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    return "".join(map(markdown_row, [header, ["---"] * len(header), *rows]))


if __name__ == "__main__":
    main()
