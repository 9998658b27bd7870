# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Diverse beam search as https://huggingface.co/papers/1610.02424 defines it, for one item, in plain Python: every
continuation of every hypothesis of a group is listed and sorted. The one thing to compare the vectorized search with.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


Hypothesis = tuple[float, tuple[int, ...]]


@dataclass
class Group:
    running: list[Hypothesis] = field(default_factory=lambda: [(0.0, ())])
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False


def diverse_beam_search(
    log_probs: Callable[[tuple[int, ...]], list[float]],
    groups: int,
    group_size: int,
    penalty: float,
    max_new_tokens: int,
    eos_tokens: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[Hypothesis]:
    """
    Returns the finished hypotheses of all groups as (score, new tokens), best first, earlier groups first if equal.

    Args:
        log_probs (`Callable`): Gives the log probability of each token of the vocabulary after the tokens given.
        groups, group_size, penalty (`int`, `int`, `float`): G, M and what a token costs per beam that chose it before.
        max_new_tokens, eos_tokens, length_penalty, early_stopping: As in `GenerationConfig`.
    """
    everyone = [Group() for _ in range(groups)]
    for length in range(1, max_new_tokens + 1):
        choices = Counter()
        for group in everyone:
            if group.is_done:
                continue
            candidates = [
                (score + augmented, (*tokens, token))
                for score, tokens in group.running
                for token, augmented in enumerate(augment(log_probs(tokens), choices, penalty))
            ]
            candidates.sort(key=lambda candidate: -candidate[0])
            group.running = []
            for rank, (score, tokens) in enumerate(candidates):
                if tokens[-1] in eos_tokens or length == max_new_tokens:
                    # A hypothesis that isn't among the best ones when it ends is dropped
                    if rank < group_size:
                        group.finished.append((score / length**length_penalty, tokens))
                elif len(group.running) < group_size:
                    group.running.append((score, tokens))
            group.finished = sorted(group.finished, key=lambda hypothesis: -hypothesis[0])[:group_size]
            # Ending is no choice of a word: it isn't penalized in later groups
            words = [tokens[-1] for _, tokens in candidates if tokens[-1] not in eos_tokens]
            choices.update(words[:group_size])
            group.is_done = is_done(group, group_size, length, max_new_tokens, length_penalty, early_stopping)
    return sorted((item for group in everyone for item in group.finished), key=lambda hypothesis: -hypothesis[0])


def augment(log_probs: list[float], choices: Counter, penalty: float) -> list[float]:
    """Subtracts the penalty of each token. Where processors leave one token only, there is nothing to choose."""
    if sum(math.isfinite(log_prob) for log_prob in log_probs) == 1:
        return log_probs
    return [log_prob - penalty * choices[token] for token, log_prob in enumerate(log_probs)]


def is_done(group, group_size, length, max_new_tokens, length_penalty, early_stopping) -> bool:
    """Whether a group has M hypotheses and, unless that is enough, no running one can still displace the worst one."""
    if len(group.finished) < group_size:
        return False
    if early_stopping is True or not group.running:
        return True
    best_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
    return group.running[0][0] / best_length**length_penalty <= group.finished[-1][0]
