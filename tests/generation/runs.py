# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
One call of `generate` with all that tests look at. Runs here and, by name, in the oracle; what it returns
travels as safetensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load, save
from torch.utils.flop_counter import FlopCounterMode

from transformers import EncoderDecoderCache, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from .changes import CHANGES
from .oracle import Oracle
from .tiny_models import build_inputs, build_model


MODES = {
    "sample": lambda expand_size: {"do_sample": True, "num_return_sequences": expand_size},
    "beam": lambda expand_size: {"num_beams": expand_size, "num_return_sequences": expand_size},
    "beam_sample": lambda expand_size: {
        "do_sample": True,
        "num_beams": expand_size,
        "num_return_sequences": expand_size - 1,
    },
}
# Layers have some of these: attention keys and values, linear attention states by position
CACHED_STATES = ("keys", "values", "conv_states", "recurrent_states")
STATES = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states", "cache")
ALL_OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

_oracle: Oracle | None = None


def oracle() -> Oracle:
    """The oracle of this test process, started at its first use."""
    global _oracle
    if _oracle is None:
        _oracle = Oracle()
    return _oracle


class Recorder(BaseStreamer, StoppingCriteria):
    """Streamer and stopping criteria that keep the shapes (and the streamed tokens) that they are shown."""

    def __init__(self):
        self.streamed, self.criteria_shapes = [], []

    def put(self, value: torch.Tensor) -> None:
        self.streamed.append(value.clone())

    def end(self) -> None:
        self.streamed.append(torch.tensor(-1))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs) -> torch.Tensor:
        self.criteria_shapes.append(torch.tensor(input_ids.shape))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@contextmanager
def forwarded(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Collects (rows, query length) of each forward of `model`'s decoder."""
    shapes = []

    def record(module, args, kwargs):
        named = [kwargs.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds")]
        given = next(value for value in [*named, *args] if value is not None)
        shapes.append(tuple(given.shape[:2]))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    yield shapes
    handle.remove()


@contextmanager
def first_flops(model: PreTrainedModel) -> Iterator[list[int]]:
    """
    Counts the floating-point operations of each forward of `model`'s decoder, in hooks on `model` itself: a method that is
    replaced is one of the caller's, which gets all rows.
    """
    flops, counters = [], []

    def start(*_):
        counters.append(FlopCounterMode(display=False))
        counters[-1].__enter__()

    def stop(*_):
        counter = counters.pop()
        counter.__exit__(None, None, None)
        flops.append(counter.get_total_flops())

    handles = [model.register_forward_pre_hook(start), model.register_forward_hook(stop)]
    yield flops
    for handle in handles:
        handle.remove()


def flatten(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Names each tensor of a nested output: `{"scores.0": ..., "attentions.0.1": ...}`."""
    if isinstance(value, torch.Tensor):
        return {name: value.contiguous().clone()}
    if isinstance(value, EncoderDecoderCache):
        value = (value.self_attention_cache, value.cross_attention_cache)
    if hasattr(value, "layers"):
        value = [[getattr(layer, states, None) for states in CACHED_STATES] for layer in value.layers]
    if type(value) is dict:
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        parts = [flatten(f"{name}.{position}", part) for position, part in enumerate(value)]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {}


def run(
    name: str,
    batch_size: int,
    arguments: dict[str, Any],
    inputs: dict[str, torch.Tensor] | None = None,
    attn_implementation: str | None = None,
    record: bool = False,
    training: bool = False,
    dtype: torch.dtype = torch.float32,
    change: str | None = None,
) -> bytes:
    """
    Generates with a tiny model after `torch.manual_seed(0)`.

    Args:
        name (`str`): The model, see `tiny_models`.
        batch_size (`int`): Number B of prompts.
        arguments (`dict`): Arguments of `generate` besides the prompts.
        inputs (`dict`, *optional*): Prompts in place of those of `build_inputs`.
        attn_implementation (`str`, *optional*): The attention implementation.
        record (`bool`, *optional*, defaults to `False`): Whether to pass a `Recorder` as streamer (unless there are
            beams) and as stopping criteria.
        training (`bool`, *optional*, defaults to `False`): Whether the model is in training mode.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): The type of the weights.
        change (`str`, *optional*): What is done to the model before, see `changes`.

    Returns:
        `bytes`: The output fields by name, `rows`, `query_length` and `prefill_flops` of the first forward, and
        `forwards`, as safetensors.
    """
    model = build_model(name, attn_implementation).train(training).to(dtype)
    inputs = build_inputs(name, batch_size) if inputs is None else inputs
    arguments = {**arguments}
    if change is not None:
        CHANGES[change](model)
    recorder = Recorder()
    if record:
        arguments["stopping_criteria"] = [recorder]
        if arguments.get("num_beams", 1) == 1:
            arguments["streamer"] = recorder
    torch.manual_seed(0)
    with forwarded(model) as shapes, first_flops(model) as flops:
        output = model.generate(**inputs, **arguments)
    fields = output.items() if isinstance(output, dict) else [("sequences", output)]
    tensors = {key: tensor for field, value in fields for key, tensor in flatten(field, value).items()}
    tensors |= flatten("streamed", recorder.streamed) | flatten("criteria", recorder.criteria_shapes)
    tensors |= {
        "rows": torch.tensor(shapes[0][0]),
        "query_length": torch.tensor(shapes[0][1]),
        "forwards": torch.tensor(len(shapes)),
        "prefill_flops": torch.tensor(flops[0]),
    }
    return save(tensors)


def run_both(
    name: str, batch_size: int, arguments: dict[str, Any], fork_arguments: dict[str, Any] | None = None, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Runs `run` here, with `fork_arguments` in addition, and in the oracle, and returns what each has given."""
    ours = run(name, batch_size, {**arguments, **(fork_arguments or {})}, **kwargs)
    return load(ours), load(oracle().run(run, name, batch_size, arguments, **kwargs))


def assert_same(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    tolerance: float = 1e-5,
    state_tolerance: float | None = None,
) -> None:
    """
    Asserts that all output fields agree: integers are equal, floating-point numbers to `tolerance`, hidden states and
    caches to `state_tolerance` (by default the same). The counts that are meant to differ (`rows`, `prefill_flops`) are
    left to the caller.
    """
    counts = {"rows", "prefill_flops"}
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    for key in sorted(ours.keys() - counts, key=lambda key: (key != "sequences", key)):
        if theirs[key].is_floating_point():
            is_state = state_tolerance is not None and key.partition(".")[0] in STATES
            limit = state_tolerance if is_state else tolerance
            torch.testing.assert_close(ours[key], theirs[key], atol=limit, rtol=limit, msg=_difference(key))
        else:
            assert torch.equal(ours[key], theirs[key]), f"{key}:\n{ours[key]}\n{theirs[key]}"


def _difference(key: str):
    return lambda message: f"{key}: {message}"
