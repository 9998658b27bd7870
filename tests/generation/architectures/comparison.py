# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The fork against pristine upstream, architecture by architecture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..oracle import Oracle
from .registry import Case
from .runner import Generation, run


NUM_SEQUENCES = 4
GREEDY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
# One sequence per prompt first: it says how many rows two prompts take
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sample": {"do_sample": True, "num_beams": 1, "num_return_sequences": NUM_SEQUENCES},
    "beam": {"do_sample": False, "num_beams": NUM_SEQUENCES, "num_return_sequences": NUM_SEQUENCES},
    "beam sample": {"do_sample": True, "num_beams": NUM_SEQUENCES, "num_return_sequences": NUM_SEQUENCES},
}
# Most models share the prompt's keys and values, so copying them has a mode of its own
COPIED = ", copied"
FLOAT32_TOLERANCE = 1e-5


@dataclass
class Outcome:
    """
    How the fork did on one case.

    Args:
        case (`Case`): The case.
        generations (`dict[str, Generation]`): What the fork did, by mode.
        problems (`list[str]`): Where it differs from upstream, or did not compute the prompts once.
        worst (`float`): The largest difference of a score.
    """

    case: Case
    generations: dict[str, Generation] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    worst: float = 0.0

    def sharing(self) -> str | None:
        """
        How many of the attention layers share to the end, and the operations that needed all rows of the others: later modes
        copy those at once. `None` if no layer shares and no operation is to blame.
        """
        tried = [generation for generation in self.generations.values() if generation.strategy == "share"]
        expanding = sorted({operation for generation in tried for operation in generation.expanding})
        shared = min((generation.shared_layers for generation in tried), default=0)
        if shared == 0 and not expanding:
            return None
        layers = max(generation.attention_layers for generation in tried)
        return f"{shared} of {layers}" + (f" ({', '.join(expanding)})" if expanding else "")


def calls_of(case: Case) -> dict[str, dict[str, Any]]:
    """The arguments of `generate` by mode."""
    return {
        mode: arguments | case.arguments | (case.beam_arguments if arguments["num_beams"] > 1 else {})
        for mode, arguments in MODES.items()
        if case.takes_beams or arguments["num_beams"] == 1
    }


def compare(case: Case, oracle: Oracle) -> Outcome:
    """Runs the case in the fork and in the oracle."""
    dtype = torch.float32 if case.runs_in_float32 else torch.float64
    subject = (case.kind, case.model_type, case.class_name, dtype)
    calls = calls_of(case)
    reference_calls = {
        mode: arguments | (case.reference_beam_arguments if arguments["num_beams"] > 1 else {})
        for mode, arguments in calls.items()
    }
    reference_weights, references = oracle.run(
        run, *subject, reference_calls, expanded_by_caller=case.is_expanded_by_caller
    )
    if "beam sample" in calls and "beam sample" not in case.expanded_first:
        calls[f"beam sample{COPIED}"] = calls["beam sample"] | {"prompt_expansion": "copy"}
    weights, generations = run(*subject, calls)
    outcome = Outcome(case, generations)
    if weights != reference_weights:
        outcome.problems.append("the weights differ")
    rows = references["greedy"].first_rows
    for name, generation in generations.items():
        mode = name.removesuffix(COPIED)
        reference = references[mode]
        expected_rows = rows * (NUM_SEQUENCES if mode in case.expanded_first else 1)
        if generation.first_rows != expected_rows:
            outcome.problems.append(f"{name}: {generation.first_rows} rows in the first forward, not {expected_rows}")
        if mode != "greedy" and mode not in case.expanded_first and generation.strategy not in ("share", "copy"):
            outcome.problems.append(f"{name}: the strategy logged is {generation.strategy!r}")
        if generation.shared_layers > 0 and generation.strategy != "share":
            outcome.problems.append(f"{name}: {generation.shared_layers} layers share with {generation.strategy!r}")
        if mode != "greedy" and reference.first_rows != rows * NUM_SEQUENCES:
            outcome.problems.append(f"{mode}: upstream has {reference.first_rows} rows in the first forward")
        ignored = case.wrong_with_beams if calls[mode]["num_beams"] > 1 else ()
        outcome.problems += (f"{name}: {problem}" for problem in _differences(generation, reference, ignored, outcome))
    if "share" in {generation.strategy for generation in generations.values()} and outcome.sharing() is None:
        outcome.problems.append("no layer shares, and none says why")
    return outcome


def _differences(
    generation: Generation, reference: Generation, ignored: Sequence[str], outcome: Outcome
) -> Iterator[str]:
    if generation.tensors.keys() != reference.tensors.keys():
        yield f"returns {sorted(generation.tensors)}, upstream {sorted(reference.tensors)}"
        return
    for name, expected in reference.tensors.items():
        if name in ignored:
            continue
        actual = generation.tensors[name]
        if actual.shape != expected.shape:
            yield f"{name} of shape {tuple(actual.shape)}, upstream {tuple(expected.shape)}"
        elif not expected.is_floating_point():
            if not torch.equal(actual, expected):
                yield f"{name} differ"
        else:
            # Equal infinities have no difference; NaN differs from everything
            gaps = torch.where(actual == expected, 0, (actual - expected).abs()).nan_to_num(nan=torch.inf)
            outcome.worst = max(outcome.worst, gaps.max().item())
            if outcome.case.runs_in_float32:
                same = torch.allclose(actual, expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
            else:
                # Scores come in float32, where the rounding of float64 does not show
                same = torch.equal(actual, expected)
            if not same:
                yield f"{name} differ by {gaps.max():.1e}"
