# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
A common prefix: different prompts of a batch that begin alike (a system prompt, few-shot examples, a document) compute their
common beginning once, on one row. Then the tails of the distinct prompts go on from it.

    prompts      [pad pad  p p p p  a a a]         prefix   [p p p p]                    1 row
                 [pad  p p p p  b b b b  ]         tails             [pad a a a]         U rows
                 [ p p p p  c c c c      ] ...              [ b  b b b]

Tails are padded between prefix and tail, so that nothing but the cache and its mask has this layout: the decoding loop goes on
with the tokens as they were given. Positions come from the mask.

Shapes: B batch items, U distinct prompts, L prompt length, P prefix length, T length of the longest tail.
"""

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from .prefill_obstacles import is_on_probation


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel
    from .configuration_utils import GenerationConfig

# What the tokens of a prompt are read with
TOKEN_INPUTS = ("attention_mask", "cache")
# A prefix of fewer tokens, or that saves fewer, costs more by its own forward than it saves
MINIMAL_TOKENS = 128
MINIMAL_SAVING = 1024


@dataclass(frozen=True)
class CommonPrefix:
    """
    What the prompts of a batch have in common.

    Args:
        length (`int`): Number P of tokens, at least one less than the shortest prompt has.
        starts (`list[int]`): The number of pads before each of the B prompts.
        prompt_length (`int`): Number L of tokens of a prompt, its pads included.
        has_mask (`bool`, *optional*, defaults to `True`): Whether the pads are known from a mask. If not, none were seen.
    """

    length: int
    starts: list[int]
    prompt_length: int
    has_mask: bool = True

    def pays(self, prompts: int) -> bool:
        """Whether it is worth a forward of its own for a number of distinct prompts."""
        return self.length >= MINIMAL_TOKENS and (prompts - 1) * self.length >= MINIMAL_SAVING

    def of_length(self, length: int) -> "CommonPrefix":
        """The first tokens of the prefix."""
        return replace(self, length=length)

    def select(self, rows: list[int]) -> "CommonPrefix":
        """The prefix of some of the prompts."""
        return replace(self, starts=[self.starts[row] for row in rows])

    @property
    def alone(self) -> "CommonPrefix":
        """The prefix as a prompt by itself."""
        return replace(self, starts=[0], prompt_length=self.length)

    @property
    def is_ragged(self) -> bool:
        """Whether prompts differ in length."""
        return len(set(self.starts)) > 1

    @property
    def cached_length(self) -> int:
        """Number P + T of tokens of a row in the cache after the prefill."""
        return self.prompt_length - min(self.starts)

    def tokens(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        """The prefix `(1, P)` of prompts `(B, L)`."""
        return input_ids[:1, self.starts[0] : self.starts[0] + self.length]

    def rearrange(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        """Makes `[prefix, pads, tail]`, `(B, P + T)`, of prompts `(B, L)`."""
        tails = input_ids[:, input_ids.shape[1] - self.cached_length + self.length :]
        return torch.cat([self.tokens(input_ids).expand(input_ids.shape[0], -1), tails], dim=1)

    def mask(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        """The mask `(B, P + T)` of rearranged prompts."""
        starts = torch.tensor(self.starts, device=input_ids.device)[:, None]
        columns = torch.arange(self.cached_length, device=input_ids.device)[None]
        is_pad = (columns >= self.length) & (columns < self.length + starts - min(self.starts))
        return (~is_pad).long()


def align(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """
    Looks for what prompts have in common, without waiting for their device.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`): The prompts.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): Their mask.

    Returns:
        `torch.LongTensor` of shape `(B + 2,)`: Whether all pads are on the left, the number of equal tokens at the beginning,
        and the number of pads before each prompt.
    """
    rows, length = input_ids.shape
    columns = torch.arange(length, device=input_ids.device)[None]
    if attention_mask is None:
        starts = torch.zeros(rows, 1, dtype=torch.long, device=input_ids.device)
        is_left = torch.ones(1, dtype=torch.long, device=input_ids.device)
    else:
        starts = (attention_mask == 0).long().cumprod(1).sum(1, keepdim=True)
        is_left = ((attention_mask != 0) == (columns >= starts)).all().long()[None]
    aligned = input_ids.gather(1, (columns + starts).clamp_max(length - 1))
    is_equal = (aligned == aligned[:1]).all(0) & (columns[0] + 1 < length - starts.max())
    return torch.cat([is_left, is_equal.long().cumprod(0).sum()[None], starts[:, 0]])


def why_not_common_prefix(
    model: "PreTrainedModel", generation_config: "GenerationConfig", inputs: dict[str, Any], input_ids: torch.Tensor
) -> str | None:
    """Returns why a common beginning of the prompts can't be computed by itself, or `None` if it can."""
    if model.config.is_encoder_decoder:
        return "an encoder reads prompts as a whole"
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        return "prompts are no tokens"
    if is_on_probation(model):
        return "the model has code from outside of the library"
    if not generation_config.use_cache:
        return "there is no cache"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"a {generation_config.cache_implementation!r} cache is asked for"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "states of the whole prompt are asked for"
    for name, value in inputs.items():
        if name not in TOKEN_INPUTS and not (value is None or isinstance(value, (bool, int, float, str))):
            return f"it isn't known what of `{name}` belongs to the common tokens"
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        return "the mask is not that of the tokens"
    return None


def why_not_layout(model: "PreTrainedModel", prefix: CommonPrefix, is_returned: bool) -> str | None:
    """
    Returns why the model can't read a prefix followed by tails, or `None` if it can.

    Where distance is counted in the cache, not by positions, pads between prefix and tail would be counted.
    """
    from .utils import GenerationMixin

    kinds = {type(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers}
    if model._reads_prompt_as_whole or hasattr(model, "create_masks_for_generate"):
        return "the model reads a prompt as a whole"
    if not model._supports_default_dynamic_cache() or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "the model's cache holds other states than keys and values"
    if is_returned and (prefix.is_ragged or prefix.starts[0] > 0):
        return "the cache is returned, with its pads"
    has_own_inputs = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    has_positions = "position_ids" in inspect.signature(model.forward).parameters and not has_own_inputs
    if prefix.is_ragged and (DynamicSlidingWindowLayer in kinds or model._counts_tokens_in_cache or not has_positions):
        return "prompts differ in length, and the model counts distance in its cache"
    return None


def continue_cache(cache: Cache) -> Cache:
    """Returns a cache that goes on from the states of another one, which stays as it is."""
    copied = object.__new__(type(cache))
    vars(copied).update(vars(cache), layers=[])
    copied._is_user_defined = False
    for layer in cache.layers:
        other = object.__new__(type(layer))
        vars(other).update(vars(layer))
        copied.layers.append(other)
    return copied
