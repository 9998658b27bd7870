# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What single models carry from the prefill to the decoding steps outside of a cache, and layouts of their own. Each mixin is
a base of the model's class, and overrides what [`PrefillMixin`] says about every model.
"""

from typing import Any

import torch

from ..utils import ModelOutput


class RwkvPrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        if outputs.state is not None:
            outputs.state = [state.repeat_interleave(expand_size, dim=0) for state in outputs.state]


class XLNetPrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        # Memories are (L, B, D)
        if outputs.mems is not None:
            outputs.mems = tuple(memory.repeat_interleave(expand_size, dim=1) for memory in outputs.mems)


class ReformerPrefillMixin:
    # Hashes of the prompt are drawn once for all rows
    _draws_for_each_row = False

    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        if outputs.past_buckets_states is not None:
            outputs.past_buckets_states.batch_repeat_interleave(expand_size)


class RecurrentGemmaPrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        for module in self.modules():
            for name in ("conv1d_state", "recurrent_states"):
                if isinstance(state := getattr(module, name, None), torch.Tensor):
                    setattr(module, name, state.repeat_interleave(expand_size, dim=0))


class GlmImagePrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        if (position_ids := self.model._cached_decode_position_ids) is not None:
            self.model._cached_decode_position_ids = position_ids.repeat_interleave(expand_size, dim=0)


class IdeficsPrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        # One row per image: (B * images, ...). The images of a prompt stay together
        image_states = outputs.image_outputs.last_hidden_state
        rows = outputs.logits.shape[0] // expand_size
        grouped = image_states.unflatten(0, (rows, -1)).repeat_interleave(expand_size, dim=0)
        outputs.image_outputs.last_hidden_state = grouped.flatten(0, 1)


class FuyuPrefillMixin:
    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        # Without a cache the image is read at every step. Its features, (B, patches, D), are not among those that
        # `generate` expands with the inputs, which have a `pooler_output`
        if (image := (model_kwargs.get("mm_encoder_outputs") or {}).get("image")) is not None:
            image.last_hidden_state = image.last_hidden_state.repeat_interleave(expand_size, dim=0)


class StreamingAudioPrefillMixin:
    """Models that read further chunks of their audio at every decoding step, by an encoder with caches of its own."""

    _reads_inputs_while_decoding = True

    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        caches = [
            source.get(name) for source in (outputs, model_kwargs) for name in ("encoder_cache", "padding_cache")
        ]
        for cache in {id(cache): cache for cache in caches if cache is not None}.values():
            cache.batch_repeat_interleave(expand_size)


class Gemma3nPrefillMixin:
    def _hidden_state_row_dim(self, hidden_state: torch.Tensor) -> int:
        # All but the last state stack the alternating updates in front: (altup_num_inputs, B, L, D)
        return 1 if hidden_state.ndim == 4 else 0


class OwnDecoderStatePrefillMixin:
    """Transducers, whose decoder keeps a state per row."""

    def _why_not_prefill_once(self, model_kwargs: dict[str, Any]) -> str | None:
        return "the decoder keeps its own state"


class TalkerPrefillMixin:
    """Talkers of the omni models."""

    def _why_not_prefill_once(self, model_kwargs: dict[str, Any]) -> str | None:
        return "what the thinker has said is kept beside the cache"


class VibeVoiceAsrPrefillMixin:
    def _why_not_prefill_once(self, model_kwargs: dict[str, Any]) -> str | None:
        if model_kwargs.get("input_values") is not None and model_kwargs.get("sample", True):
            return "the prefill draws noise for each row of `input_values`, unless `sample=False`"
        return None


class NllbMoePrefillMixin:
    def _why_not_prefill_once(self, model_kwargs: dict[str, Any]) -> str | None:
        # Experts with a capacity drop tokens depending on all rows of the batch, unless they have room for all
        if self.training or self.config.moe_eval_capacity_token_fraction < 1.0:
            return "the capacity of the experts depends on the number of rows (`moe_eval_capacity_token_fraction`)"
        return None


class WholePromptPrefillMixin:
    """For models whose prompt can't be forwarded in parts, or that keep nothing of the first part."""

    _reads_prompt_as_whole = True


class DistanceInCachePrefillMixin:
    """For models with local attention that counts the tokens of the cache, pads included."""

    _counts_tokens_in_cache = True
