# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What people do to a model before they generate, for any of the tiny models, here and in the oracle."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from transformers import DynamicCache, PreTrainedModel


def row_offsets(logits: torch.Tensor) -> torch.Tensor:
    """Something else for each row, (rows, 1, V)."""
    rows, words = (torch.arange(float(size)) for size in (len(logits), logits.shape[-1]))
    return torch.sin(rows[:, None, None] * words)


def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + row_offsets(output)


def add_noise(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.3 * torch.randn_like(output)


def steer_before(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + row_offsets(args[0]),)


def look_on(module: nn.Module, args: Any) -> None:
    pass


class Dropped(nn.Module):
    """An output layer with dropout, in training mode whatever the model is in."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.3)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(states))


def _hook(change: Callable, before: bool = False) -> Callable[[PreTrainedModel], None]:
    def register(model: PreTrainedModel) -> None:
        layer = model.get_output_embeddings()
        layer.register_forward_pre_hook(change) if before else layer.register_forward_hook(change)

    return register


def _drop(model: PreTrainedModel) -> None:
    model.set_output_embeddings(Dropped(model.get_output_embeddings()).train())


def _override(name: str) -> Callable[[PreTrainedModel], None]:
    """A subclass with a method of its own, which does what the inherited one does."""

    def change(model: PreTrainedModel) -> None:
        inherited = getattr(type(model), name)
        model.__class__ = type(f"Own{type(model).__name__}", (type(model),), {})

        def method(self, *args, **kwargs):
            return inherited(self, *args, **kwargs)

        setattr(type(model), name, method)

    return change


def _vary_copies(model: PreTrainedModel) -> None:
    inherited = type(model)._expand_inputs_for_generation
    model.__class__ = type(f"Own{type(model).__name__}", (type(model),), {})

    def expand(self, **kwargs):
        input_ids, kwargs = inherited(self, **kwargs)
        input_ids = input_ids.clone()
        input_ids[:, 0] = torch.arange(len(input_ids)) % 40 + 5
        return input_ids, kwargs

    type(model)._expand_inputs_for_generation = expand


class RecentCache(DynamicCache):
    """Lets attention see the last tokens alone, while decoding."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return (keys[:, :, -4:], values[:, :, -4:]) if key_states.shape[2] == 1 else (keys, values)


CHANGES = {
    "steer": _hook(steer),
    "noise": _hook(add_noise),
    "steer before": _hook(steer_before, before=True),
    "look on": _hook(look_on, before=True),
    "dropout": _drop,
    "copies": _vary_copies,
    "own update": _override("_update_model_kwargs_for_generation"),
    "own cache": _override("_prepare_cache_for_generation"),
}
# With these the prompt is forwarded once per row of the batch
ONCE = ("look on",)
