# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Prefill once: the prompt of B items is forwarded on B rows, then its logits and its cache become the B * N rows that
decoding needs (N = `max(num_beams, num_return_sequences)`). Asked for in huggingface/transformers#27449. A prompt that the
batch holds several times is forwarded on one row for all of them.

The way of a prompt: `generate` makes a plan (`plan_prefill`) before any forward. Where it says so, tokens are repeated
as ever, but the other inputs stay as they are, and the decoding method gets the plan. Its prefill is `PrefillPlan.prefill`,
which returns outputs, cache and inputs of B * N rows. Everywhere else `generate` does what it always did.

Shapes: B batch items, N rows per item, U distinct rows, L prompt length, V vocabulary size.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..cache_expansion import cache_rows
from ..cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
)
from ..prefix_sharing.caches import learn_from, materialize_cache, share_cache, why_not_share
from ..prefix_sharing.cost import Decoding
from ..utils import ModelOutput, logging
from .common_prefix import CommonPrefix, align, continue_cache, why_not_common_prefix, why_not_layout
from .equal_rows import EqualRows, find_equal_rows, fingerprints, tensors_by_row, why_not_compare
from .prefill_obstacles import (
    ATTENTION_FIELDS,
    HIDDEN_STATE_FIELDS,
    HookChangesInputs,
    is_on_probation,
    is_overridden,
    learn,
    takes_plan,
    watch_pre_hooks,
    why_not_expand,
    why_not_prefill_once,
)


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel
    from .configuration_utils import GenerationConfig
    from .logits_process import LogitsProcessorList


logger = logging.get_logger(__name__)


# ---------------------------------------------------------------------------------------------------- the plan
@dataclass(frozen=True)
class PrefillPlan:
    """
    How one call of `generate` computes its prompt.

    Args:
        strategy (`str`): `"recompute"`, `"copy"` or `"share"`, see `GenerationConfig.prompt_expansion`.
        shares_where_it_pays (`bool`): Whether `"share"` leaves out the layers for which copying is cheaper.
        reason (`str`): Why.
        num_sequences (`int`, *optional*, defaults to 1): Number N of rows that decoding makes of each prompt.
        equal_rows ([`EqualRows`], *optional*): Which prompts are equal, `None` if all are different or aren't compared.
        on_probation (`bool`, *optional*, defaults to `False`): Whether the prefill runs code from outside.
        watched (`tuple[nn.Module]`, *optional*): Modules with pre-hooks from outside, which may only look on.
        dropped_inputs (`frozenset[str]`, *optional*): Inputs that nothing reads after the prefill.
        prefix ([`CommonPrefix`], *optional*): What different prompts have in common and is computed by itself.
    """

    strategy: str
    reason: str
    shares_where_it_pays: bool = False
    num_sequences: int = 1
    equal_rows: EqualRows | None = None
    on_probation: bool = False
    watched: tuple[nn.Module, ...] = ()
    dropped_inputs: frozenset[str] = frozenset()
    prefix: CommonPrefix | None = None

    @property
    def prefills_once(self) -> bool:
        """Whether the prefill has fewer rows than decoding."""
        return self.strategy != "recompute"

    @property
    def group_size(self) -> int:
        """For how many prompts, one after the other, a row of the prefill stands."""
        return 1 if self.equal_rows is None else self.equal_rows.group_size

    def rows_to_take(self, batch_size: int) -> torch.LongTensor:
        """Which row of the prefill each of the `batch_size` * N rows goes on from."""
        groups = range(batch_size) if self.equal_rows is None else self.equal_rows.groups
        return torch.tensor(list(groups)).repeat_interleave(self.num_sequences)

    def encode(
        self,
        model: "PreTrainedModel",
        inputs_tensor: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: "GenerationConfig",
    ) -> tuple["PrefillPlan", dict[str, Any]]:
        """
        Runs the encoder, if there is one to run, on the distinct rows. Its outputs get all rows again.

        Returns:
            `tuple[PrefillPlan, dict]`: The plan, without equal rows if they could not be told apart in the outputs, or
            if the encoder draws random numbers; and the inputs with what was encoded.
        """
        prepare = model._maybe_prepare_encoder_kwargs_for_generation
        if not model.config.is_encoder_decoder or model_kwargs.get("encoder_outputs") is not None:
            return self, prepare(inputs_tensor, model_kwargs, model_input_name, generation_config)
        distinct = self.equal_rows.select({"inputs_tensor": inputs_tensor, **model_kwargs})
        random = RandomState(inputs_tensor.device)
        encoded = prepare(distinct.pop("inputs_tensor"), distinct, model_input_name, generation_config)
        added = {name: value for name, value in encoded.items() if model_kwargs.get(name) is None}
        if random.restore_if_changed():
            obstacle = "the encoder draws random numbers"
        elif not self.equal_rows.can_restore(added):
            obstacle = "the encoder's outputs have another number of rows than its inputs"
        else:
            kept = {name: value for name, value in model_kwargs.items() if name in encoded}
            return self, kept | self.equal_rows.restore(added)
        _log_all_prefilled(model, obstacle)
        strategy = "recompute" if self.num_sequences == 1 else self.strategy
        plan = replace(self, strategy=strategy, equal_rows=None)
        return plan, prepare(inputs_tensor, model_kwargs, model_input_name, generation_config)

    def expand_prompts(
        self, input_ids: torch.LongTensor, expand_size: int, is_encoder_decoder: bool, **model_kwargs: Any
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """In place of `_expand_inputs_for_generation`: repeats the tokens alone, the other inputs after the prefill."""
        return input_ids.repeat_interleave(expand_size, dim=0), model_kwargs

    def logits_processors_of(self, model: "PreTrainedModel") -> Callable[..., "LogitsProcessorList"]:
        """In place of `model._get_logits_processor`."""
        return partial(self._get_logits_processor, model)

    def _get_logits_processor(
        self,
        model: "PreTrainedModel",
        encoder_input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        negative_prompt_ids: torch.LongTensor | None,
        negative_prompt_attention_mask: torch.LongTensor | None,
        **kwargs: Any,
    ) -> "LogitsProcessorList":
        """Prepares the processors for B * N rows: of the masks they read the padding, of negative prompts all."""
        if negative_prompt_ids is not None and negative_prompt_ids.shape[0] == encoder_input_ids.shape[0]:
            negative_prompt_ids = negative_prompt_ids.repeat_interleave(self.num_sequences, dim=0)
            if negative_prompt_attention_mask is not None:
                negative_prompt_attention_mask = negative_prompt_attention_mask.repeat_interleave(
                    self.num_sequences, dim=0
                )
        if self.prefills_once:
            masks = {
                name: model_kwargs[name].repeat_interleave(self.num_sequences, dim=0)
                for name in ("attention_mask", "decoder_attention_mask")
                if model_kwargs.get(name) is not None
            }
            model_kwargs = {**model_kwargs, **masks}
        return model._get_logits_processor(
            encoder_input_ids=encoder_input_ids,
            model_kwargs=model_kwargs,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            **kwargs,
        )

    def hand_to(self, decoding_method: Callable, model_kwargs: dict[str, Any], batch_size: int) -> Callable:
        """
        Returns `decoding_method` with the plan in its hands. A static cache that `generate` has just initialized for
        B * N rows gets those of the prefill.
        """
        cache = model_kwargs.get("cache")
        rows = batch_size if self.equal_rows is None else len(self.equal_rows.firsts)
        is_early = isinstance(cache, StaticCache) and not getattr(cache, "_is_user_defined", False)
        if is_early and cache_rows(cache) not in (None, rows):
            cache.batch_select_indices(torch.arange(rows))
        if takes_plan(decoding_method):
            return partial(decoding_method, prefill_plan=self)

        def expand_in_loop(model: "PreTrainedModel", input_ids: torch.LongTensor, **kwargs: Any) -> Any:
            prompts = input_ids[:: self.num_sequences]
            return decoding_method(model, prompts, expand_size=self.num_sequences, **kwargs)

        return expand_in_loop

    def prefill(
        self,
        model: "PreTrainedModel",
        input_ids: torch.LongTensor,
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> tuple[ModelOutput, dict[str, Any]]:
        """
        Forwards the prompts, then expands all that decoding goes on with.

        A prefill that draws random numbers, or whose outputs can't be expanded with certainty, is done once more, on
        B * N rows and from the state before: what comes out is what all rows would have given.

        Args:
            model ([`PreTrainedModel`]): The model.
            input_ids (`torch.LongTensor` of shape `(B * N, L)`): The prompts, each N times.
            generation_config ([`GenerationConfig`]): The generation configuration.
            model_kwargs (`dict`): The other inputs of the model, with B rows.
            is_first_iteration (`bool`, *optional*, defaults to `True`): See `_prefill`.

        Returns:
            `tuple[ModelOutput, dict]`: The outputs of the prefill (logits of the last position only, of shape
            `(B * N, 1, V)`), and the `model_kwargs` with B * N rows.
        """
        prompts = input_ids[:: self.num_sequences]
        given = {"input_ids": prompts, **model_kwargs}
        given = dict(given) if self.equal_rows is None else self.equal_rows.select(given)
        rows = given["input_ids"].shape[0]
        before, random = CacheState(model_kwargs.get("cache")), RandomState(model.device)
        prefix = self._checked_prefix(prompts, model_kwargs)
        try:
            with watch_pre_hooks(self.watched):
                if prefix is None:
                    outputs = model._prefill(
                        given.pop("input_ids"), generation_config, given, is_first_iteration=is_first_iteration
                    )
                else:
                    outputs = self._prefill_tails(model, given, generation_config, is_first_iteration)
        except HookChangesInputs as change:
            outputs, obstacle = None, f"a hook changes what a {change} is given"
        draws = model._draws_for_each_row and random.restore_if_changed()
        if outputs is not None:
            caches = outermost_caches(outputs.get("cache"), given.get("cache"))
            obstacle = "the prefill draws random numbers" if draws else None
            obstacle = obstacle or why_not_expand(model, outputs, caches, rows, self.on_probation)
            if obstacle is not None:
                learn(model, obstacle, about_class=self.on_probation and not draws)
        if obstacle is not None:
            logger.info_once(f"{type(model).__name__}: the prompt is forwarded again, on all rows ({obstacle})")
            before.restore(self.rows_to_take(len(prompts)))
            return self._prefill_all_rows(model, input_ids, generation_config, model_kwargs, is_first_iteration)

        max_length = generation_config.max_length or sys.maxsize
        decoding = Decoding(max_length - input_ids.shape[1], (generation_config.num_beams or 1) > 1)
        self._expand_results(model, outputs, caches, model_kwargs, rows, len(prompts), decoding)
        if given.get("cache") is not None:
            model_kwargs = {**model_kwargs, "cache": given["cache"]}
        if prefix is not None:
            model_kwargs = {**model_kwargs, **_inputs_of_layout(prefix, prompts, model_kwargs)}
            if not prefix.is_ragged:
                model_kwargs["attention_mask"] = None
        if len(caches) > 0 and model_kwargs.get("use_cache", True):
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in self.dropped_inputs}
        return outputs, self._expand_inputs(model, prompts, model_kwargs)

    def _checked_prefix(self, prompts: torch.LongTensor, model_kwargs: dict[str, Any]) -> CommonPrefix | None:
        """The prefix, unless `generate` has found pads that the plan didn't know of."""
        if self.prefix is None or model_kwargs.get("cache") is None:
            return None
        knows_mask = self.prefix.has_mask or model_kwargs.get("attention_mask") is None
        positions = model_kwargs.get("position_ids")
        is_usable = knows_mask and (positions is None or positions.dim() == 2)
        if not is_usable and cache_rows(model_kwargs["cache"]) is not None:
            raise ValueError("`attention_mask` must be given beside a `cache` of one row, if prompts are padded.")
        return self.prefix if is_usable else None

    def _prefill_tails(
        self,
        model: "PreTrainedModel",
        given: dict[str, Any],
        generation_config: "GenerationConfig",
        is_first_iteration: bool,
    ) -> ModelOutput:
        """
        Forwards the common prefix on one row, then the tails of the distinct prompts on theirs.

        Args:
            model ([`PreTrainedModel`]): The model.
            given (`dict`): The tokens of the U distinct prompts and the other inputs. Changed in place: the cache is filled.
            generation_config ([`GenerationConfig`]): The generation configuration.
            is_first_iteration (`bool`): See `_prefill`.

        Returns:
            [`ModelOutput`]: The outputs for the tails, of U rows.
        """
        prompts, cache = given.pop("input_ids"), given.get("cache")
        prefix = self.prefix if self.equal_rows is None else self.prefix.select(self.equal_rows.firsts)
        if cache_rows(cache) is not None:
            # A prefix that the caller has prepared
            given["cache"] = cache = continue_cache(cache)
        if cache.get_seq_length() < prefix.length:
            inputs = {**given, **_inputs_of_layout(prefix.alone, prefix.tokens(prompts), given)}
            model._prefill(prefix.tokens(prompts), generation_config, inputs, is_first_iteration=is_first_iteration)
        if cache.get_seq_length() != prefix.length:
            raise RuntimeError(
                f"{type(model).__name__} has forwarded a prefix of {prefix.length} tokens, but its cache holds "
                f"{cache.get_seq_length()}: set `prompt_expansion='recompute'`."
            )
        if self.strategy == "share":
            share_cache(cache, len(prompts), model)
        else:
            cache.batch_repeat_interleave(len(prompts))
        inputs = {**given, **_inputs_of_layout(prefix, prompts, given)}
        outputs = model._prefill(
            prefix.rearrange(prompts), generation_config, inputs, is_first_iteration=is_first_iteration
        )
        return outputs

    def _expand_results(
        self,
        model: "PreTrainedModel",
        outputs: ModelOutput,
        caches: list[Any],
        model_kwargs: dict[str, Any],
        rows: int,
        batch_size: int,
        decoding: Decoding,
    ) -> None:
        """Makes the outputs and caches of a prefill of `rows` rows those of B * N rows, in place."""
        repeats = self.num_sequences * self.group_size
        is_grouped = rows * repeats == batch_size * self.num_sequences
        indices = self.rows_to_take(batch_size).to(outputs.logits.device)
        # Only the last position is ever read, and all of them are N times the memory
        outputs.logits = take_rows(outputs.logits[:, -1:], indices)
        for name in ATTENTION_FIELDS + HIDDEN_STATE_FIELDS:
            if outputs.get(name) is not None:
                row_dim = model._hidden_state_row_dim if name in HIDDEN_STATE_FIELDS else None
                outputs[name] = take_rows(outputs[name], indices, row_dim)
        model._expand_prefill_state(outputs, model_kwargs, repeats)
        for cache in caches:
            if not is_grouped:
                cache.batch_select_indices(torch.tensor(self.equal_rows.groups))
            if repeats > 1:
                self._expand_cache(model, cache, repeats, decoding)

    def _expand_cache(self, model: "PreTrainedModel", cache: Any, repeats: int, decoding: Decoding) -> None:
        if self.strategy != "share":
            cache.batch_repeat_interleave(repeats)
            return
        shared = share_cache(cache, repeats, model, decoding if self.shares_where_it_pays else None)
        if self.shares_where_it_pays:
            copied = dict.fromkeys(cache.copied_layers.values())
            reason = f"{shared} layers; others: {', '.join(copied)}" if shared else ", ".join(copied)
            reason = reason if copied else self.reason
            _log_strategy(model, "share" if shared else "copy", reason)

    def _expand_inputs(
        self, model: "PreTrainedModel", prompts: torch.LongTensor, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        return model._expand_inputs_for_generation(
            expand_size=self.num_sequences,
            is_encoder_decoder=model.config.is_encoder_decoder,
            input_ids=prompts,
            **model_kwargs,
        )[1]

    def _prefill_all_rows(
        self,
        model: "PreTrainedModel",
        input_ids: torch.LongTensor,
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
        is_first_iteration: bool,
    ) -> tuple[ModelOutput, dict[str, Any]]:
        """Expands the inputs, then forwards all rows."""
        model_kwargs = self._expand_inputs(model, input_ids[:: self.num_sequences], model_kwargs)
        outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)
        return outputs, model_kwargs

    @staticmethod
    def return_cache(model: "PreTrainedModel", result: Any, cache: Any) -> None:
        """Gives a shared cache the layout of B * N rows if the caller gets it back, and learns from it."""
        returned = [result.get("cache")] if isinstance(result, ModelOutput) else []
        if getattr(cache, "_is_user_defined", False):
            returned.append(cache)
        for part in outermost_caches(cache, *returned):
            learn_from(part, model)
        for part in outermost_caches(*returned):
            if isinstance(part, Cache):  # code from outside may return what it likes
                materialize_cache(part)


def take_rows(value: Any, indices: torch.LongTensor, row_dim: Callable[[torch.Tensor], int] | None = None) -> Any:
    """Takes the rows `indices` of all tensors in `value`. `row_dim` tells which dimension holds them, by default the first."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0 if row_dim is None else row_dim(tensor), indices.to(tensor.device))

    return pytree.tree_map_only(torch.Tensor, take, value)


def _inputs_of_layout(
    prefix: CommonPrefix, prompts: torch.LongTensor, model_kwargs: dict[str, Any]
) -> dict[str, torch.Tensor | None]:
    """Mask and positions for prompts `(rows, L)` that are read as a prefix and tails."""
    mask = prefix.mask(prompts)
    inputs = {"attention_mask": mask}
    if model_kwargs.get("position_ids") is not None:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return inputs


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


class RandomState:
    """The states of torch's random number generators, of the CPU and of the accelerator that `device` is on."""

    def __init__(self, device: torch.device) -> None:
        self._modules = [torch] if device.type in ("cpu", "meta") else [torch, torch.get_device_module(device)]
        self._states = self._read()

    def _read(self) -> list[torch.Tensor]:
        # Where layers are spread over several devices, each has a generator of its own
        states = [
            getattr(module, "get_rng_state_all", lambda module=module: [module.get_rng_state()])()
            for module in self._modules
        ]
        return [state for of_module in states for state in of_module]

    def restore_if_changed(self) -> bool:
        """Whether a random number was drawn since. If so, it is as if none was."""
        if all(map(torch.equal, self._states, self._read())):
            return False
        states = iter(self._states)
        for module in self._modules:
            if hasattr(module, "set_rng_state_all"):
                module.set_rng_state_all([next(states) for _ in range(module.device_count())])
            else:
                module.set_rng_state(next(states))
        return True


class CacheState:
    """What a cache held before a prefill. Only tensors that layers write into are copied."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        parts = [cache, *(getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross"))]
        layers = [layer for part in parts if part is not None for layer in getattr(part, "layers", None) or ()]
        self._states = [
            (holder, _keep(vars(holder), holder)) for holder in (*parts, *layers) if hasattr(holder, "__dict__")
        ]

    def restore(self, indices: torch.LongTensor) -> None:
        """Gives the cache, which stays the same object, its state from before, and takes the rows `indices` of it."""
        for holder, state in self._states:
            vars(holder).clear()
            vars(holder).update(state)
        if self._cache is not None and cache_rows(self._cache) is not None:
            self._cache.batch_select_indices(indices)


def _keep(value: Any, holder: Any) -> Any:
    """A copy of the containers in `value`, and of its tensors unless `holder` is a layer that makes new ones."""
    if isinstance(value, torch.Tensor):
        return value if type(holder) in (DynamicLayer, DynamicSlidingWindowLayer) else value.clone()
    if type(value) is dict:
        return {key: _keep(item, holder) for key, item in value.items()}
    return [_keep(item, holder) for item in value] if type(value) is list else value


# ---------------------------------------------------------------------------------------------------- making the plan
def plan_prefill(
    model: "PreTrainedModel",
    decoding_method: Callable,
    generation_config: "GenerationConfig",
    inputs_tensor: torch.Tensor,
    model_kwargs: dict[str, Any],
) -> PrefillPlan:
    """
    Decides how the prompt is computed, before any forward pass. What is decided is logged with its reason, unless there
    is one row per prompt and no prompt repeats.

    Args:
        model ([`PreTrainedModel`]): The model.
        decoding_method (`Callable`): The method that runs the decoding loop.
        generation_config ([`GenerationConfig`]): The configuration of this call.
        inputs_tensor (`torch.Tensor` of shape `(B, ...)`): The main input of the model, or of its encoder.
        model_kwargs (`dict`): The other inputs of the model, not expanded yet.

    Returns:
        [`PrefillPlan`]: The plan.

    Raises:
        `ValueError`: If the strategy asked for isn't possible here, or if the cache passed in has neither B nor
            B * N rows.
    """
    requested = getattr(generation_config, "prompt_expansion", None) or "auto"
    count, batch_size = (
        max(generation_config.num_beams, generation_config.num_return_sequences),
        inputs_tensor.shape[0],
    )
    is_prepared = cache_rows(model_kwargs.get("cache")) == 1 < batch_size
    if count == 1 and (batch_size == 1 or requested == "recompute"):
        _refuse_prepared(is_prepared, "all rows are asked for", batch_size)
        return PrefillPlan("recompute", "there is one row per prompt")

    obstacle, doubt, watched = why_not_prefill_once(
        model, decoding_method, generation_config, batch_size, count, model_kwargs
    )
    # Who asks for a way takes the responsibility for what can only be suspected
    overrides_doubt = doubt is not None and requested in ("copy", "share") and count > 1
    if obstacle is None and doubt is not None and not overrides_doubt:
        obstacle = doubt
    if obstacle is not None or requested == "recompute":
        _refuse_prepared(is_prepared, obstacle or "all rows are asked for", batch_size)
        return _refuse_or_recompute(model, requested, obstacle, count)

    watched = () if overrides_doubt else watched
    equal_rows = prefix = None
    if batch_size > 1 and watched:
        obstacle = f"a hook of a {type(watched[0]).__name__} may treat rows differently"
        _refuse_prepared(is_prepared, obstacle, batch_size)
        _log_all_prefilled(model, obstacle)
    elif batch_size > 1:
        equal_rows, prefix = _compare_prompts(model, decoding_method, generation_config, inputs_tensor, model_kwargs)
    if count == 1 and equal_rows is None and prefix is None:
        return PrefillPlan("recompute", "no prompt repeats")
    repeats = count * (1 if equal_rows is None else equal_rows.group_size) if prefix is None else count * batch_size
    strategy, reason = choose_strategy(
        model, generation_config, model_kwargs.get("cache"), requested, inputs_tensor, repeats=repeats
    )
    if requested not in ("auto", strategy) and count > 1:
        raise ValueError(f"`prompt_expansion={requested!r}` is not possible: {reason}.")
    if overrides_doubt:
        reason = f"{reason}, and was asked for although {doubt}"
    # The prefill tells for which layers it pays
    shares_where_it_pays = strategy == "share" and requested == "auto"
    if repeats > 1 and not shares_where_it_pays:
        _log_strategy(model, strategy, reason)
    return PrefillPlan(
        strategy=strategy,
        reason=reason,
        shares_where_it_pays=shares_where_it_pays,
        num_sequences=count,
        equal_rows=equal_rows,
        on_probation=is_on_probation(model),
        watched=watched,
        dropped_inputs=consumed_inputs(model),
        prefix=prefix,
    )


def _refuse_or_recompute(model: "PreTrainedModel", requested: str, obstacle: str | None, count: int) -> PrefillPlan:
    if requested in ("copy", "share") and count > 1:
        raise ValueError(f"`prompt_expansion={requested!r}` is not possible: {obstacle}.")
    reason = obstacle or "asked for"
    if count > 1:
        _log_strategy(model, "recompute", reason)
    else:
        _log_all_prefilled(model, reason)
    return PrefillPlan("recompute", reason, num_sequences=count)


def _log_strategy(model: "PreTrainedModel", strategy: str, reason: str) -> None:
    logger.info_once(f"{type(model).__name__}: prompt_expansion={strategy!r} ({reason})")


def choose_strategy(
    model: "PreTrainedModel",
    generation_config: "GenerationConfig",
    cache: Any,
    requested: str,
    inputs_tensor: torch.Tensor,
    repeats: int,
) -> tuple[str, str]:
    """
    Chooses how the cache of a prefill becomes one of more rows.

    Args:
        model ([`PreTrainedModel`]): The model, with its type and device.
        generation_config ([`GenerationConfig`]): The configuration of this call, with the kind of cache.
        cache ([`Cache`], *optional*): The cache that the caller passed in.
        requested (`str`): The strategy asked for, or `"auto"`.
        inputs_tensor (`torch.Tensor` of shape `(B, L, ...)`): The main input of the model, or of its encoder.
        repeats (`int`): Number of rows that go on from each row of the prefill.

    Returns:
        `tuple[str, str]`: `"copy"` or `"share"`, and why it is taken: what stands in the way of the one asked for, if it
        is another.
    """
    if requested in ("copy", "recompute") or repeats == 1:
        return "copy", "the prompt's cache can be repeated"
    obstacle = why_not_share_here(model, generation_config, cache)
    if obstacle is None and requested == "auto" and generation_config.cache_implementation == "static":
        # Who asks for a static cache wants shapes that stay, also from one prompt to the next
        obstacle = "decoding would be compiled for the length of each prompt; ask for 'share' if that is fine"
    return ("share", "the prompt's cache can be shared") if obstacle is None else ("copy", obstacle)


def why_not_share_here(model: "PreTrainedModel", generation_config: "GenerationConfig", cache: Any) -> str | None:
    """Returns what stands in the way of storing the prompt's keys and values once, or `None` if nothing does."""
    if not generation_config.use_cache:
        return "there is no cache"
    if generation_config.output_attentions:
        return "attention weights are asked for"
    if (implementation := generation_config.cache_implementation) not in (None, "dynamic", "static"):
        return f"a {implementation!r} cache can't be shared"
    if cache is None:
        if not model._supports_default_dynamic_cache():
            return "the model doesn't keep keys and values in a `DynamicCache`"
        # What `generate` is going to make. In an encoder-decoder model, cross-attention gets plain layers beside it
        config = model.config.get_text_config(decoder=True)
        cache = StaticCache(config, max_cache_len=1) if implementation == "static" else DynamicCache(config=config)
    elif getattr(cache, "_is_user_defined", True):
        is_pair = isinstance(cache, EncoderDecoderCache)
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]
        if any(type(part) is not DynamicCache or part.offloading for part in parts):
            return "the cache passed in is not a plain `DynamicCache`"
    return why_not_share(model, cache)


def consumed_inputs(model: "PreTrainedModel") -> frozenset[str]:
    """Names of the multimodal inputs that only the prefill of `model` reads: with a cache they are dead weight."""
    from .utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

    if model._reads_inputs_while_decoding or is_overridden(model, "prepare_inputs_for_generation"):
        return frozenset()
    # Models that name such an input in their own `prepare_inputs_for_generation` may read it at every step
    kept = inspect.signature(model.prepare_inputs_for_generation).parameters
    return frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) - frozenset(kept)


def _compare_prompts(
    model: "PreTrainedModel",
    decoding_method: Callable,
    generation_config: "GenerationConfig",
    inputs_tensor: torch.Tensor,
    model_kwargs: dict[str, Any],
) -> tuple[EqualRows | None, CommonPrefix | None]:
    """
    Finds the prompts whose prefill would be the same, and what different ones have in common. The device is waited for once.

    Returns:
        `tuple`: `None` for the first if nothing repeats, for the second if it isn't worth a forward of its own.
    """
    rows = inputs_tensor.shape[0]
    cache = model_kwargs.get("cache")
    is_prepared = cache is not None and cache_rows(cache) == 1
    compared = {name: value for name, value in model_kwargs.items() if name != "cache" or not is_prepared}
    obstacle = why_not_equal_rows(model, decoding_method, generation_config) or why_not_compare(compared, rows)
    if obstacle is not None:
        _refuse_prepared(is_prepared, obstacle, rows)
        _log_all_prefilled(model, obstacle)
        return None, None
    obstacle = why_not_common_prefix(model, generation_config, model_kwargs, inputs_tensor)
    tensors = [inputs_tensor, *tensors_by_row(model_kwargs, inputs_tensor)]
    mask = model_kwargs.get("attention_mask")
    asked = [fingerprints(tensors)] if obstacle is not None else [fingerprints(tensors), align(inputs_tensor, mask)]
    answers = torch.cat(asked).tolist()
    equal_rows = _usable_equal_rows(model, find_equal_rows(tensors, answers[:rows]))
    distinct = rows if equal_rows is None else len(equal_rows.firsts)
    prefix = None
    if obstacle is None:
        is_left, length, *starts = answers[rows:]
        prepared_length = cache.get_seq_length() if is_prepared else 0
        prefix = CommonPrefix(length, starts, inputs_tensor.shape[1], has_mask=mask is not None)
        is_returned = generation_config.return_dict_in_generate
        if not is_left:
            obstacle = "pads are not on the left alone"
        elif length < prepared_length:
            obstacle = f"it holds {prepared_length} tokens, but the prompts have {length} in common"
        elif is_prepared or prefix.pays(distinct):
            obstacle = why_not_layout(model, prefix, is_returned)
            prefix = prefix.of_length(prepared_length) if is_prepared else prefix
            if obstacle is not None:
                logger.info_once(f"{type(model).__name__}: a common prefix is computed for each prompt ({obstacle})")
        else:
            return equal_rows, None
    _refuse_prepared(is_prepared, obstacle, rows)
    if obstacle is not None:
        return equal_rows, None
    logger.info_once(f"{type(model).__name__}: a common prefix is computed once")
    return equal_rows, prefix


def _refuse_prepared(is_prepared: bool, obstacle: str | None, rows: int) -> None:
    if is_prepared and obstacle is not None:
        raise ValueError(f"`cache` holds one row, which can't serve as a common prefix of {rows} prompts: {obstacle}.")


def _usable_equal_rows(model: "PreTrainedModel", equal_rows: EqualRows | None) -> EqualRows | None:
    """Returns `equal_rows`, unless the model can't do with them. What is decided is logged, unless nothing repeats."""
    if equal_rows is None:
        return None
    keeps_state = type(model)._expand_prefill_state is not PrefillMixin._expand_prefill_state
    if equal_rows.group_size == 1 and keeps_state:
        _log_all_prefilled(model, "the model keeps a state outside of its cache, whose rows can't be moved")
        return None
    way = "groups of one size" if equal_rows.group_size > 1 else "copied to where they repeat"
    logger.info_once(f"{type(model).__name__}: equal rows are prefilled once ({way})")
    return equal_rows


def why_not_equal_rows(
    model: "PreTrainedModel", decoding_method: Callable, generation_config: "GenerationConfig"
) -> str | None:
    """Returns why prompts that look equal can't be taken for equal, or `None` if they can."""
    if not takes_plan(decoding_method):
        name = getattr(decoding_method, "__qualname__", type(decoding_method).__name__)
        return f"the decoding method `{name}` may change each row of the prompt"
    if model._reads_inputs_while_decoding:
        return "the model goes on reading its audio while decoding"
    if isinstance(generation_config.decoder_start_token_id, (list, tuple, torch.Tensor)):
        return "`decoder_start_token_id` holds a token for each row"
    return None


def _log_all_prefilled(model: "PreTrainedModel", reason: str) -> None:
    logger.info_once(f"{type(model).__name__}: equal rows are all prefilled ({reason})")


# ---------------------------------------------------------------------------------------------------- for models and loops
class PrefillMixin:
    """
    The part of [`GenerationMixin`] that models with a state of their own override, and that decoding loops of other
    people call.
    """

    # Whether a prompt can't be forwarded in parts
    _reads_prompt_as_whole = False
    # Whether attention depends on how many tokens of the cache, pads included, are between two tokens
    _counts_tokens_in_cache = False
    # Whether random numbers drawn in a prefill belong to single rows
    _draws_for_each_row = True
    # Whether decoding steps read inputs that `generate` drops after the prefill of other models
    _reads_inputs_while_decoding = False

    def _why_not_prefill_once(self, model_kwargs: dict[str, Any]) -> str | None:
        """Returns why the model needs all rows in its prefill, or `None`. `model_kwargs` are its inputs."""
        return None

    def _expand_prefill_state(self, outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int) -> None:
        """Repeats each row of what is carried from the prefill to decoding outside of a cache, in place."""

    def _hidden_state_row_dim(self, hidden_state: torch.Tensor) -> int:
        """Returns which dimension of a hidden state holds the rows."""
        return 0

    def prefill_and_expand(
        self,
        input_ids: torch.LongTensor,
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
        expand_size: int = 1,
        is_first_iteration: bool = True,
    ) -> tuple[ModelOutput, torch.LongTensor, dict[str, Any]]:
        """
        The prefill of a decoding method of one's own (`custom_generate`) that has the parameter `expand_size`: `generate`
        hands such a method B rows and `expand_size=N`. A method without it gets B * N rows.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): The prompts.
            generation_config ([`GenerationConfig`]): The generation configuration.
            model_kwargs (`dict`): The other inputs of the model, with B rows.
            expand_size (`int`, *optional*, defaults to 1): Number N of rows to make of each. With 1, rows are final.
            is_first_iteration (`bool`, *optional*, defaults to `True`): See `_prefill`.

        Returns:
            `tuple`: The outputs of the prefill (logits of the last position only, of shape `(B * N, 1, V)`), the
            `input_ids` of shape `(B * N, L)`, and the `model_kwargs` with B * N rows.

        Raises:
            `ValueError`: If `expand_size` is not an integer of at least 1.
        """
        if not isinstance(expand_size, int) or expand_size < 1:
            raise ValueError(f"`expand_size` must be an integer of at least 1, but is {expand_size!r}.")
        if expand_size == 1:
            outputs = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)
            return outputs, input_ids, model_kwargs
        requested = getattr(generation_config, "prompt_expansion", None) or "auto"
        cache = model_kwargs.get("cache")
        strategy, reason = choose_strategy(self, generation_config, cache, requested, input_ids, repeats=expand_size)
        plan = PrefillPlan(
            strategy=strategy,
            reason=reason,
            shares_where_it_pays=strategy == "share" and requested == "auto",
            num_sequences=expand_size,
            on_probation=is_on_probation(self),
            dropped_inputs=consumed_inputs(self),
        )
        input_ids = input_ids.repeat_interleave(expand_size, dim=0)
        outputs, model_kwargs = plan.prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration)
        return outputs, input_ids, model_kwargs
