# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""One call of `generate`, timed. Runs with the fork and, in a process of its own, with pristine upstream."""

import ctypes
import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.long_prompt_beams import DEFAULT_PROMPT, Measurement, load, recorded, synchronize
from transformers import PreTrainedModel


MODES = ("beam", "sample")


@dataclass(frozen=True)
class Subject:
    """The model that is measured: `name` is a folder or hub name, None for SmolLM2 from its package."""

    name: str | None
    device: str
    dtype: str


@dataclass(frozen=True)
class Workload:
    """What `generate` is asked for: N sequences (`num_sequences`) after a prompt of L tokens (`length`)."""

    mode: str
    length: int
    num_sequences: int
    new_tokens: int

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate` besides the prompt."""
        rows = {"num_return_sequences": self.num_sequences}
        if self.mode == "beam":
            rows |= {"num_beams": self.num_sequences, "do_sample": False}
        else:
            rows |= {"do_sample": True, "top_k": 0}
        # Without an end: each engine does as many steps
        return {**rows, "max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}


@dataclass
class Result:
    """
    What a call took.

    Args:
        seconds (`float`): Time of the call.
        cpu_seconds (`float`): Time that the process had a core in it, all threads together: what other load changes least.
        prefill_seconds (`float`): Time of its first forward pass.
        rows (`int`): Rows of its first forward pass.
        cache_bytes (`int`): The most that the cache held after any forward pass.
        peak_memory_bytes (`int`, *optional*): By how much memory grew at most, if the system tells: allocated by torch on
            an accelerator, resident memory of the process otherwise.
        tokens (`list[list[int]]`): The tokens after the prompt, of each sequence.
    """

    seconds: float
    cpu_seconds: float
    prefill_seconds: float
    rows: int
    cache_bytes: int
    peak_memory_bytes: int | None
    tokens: list[list[int]]


@functools.cache
def _loaded(subject: Subject) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model, and the tokens of the demo's document."""
    model, tokenizer = load(subject.name, torch.device(subject.device), getattr(torch, subject.dtype))
    text = DEFAULT_PROMPT.read_text(encoding="utf-8")
    return model, tokenizer(text, return_tensors="pt").input_ids.to(subject.device)


def prompt(subject: Subject, length: int) -> torch.Tensor:
    """Returns the first `length` tokens of the document, which is repeated where it is too short: `(1, L)`."""
    _, tokens = _loaded(subject)
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]


def generate(subject: Subject, workload: Workload, prompt_expansion: str | None) -> Result:
    """
    Runs and times one call.

    Args:
        subject ([`Subject`]): The model, which is loaded at the first call and kept.
        workload ([`Workload`]): What to generate.
        prompt_expansion (`str`, *optional*): The fork's strategy. None leaves the argument out: upstream has none.
    """
    model, _ = _loaded(subject)
    input_ids = prompt(subject, workload.length)
    arguments = workload.arguments()
    if prompt_expansion is not None:
        arguments["prompt_expansion"] = prompt_expansion
    torch.manual_seed(0)
    measurement = Measurement()
    with recorded(model, measurement), timed_prefill(model) as prefill, peak_memory(model.device) as memory:
        start, cpu_start = time.perf_counter(), time.process_time()
        sequences = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)
        synchronize(model.device)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Result(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        prefill_seconds=prefill["seconds"],
        rows=measurement.forwards[0][0],
        cache_bytes=measurement.peak_cache_bytes,
        peak_memory_bytes=memory.get("bytes"),
        tokens=sequences[:, workload.length :].tolist(),
    )


@contextmanager
def timed_prefill(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Times the first forward pass."""
    times: dict[str, float] = {}

    def before(module: torch.nn.Module, args: tuple) -> None:
        times.setdefault("start", time.perf_counter())

    def after(module: torch.nn.Module, args: tuple, output: Any) -> None:
        if "seconds" not in times:
            synchronize(model.device)
            times["seconds"] = time.perf_counter() - times["start"]

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Measures by how much memory grows at most. Gives nothing where the system doesn't tell."""
    growth: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield growth
        growth["bytes"] = torch.cuda.max_memory_allocated(device) - before
    elif device.type == "cpu" and sys.platform == "linux":
        # What the allocator kept from the call before would not be missed now
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = _status_bytes("VmRSS")
        yield growth
        growth["bytes"] = _status_bytes("VmHWM") - before
    else:
        yield growth


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def prefill_flops(subject: Subject, rows: int, length: int) -> int:
    """Counts the floating-point operations of a prefill of `(rows, length)` tokens, without computing it."""
    model, _ = _loaded(subject)
    with torch.device("meta"):
        shapes_only = type(model)(model.config).eval()
        tokens = torch.zeros(rows, length, dtype=torch.long)
        # A mask of four dimensions is taken as it is. Another one would be looked into, which holds nothing here
        mask = torch.ones(rows, 1, length, length, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shapes_only(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return counter.get_total_flops()
