# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What the default costs where it can gain little: deep, tiny models, whose time is what calls cost, and short prompts. Pristine
upstream, in a process of its own, takes turns with the fork.

    python -m benchmark.overhead                                            # the whole grid
    python -m benchmark.overhead --models llama --lengths 64 256 --sequences 4
"""

import argparse
import statistics
import time
from functools import lru_cache
from itertools import product
from typing import Any

import torch

import transformers
from utils.oracle import Oracle


VOCABULARY = 61
MODES = {
    "beam": lambda count: {"num_beams": count, "num_return_sequences": count},
    "sample": lambda count: {"do_sample": True, "num_return_sequences": count},
}
DECODER = {"vocab_size": VOCABULARY, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}


@lru_cache
def build_model(name: str) -> Any:
    """A model with random weights: 24 layers of llama, or 12 decoder layers of bart or t5."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "llama":
        config = transformers.LlamaConfig(
            **DECODER,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
        return transformers.LlamaForCausalLM(config).eval()
    if name == "bart":
        config = transformers.BartConfig(
            **DECODER,
            d_model=64,
            encoder_layers=2,
            decoder_layers=12,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=8192,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
        return transformers.BartForConditionalGeneration(config).eval()
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=12,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def generate(name: str, mode: str, length: int, count: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds of one call, and its tokens."""
    model = build_model(name)
    prompt = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    torch.manual_seed(0)
    start = time.perf_counter()
    sequences = model.generate(prompt, **MODES[mode](count), max_new_tokens=tokens, min_new_tokens=tokens)
    return time.perf_counter() - start, sequences.tolist()


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
