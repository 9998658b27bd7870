# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Builds an architecture's tiny model and generates with it: runs alike with the fork and in the oracle."""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch

import transformers
from transformers import Cache, EncoderDecoderCache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .configs import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, VOCABULARY_SIZE, tiny_config
from .image_inputs import IMAGES_PER_ROW, NUM_PATCHES, image_inputs
from .sound_inputs import sound_inputs
from .text_inputs import BATCH_SIZE, ONE_ROW_PER_CODEBOOK, Inputs, text_inputs, to_dtype


MAX_NEW_TOKENS = 5
SEVERAL_PER_ROW = IMAGES_PER_ROW
INPUTS = {
    "text": text_inputs,
    "images": image_inputs,
    "sound": sound_inputs,
    "sounds": partial(sound_inputs, sounds_per_row=SEVERAL_PER_ROW),
}


@dataclass(frozen=True)
class Generation:
    """
    What one call of `generate` did.

    Args:
        first_rows (`int`): Rows of the logits of the first forward pass of the generative model.
        cache (`str`): The cache that this forward pass returned: its class and those of its layers.
        attention_layers (`int`): Layers of this cache that hold keys and values.
        shared_layers (`int`): The most of them that held the prompt once for several rows.
        expanding (`tuple[str, ...]`): The operations for which layers that shared had to take all rows.
        strategy (`str`): How the fork expanded the prompt. Empty for one sequence per prompt and in the oracle.
        reason (`str`): Why it did so.
        tensors (`dict[str, torch.Tensor]`): The sequences with their scores, by name.
    """

    first_rows: int
    cache: str
    attention_layers: int
    shared_layers: int
    expanding: tuple[str, ...]
    strategy: str
    reason: str
    tensors: dict[str, torch.Tensor]


def run(
    kind: str,
    model_type: str,
    class_name: str,
    dtype: torch.dtype,
    calls: dict[str, dict[str, Any]],
    expanded_by_caller: bool = False,
) -> tuple[str, dict[str, Generation]]:
    """
    Generates from two prompts with a tiny model.

    Args:
        kind (`str`): What the prompts hold, a key of `INPUTS`.
        model_type (`str`): The model type.
        class_name (`str`): The class of the model.
        dtype (`torch.dtype`): The dtype of the model.
        calls (`dict[str, dict]`): For each call of `generate`, by name, its arguments besides the prompt.
        expanded_by_caller (`bool`, *optional*, defaults to `False`):
            Whether `generate` gets repeated rows in place of repeating them.

    Returns:
        `tuple`: A digest of the weights, and for each call what it did.
    """
    model = build_model(model_type, class_name, dtype)
    inputs = to_dtype(INPUTS[kind](model), dtype)
    weights = digest(model)
    if expanded_by_caller:
        model._expand_inputs_for_generation = _keep_rows
    generations = {}
    for name, arguments in calls.items():
        repeats = max(arguments["num_beams"], arguments["num_return_sequences"]) if expanded_by_caller else 1
        generations[name] = generate(model, repeat_rows(inputs, repeats), arguments)
    return weights, generations


def build_model(model_type: str, class_name: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, the same in every process."""
    model_class = getattr(transformers, class_name)
    config = _own_config(tiny_config(model_type), model_class)
    torch.manual_seed(seed)
    # The grouped matrix products of the other implementations of experts lack float64
    model = model_class._from_config(config, dtype=dtype, experts_implementation="eager").eval()
    _randomise(model)
    for module in model.modules():
        if isinstance(module, GenerationMixin) and module.generation_config is not None:
            _configure_generation(module)
    return model


def _configure_generation(model: PreTrainedModel) -> None:
    generation_config = model.generation_config
    generation_config.use_cache = True
    generation_config.bos_token_id = generation_config.decoder_start_token_id = BOS_TOKEN_ID
    generation_config.eos_token_id = EOS_TOKEN_ID
    generation_config.pad_token_id = PAD_TOKEN_ID
    if model.config.model_type in ONE_ROW_PER_CODEBOOK:
        # The delay pattern is filled with a token behind the vocabulary, and rows can't end early
        generation_config.decoder_start_token_id = generation_config.pad_token_id = VOCABULARY_SIZE
        generation_config.eos_token_id = None


def _own_config(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The part of a composite configuration that belongs to the class."""
    parts = [config, *(getattr(config, name, None) for name in type(config).sub_configs)]
    return next((part for part in parts if isinstance(part, model_class.config_class)), config)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights so large that each token, layer and row matters; initialisation leaves many gates and biases at zero."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)


def digest(model: PreTrainedModel) -> str:
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def generate(model: PreTrainedModel, inputs: Inputs, arguments: dict[str, Any]) -> Generation:
    torch.manual_seed(1)
    with watch_forwards(model) as seen, strategies() as taken:
        output = model.generate(
            **inputs,
            **arguments,
            max_new_tokens=MAX_NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tensors = {"sequences": output.sequences, "scores": torch.stack(output.scores)}
    tensors |= {name: output[name] for name in ("sequences_scores", "beam_indices") if output.get(name) is not None}
    strategy, reason = taken[0] if taken else ("", "")
    layers = seen["attention_layers"], seen["shared_layers"], tuple(sorted(seen["expanding"]))
    return Generation(seen["rows"], seen["cache"], *layers, strategy, reason, tensors)


@contextmanager
def watch_forwards(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """
    Notes the rows of the logits, and the cache, of the first forward pass of a model that generates, and how the layers of
    the cache share in the passes of the same model. Parts of `model` have hooks only while they generate by themselves: else
    these would look like hooks that treat rows differently.
    """
    seen: dict[str, Any] = {"attention_layers": 0, "shared_layers": 0, "expanding": set()}

    def start(module: torch.nn.Module, args: Any) -> None:
        # A generative part inside of another one ends first, but starts later
        seen.setdefault("module", module)

    def end(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is seen["module"]:
            # Not every model returns the cache that it was given
            state = {"cache": kwargs.get("cache")} | output
            seen.setdefault("rows", output.logits.shape[0])
            seen.setdefault("cache", _describe_cache(state))
            _note_sharing(state.get("cache"), seen)

    @contextmanager
    def hooked(module: PreTrainedModel) -> Iterator[None]:
        hooks = [module.register_forward_pre_hook(start), module.register_forward_hook(end, with_kwargs=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    own = GenerationMixin.generate

    @wraps(own)
    def generate(module: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if module is model else hooked(module):
            return own(module, *args, **kwargs)

    # Some models have a `generate` that doesn't call the library's
    with hooked(model), mock.patch.object(GenerationMixin, "generate", generate):
        yield seen


def _note_sharing(cache: Any, seen: dict[str, Any]) -> None:
    parts = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if isinstance(cache, EncoderDecoderCache)
        else (cache,)
    )
    layers = [layer for part in parts if isinstance(part, Cache) for layer in part.layers]
    attention_layers = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    # The oracle has no class to ask for
    shared = [
        layer
        for layer in attention_layers
        if any(getattr(states, "segments", ()) and states.settle() is states for states in vars(layer).values())
    ]
    seen["attention_layers"] = max(seen["attention_layers"], len(attention_layers))
    seen["shared_layers"] = max(seen["shared_layers"], len(shared))
    origins = getattr(cache, "shared_origins", {}).values()
    seen["expanding"].update(origin.expanded_by for origin in origins if origin.expanded_by is not None)


def _describe_cache(output: Any) -> str:
    state = next(
        (name for name in ("cache", "state", "mems", "past_buckets_states") if output.get(name) is not None), None
    )
    if state is None:
        return "none"
    cache = output[state]
    if isinstance(cache, EncoderDecoderCache):
        parts = [_describe_layers(cache.self_attention_cache), _describe_layers(cache.cross_attention_cache)]
        return f"{type(cache).__name__} ({'; '.join(parts)})"
    if isinstance(cache, Cache):
        return f"{type(cache).__name__} ({_describe_layers(cache)})"
    return type(cache).__name__ if state == "cache" else f"`{state}`"


def _describe_layers(cache: Cache) -> str:
    return ", ".join(dict.fromkeys(type(layer).__name__ for layer in cache.layers))


@contextmanager
def strategies() -> Iterator[list[tuple[str, str]]]:
    """Collects the strategies, with their reasons, that the fork logs."""
    taken = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r"prompt_expansion='(\w+)' \((.*)\)", record.getMessage()):
                taken.append((found[1], found[2]))

    logger, collector = logging.getLogger("transformers.generation.prefill"), Collector()
    level, propagate = logger.level, logger.propagate
    # The message is logged once per model class
    logging.Logger.info_once.cache_clear()
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield taken
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.propagate = propagate


def repeat_rows(inputs: Inputs, repeats: int) -> Inputs:
    """Repeats each row in place of it: `[x, y] -> [x, x, y, y]`, where x and y have all images or sounds of a row."""
    if repeats == 1:
        return inputs
    return {
        name: _repeat_tensor(value, repeats) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def _repeat_tensor(tensor: torch.Tensor, repeats: int) -> torch.Tensor:
    sizes_of_rows = {
        BATCH_SIZE: [1] * BATCH_SIZE,
        sum(SEVERAL_PER_ROW): SEVERAL_PER_ROW,
        sum(NUM_PATCHES): [sum(NUM_PATCHES[:1]), sum(NUM_PATCHES[1:])],
    }
    rows = tensor.split(list(sizes_of_rows[tensor.shape[0]]))
    return torch.cat([row.repeat(repeats, *[1] * (tensor.ndim - 1)) for row in rows])


def _keep_rows(
    expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: torch.Tensor | None = None, **model_kwargs: Any
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """In place of `_expand_inputs_for_generation` where the rows are repeated already."""
    return input_ids, model_kwargs
