# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Builds an architecture's tiny model and generates with it: runs alike with the fork and in the oracle."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

import transformers
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from .configs import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, tiny_config
from .image_inputs import image_inputs
from .sound_inputs import sound_inputs
from .text_inputs import text_inputs, to_dtype


NUM_SEQUENCES = 4
MAX_NEW_TOKENS = 5
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "num_beams": 1, "num_return_sequences": 1},
    "sample": {"do_sample": True, "num_beams": 1, "num_return_sequences": NUM_SEQUENCES},
    "beam": {"do_sample": False, "num_beams": NUM_SEQUENCES, "num_return_sequences": NUM_SEQUENCES},
    "beam sample": {"do_sample": True, "num_beams": NUM_SEQUENCES, "num_return_sequences": NUM_SEQUENCES},
}


INPUTS = {"text": text_inputs, "images": image_inputs, "sound": sound_inputs}


@dataclass(frozen=True)
class Generation:
    """
    What one call of `generate` did.

    Args:
        first_rows (`int`): Rows of the logits of the first forward pass of the generative model.
        tensors (`dict[str, torch.Tensor]`): Everything that was returned, by name.
    """

    first_rows: int
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """The generations of one architecture by mode, and a digest of the weights that they were made with."""

    weights: str
    generations: dict[str, Generation] = field(default_factory=dict)


class FirstForward:
    """Notes the rows of the logits of the first forward pass among the generative models in `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: int | None = None
        self._module: torch.nn.Module | None = None
        self._hooks = []
        for module in model.modules():
            if isinstance(module, GenerationMixin):
                self._hooks.append(module.register_forward_pre_hook(self._start))
                self._hooks.append(module.register_forward_hook(self._end))

    def _start(self, module: torch.nn.Module, args: Any) -> None:
        self._module = self._module or module

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.rows is None and module is self._module:
            self.rows = output.logits.shape[0]

    def __enter__(self) -> "FirstForward":
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()


def build_model(model_type: str, class_name: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, the same in every process."""
    model_class = getattr(transformers, class_name)
    config = _own_config(tiny_config(model_type), model_class)
    torch.manual_seed(seed)
    # The grouped matrix products of the other implementations lack float64
    model = model_class._from_config(config, dtype=dtype, experts_implementation="eager").eval()
    _randomise(model)
    for module in model.modules():
        if isinstance(module, GenerationMixin) and module.generation_config is not None:
            module.generation_config.bos_token_id = BOS_TOKEN_ID
            module.generation_config.eos_token_id = EOS_TOKEN_ID
            module.generation_config.pad_token_id = PAD_TOKEN_ID
            if module.config.is_encoder_decoder:
                module.generation_config.decoder_start_token_id = BOS_TOKEN_ID
    return model


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


def run(kind: str, model_type: str, class_name: str, dtype: torch.dtype = torch.float64) -> Run:
    model = build_model(model_type, class_name, dtype)
    inputs = to_dtype(INPUTS[kind](model), model.dtype)
    result = Run(weights=digest(model))
    for mode, arguments in MODES.items():
        result.generations[mode] = generate(model, inputs, arguments)
    return result


def generate(model: PreTrainedModel, inputs: dict[str, Any], arguments: dict[str, Any]) -> Generation:
    torch.manual_seed(1)
    with FirstForward(model) as first:
        output = model.generate(
            **inputs,
            **arguments,
            max_new_tokens=MAX_NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tensors = {"sequences": output.sequences, "scores": torch.stack(output.scores)}
    tensors |= {name: output[name] for name in ("sequences_scores", "beam_indices") if output.get(name) is not None}
    return Generation(first.rows, tensors)
