# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Prefill once: the prompt of B items is forwarded on B rows, then its logits and its cache become the B * N rows that
decoding needs (N = `max(num_beams, num_return_sequences)`). Asked for in huggingface/transformers#27449.

Shapes: B batch items, N rows per item, L prompt length, V vocabulary size.
"""

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..cache_expansion import cache_rows, cannot_expand
from ..cache_utils import EncoderDecoderCache
from ..utils import ModelOutput, logging
from .equal_rows import EqualRows, EqualRowsMixin
from .prefill_hooks import (
    STREAMING_MODELS,
    expand_model_state,
    hidden_states_row_dim,
    why_expand_first,
    why_training_matters,
)


if TYPE_CHECKING:
    from .configuration_utils import GenerationConfig
    from .logits_process import LogitsProcessorList


logger = logging.get_logger(__name__)

# Fields of a model output that hold one tensor, or a (nested) tuple of tensors, with one row per sequence
ATTENTION_FIELDS = ("attentions", "decoder_attentions", "cross_attentions")
HIDDEN_STATE_FIELDS = ("hidden_states", "decoder_hidden_states", "last_hidden_state")


def repeat_rows(
    value: Any,
    expand_size: int | torch.LongTensor,
    rows: int,
    row_dim: Callable[[torch.Tensor], int] | None = None,
) -> Any:
    """
    Repeats each row of the tensors in `value` `expand_size` times, in place of the row: `[a, b] -> [a, a, b, b]`.

    Args:
        value (`torch.Tensor`, `tuple` or `list` of such, or `None`):
            Tensors with `rows` rows.
        expand_size (`int` or `torch.LongTensor`):
            Number of copies of a row. Or the indices of the rows to take, in any order.
        rows (`int`):
            Number of rows that the tensors must have.
        row_dim (`Callable`, *optional*):
            Gives the row dimension of a tensor. The first one if unset.

    Raises:
        `ValueError`: If a tensor doesn't have `rows` rows: its layout isn't known, and a guess would mix up sequences.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(repeat_rows(item, expand_size, rows, row_dim) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    dim = row_dim(value) if row_dim is not None else 0
    if value.shape[dim] != rows:
        raise ValueError(
            f"Can't repeat the rows of an output of shape {tuple(value.shape)}: dimension {dim} must have {rows} rows. "
            'Set `prompt_expansion="recompute"` to generate with this model.'
        )
    if isinstance(expand_size, torch.Tensor):
        return value.index_select(dim, expand_size.to(value.device))
    return value.repeat_interleave(expand_size, dim=dim)


def why_not_expand_cache(cache: Any, batch_size: int, expand_size: int) -> str | None:
    """
    Returns why a cache that the caller passed in can't be expanded after the prefill, or `None` if it can.

    Args:
        cache ([`Cache`], *optional*): The cache, empty or filled with a common prefix of the prompts.
        batch_size (`int`): Number B of prompts.
        expand_size (`int`): Number N of rows per prompt.

    Raises:
        `ValueError`: If the cache has neither B nor B * N rows.
    """
    if cache is None:
        return None
    rows = cache_rows(cache)
    if rows not in (None, batch_size, batch_size * expand_size):
        raise ValueError(
            f"`cache` must hold one row per prompt ({batch_size}) or one row per returned beam or sequence "
            f"({batch_size} * {expand_size} = {batch_size * expand_size}), but it holds {rows} rows."
        )
    if rows is not None and rows != batch_size:
        return f"the cache passed in holds {rows} rows already"
    return cannot_expand(cache)


def detach_from_caller(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Makes shallow copies of the encoder outputs in `model_kwargs`: expansion writes into them, and the ones that the
    caller passed in must stay as they are.
    """
    model_kwargs = dict(model_kwargs)
    if isinstance(model_kwargs.get("encoder_outputs"), dict):
        model_kwargs["encoder_outputs"] = copy.copy(model_kwargs["encoder_outputs"])
    if isinstance(model_kwargs.get("mm_encoder_outputs"), dict):
        model_kwargs["mm_encoder_outputs"] = {
            modality: copy.copy(output) for modality, output in model_kwargs["mm_encoder_outputs"].items()
        }
    return model_kwargs


def outermost_caches(*caches: Any) -> list[Any]:
    """
    Returns each of the caches once, without those that are a part of another one: blip wraps the self-attention cache
    that it is given into an [`EncoderDecoderCache`] of its own.
    """
    caches = {id(cache): cache for cache in caches if cache is not None}
    for cache in list(caches.values()):
        if isinstance(cache, EncoderDecoderCache):
            caches.pop(id(cache.self_attention_cache), None)
            caches.pop(id(cache.cross_attention_cache), None)
    return list(caches.values())


def prefill_rows(generation_config: "GenerationConfig", batch_size: int) -> int:
    """Number of rows that the prefill of `batch_size` prompts runs on, for caches that are initialized before it."""
    # The flag is only there in `generate`: loops of a model's own expand their rows before they prepare a cache
    if getattr(generation_config, "_expand_after_prefill", False):
        equal_rows = generation_config._equal_rows
        return batch_size if equal_rows is None else len(equal_rows.firsts)
    return max(generation_config.num_beams, generation_config.num_return_sequences) * batch_size


class PrefillMixin(EqualRowsMixin):
    """
    The part of [`GenerationMixin`] that turns a prompt of B rows into B * N rows.

    The contract: a decoding method that has the parameter `expand_size` owns the expansion. `generate` hands it B rows
    and `expand_size=N`, and it calls [`PrefillMixin._prefill_and_expand`]. Every other decoding method (a
    `custom_generate` callable or repository, the own loop of a model) gets B * N rows, as it always did.
    """

    def _resolve_prompt_expansion(
        self,
        decoding_method: Callable,
        generation_config: "GenerationConfig",
        batch_size: int,
        model_kwargs: dict[str, Any],
        inputs_tensor: torch.Tensor,
    ) -> int:
        """
        Decides how the prompt is expanded, before any forward pass. The strategy taken is written to
        `generation_config.prompt_expansion` and logged with its reason. Rows of the batch that are equal are written to
        `generation_config._equal_rows`: they are prefilled once.

        Args:
            decoding_method (`Callable`): The method that runs the decoding loop.
            generation_config ([`GenerationConfig`]): The configuration of this call alone. Changed in place.
            batch_size (`int`): Number B of prompts.
            model_kwargs (`dict`): The inputs of the model, not expanded yet.
            inputs_tensor (`torch.Tensor` of shape `(B, ...)`): The main input of the model, or of its encoder.

        Returns:
            `int`: The `expand_size` for the decoding method: N, or 1 where rows are expanded before the prefill.

        Raises:
            `ValueError`: If the strategy asked for isn't possible here, or if the cache passed in has neither B nor
                B * N rows.
        """
        requested = generation_config.prompt_expansion or "auto"
        expand_size = max(generation_config.num_beams, generation_config.num_return_sequences)
        obstacle = self._why_expand_first(decoding_method, generation_config, batch_size, model_kwargs)
        equal_rows, group_size = None, 1
        if obstacle is not None or requested == "recompute":
            strategy, reason = "recompute", obstacle or "asked for"
        else:
            equal_rows = self._find_equal_rows(decoding_method, generation_config, inputs_tensor, model_kwargs)
            group_size = 1 if equal_rows is None else equal_rows.group_size
            strategy, reason = self._choose_cache_expansion(
                requested, expand_size * group_size, generation_config, model_kwargs
            )
        if requested not in ("auto", strategy) and expand_size > 1:
            raise ValueError(f"`prompt_expansion={requested!r}` is not possible: {reason}.")

        generation_config.prompt_expansion = strategy
        generation_config._expand_after_prefill = strategy != "recompute"
        generation_config._equal_rows = equal_rows
        if expand_size * group_size == 1:
            if obstacle is not None and batch_size > 1 and requested != "recompute":
                self._log_all_prefilled(obstacle)
            return 1
        logger.info_once(f"{type(self).__name__}: prompt_expansion={strategy!r} ({reason})")
        return 1 if strategy == "recompute" else expand_size

    def _why_expand_first(
        self,
        decoding_method: Callable,
        generation_config: "GenerationConfig",
        batch_size: int,
        model_kwargs: dict[str, Any],
    ) -> str | None:
        """Returns what stands in the way of a prefill on B rows, or `None` if nothing does."""
        if "expand_size" not in inspect.signature(decoding_method).parameters:
            name = getattr(decoding_method, "__qualname__", type(decoding_method).__name__)
            return f"the decoding method `{name}` doesn't take `expand_size`"
        expand_size = max(generation_config.num_beams, generation_config.num_return_sequences)
        if (reason := why_not_expand_cache(model_kwargs.get("cache"), batch_size, expand_size)) is not None:
            return reason
        if generation_config.token_healing:
            return "token healing may change each row of the prompt"
        if self.training and (reason := why_training_matters(self)) is not None:
            return reason
        return why_expand_first(self, model_kwargs)

    def _choose_cache_expansion(
        self, requested: str, expand_size: int, generation_config: "GenerationConfig", model_kwargs: dict[str, Any]
    ) -> tuple[str, str]:
        """
        Chooses how the cache of a prefill on B rows becomes one of B * N rows.

        Args:
            requested (`str`): The strategy asked for, or `"auto"`.
            expand_size (`int`): Number N of rows per prompt.
            generation_config ([`GenerationConfig`]): The configuration of this call alone. May be changed in place.
            model_kwargs (`dict`): The inputs of the model, not expanded yet.

        Returns:
            `tuple[str, str]`: The strategy, and why it is taken: what stands in the way of the one asked for, if it
            is another.
        """
        return "copy", "the prompt's cache can be repeated"

    def _expand_inputs_before_prefill(
        self, generation_config: "GenerationConfig", **inputs: Any
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """
        Expands the inputs to B * N rows, unless the decoding method does so after its prefill.

        Args:
            generation_config ([`GenerationConfig`]): Holds the strategy, see `_resolve_prompt_expansion`.
            inputs: The arguments of `_expand_inputs_for_generation`.
        """
        if generation_config._expand_after_prefill:
            del inputs["expand_size"], inputs["is_encoder_decoder"]
            return inputs.pop("input_ids"), inputs
        return self._expand_inputs_for_generation(**inputs)

    def _get_expanded_logits_processor(
        self,
        generation_config: "GenerationConfig",
        batch_size: int,
        expand_size: int,
        model_kwargs: dict[str, Any],
        negative_prompt_ids: torch.LongTensor | None,
        negative_prompt_attention_mask: torch.LongTensor | None,
        **kwargs: Any,
    ) -> "LogitsProcessorList":
        """
        Prepares the logits processors for B * N rows.

        Args:
            generation_config ([`GenerationConfig`]): The generation configuration.
            batch_size (`int`): Number B of prompts.
            expand_size (`int`): How many times the decoding method repeats each row of `model_kwargs`.
            model_kwargs (`dict`): The inputs of the model. Processors read the padding from its masks.
            negative_prompt_ids (`torch.LongTensor` of shape `(B, L)` or `(B * N, L)`, *optional*):
                The negative prompts of classifier-free guidance, one per prompt or one per row.
            negative_prompt_attention_mask (`torch.LongTensor` of the same shape, *optional*): Their mask.
            kwargs: The other arguments of `_get_logits_processor`.
        """
        repeats = max(generation_config.num_beams, generation_config.num_return_sequences)
        if negative_prompt_ids is not None and repeats > 1 and negative_prompt_ids.shape[0] == batch_size:
            negative_prompt_ids = negative_prompt_ids.repeat_interleave(repeats, dim=0)
            if negative_prompt_attention_mask is not None:
                negative_prompt_attention_mask = negative_prompt_attention_mask.repeat_interleave(repeats, dim=0)
        if expand_size > 1:
            masks = {
                name: model_kwargs[name].repeat_interleave(expand_size, dim=0)
                for name in ("attention_mask", "decoder_attention_mask")
                if model_kwargs.get(name) is not None
            }
            model_kwargs = {**model_kwargs, **masks}
        return self._get_logits_processor(
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            **kwargs,
        )

    def _prefill_and_expand(
        self,
        input_ids: torch.LongTensor,
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
        expand_size: int = 1,
        is_first_iteration: bool = True,
    ) -> tuple[ModelOutput, torch.LongTensor, dict[str, Any]]:
        """
        Forwards the prompt on the rows given, then expands all that decoding goes on with.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`):
                The prompts, or `(B * N, L)` where they were expanded before.
            generation_config ([`GenerationConfig`]): The generation configuration.
            model_kwargs (`dict`): The other inputs of the model, with as many rows.
            expand_size (`int`, *optional*, defaults to 1): Number of rows to make of each row.
            is_first_iteration (`bool`, *optional*, defaults to `True`): See `_prefill`.

        Returns:
            `tuple`: The outputs of the prefill (logits of the last position only, of shape
            `(B * expand_size, 1, V)`), the `input_ids` of shape `(B * expand_size, L)` and the `model_kwargs`.
        """
        # Decoding methods that `generate` doesn't call bring a configuration of their own
        equal_rows, group_size = getattr(generation_config, "_equal_rows", None), 1
        if equal_rows is None:
            outputs = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)
        else:
            outputs = self._prefill_distinct_rows(
                equal_rows, input_ids, generation_config, model_kwargs, is_first_iteration
            )
            group_size = equal_rows.group_size
        rows, repeats = input_ids.shape[0] // group_size, expand_size * group_size
        if repeats == 1:
            return outputs, input_ids, model_kwargs

        self._expand_outputs(outputs, repeats, rows)
        expand_model_state(self, outputs, model_kwargs, repeats)
        caches = outermost_caches(outputs.get("cache"), model_kwargs.get("cache"))
        for cache in caches:
            self._expand_cache(cache, repeats, generation_config)
        input_ids, model_kwargs = self._expand_inputs_for_generation(
            expand_size=expand_size,
            is_encoder_decoder=self.config.is_encoder_decoder,
            input_ids=input_ids,
            **self._drop_consumed_inputs(model_kwargs, has_cache=len(caches) > 0),
        )
        return outputs, input_ids, model_kwargs

    def _prefill_distinct_rows(
        self,
        equal_rows: EqualRows,
        input_ids: torch.LongTensor,
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
        is_first_iteration: bool,
    ) -> ModelOutput:
        """
        Forwards the first row of each group of equal rows.

        Args:
            equal_rows ([`EqualRows`]): The U groups of the B rows.
            input_ids (`torch.LongTensor` of shape `(B, L)`): The prompts.
            generation_config ([`GenerationConfig`]): The generation configuration.
            model_kwargs (`dict`): The other inputs of the model, with B rows. A cache that is filled is added to them.
            is_first_iteration (`bool`): See `_prefill`.

        Returns:
            [`ModelOutput`]: The outputs, whose cache is that of `model_kwargs`. They have U rows, each of which stands
            for a group, if all groups are of one size and consecutive, and all B rows otherwise.
        """
        inputs = equal_rows.select({"input_ids": input_ids, **model_kwargs})
        outputs = self._prefill(
            inputs.pop("input_ids"), generation_config, inputs, is_first_iteration=is_first_iteration
        )
        if inputs.get("cache") is not None:
            model_kwargs["cache"] = inputs["cache"]
        if equal_rows.group_size == 1:
            groups = torch.tensor(equal_rows.groups)
            self._expand_outputs(outputs, groups, len(equal_rows.firsts))
            for cache in outermost_caches(outputs.get("cache"), model_kwargs.get("cache")):
                cache.batch_select_indices(groups)
        return outputs

    def _expand_cache(self, cache: Any, expand_size: int, generation_config: "GenerationConfig") -> None:
        """Makes the cache of a prefill on B rows one of B * `expand_size` rows, in place."""
        cache.batch_repeat_interleave(expand_size)

    def _expand_outputs(self, outputs: ModelOutput, expand_size: int | torch.LongTensor, rows: int) -> None:
        """Repeats, or takes, the rows of the logits, attentions and hidden states of a prefill in place."""
        # Only the last position is ever read, and all of them are N times the memory
        outputs.logits = repeat_rows(outputs.logits[:, -1:], expand_size, rows)
        for name in ATTENTION_FIELDS:
            if outputs.get(name) is not None:
                outputs[name] = repeat_rows(outputs[name], expand_size, rows)
        for name in HIDDEN_STATE_FIELDS:
            if outputs.get(name) is not None:
                outputs[name] = repeat_rows(outputs[name], expand_size, rows, hidden_states_row_dim(self))

    def _drop_consumed_inputs(self, model_kwargs: dict[str, Any], has_cache: bool) -> dict[str, Any]:
        """Leaves out the multimodal inputs that only a prefill reads: with a cache they are dead weight."""
        from .utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

        if not (has_cache and model_kwargs.get("use_cache", True)) or self.config.model_type in STREAMING_MODELS:
            return model_kwargs
        # Models that name such an input in their own `prepare_inputs_for_generation` may read it at every step
        kept = inspect.signature(self.prepare_inputs_for_generation).parameters
        dropped = set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) - set(kept)
        return {name: value for name, value in model_kwargs.items() if name not in dropped}
