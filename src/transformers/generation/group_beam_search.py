# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Diverse beam search (https://huggingface.co/papers/1610.02424): the beams of an item are divided into groups, which
decode one after the other at every step. A token costs a group `diversity_penalty` for each beam of an earlier group
of the same item that has chosen it at this step.

Shapes: B batch items, G groups, M beams per group, N = G * M beams, K candidates per group, L prompt length, T
`max_length`, V vocabulary size. Row `b * N + g * M + m` holds beam m of group g of item b.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import nn

from ..utils import ModelOutput, logging
from .beam_reordering import reorder_processors


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel
    from .configuration_utils import GenerationConfig
    from .logits_process import LogitsProcessorList
    from .prefill import PrefillPlan
    from .stopping_criteria import StoppingCriteriaList
    from .streamers import BaseStreamer
    from .utils import GenerateBeamOutput


logger = logging.get_logger(__name__)

# What the beam search helpers give to a beam that is no hypothesis: the ones beside the first at the start, running
# ones that have finished. A hypothesis never comes near it.
NO_HYPOTHESIS_SCORE = -1.0e9


@dataclass
class BeamGroups:
    """
    The hypotheses of all groups: running ones, which are extended, and finished ones, best first.

    Args:
        running_sequences (`torch.LongTensor` of shape `(B, G, M, T)`): Filled up to `current_length`.
        running_scores (`torch.FloatTensor` of shape `(B, G, M)`): Sums of processed and penalized log probabilities.
        running_beam_indices (`torch.IntTensor` of shape `(B, G, M, T - L)`): The row in which each token was chosen.
        sequences (`torch.LongTensor` of shape `(B * G, M, T)`): Finished hypotheses, padded behind their end.
        scores (`torch.FloatTensor` of shape `(B * G, M)`): Their scores with the length penalty.
        beam_indices (`torch.IntTensor` of shape `(B * G, M, T - L)`): Their rows, -1 behind their end.
        is_finished (`torch.BoolTensor` of shape `(B * G, M)`): Which of the finished hypotheses are there yet.
        can_improve (`torch.BoolTensor` of shape `(B * G, 1)`): Whether a running hypothesis may still become one.
        prompt_length (`int`): L.
        current_length (`int`): Length of the running hypotheses.
    """

    running_sequences: torch.LongTensor
    running_scores: torch.FloatTensor
    running_beam_indices: torch.IntTensor
    sequences: torch.LongTensor
    scores: torch.FloatTensor
    beam_indices: torch.IntTensor
    is_finished: torch.BoolTensor
    can_improve: torch.BoolTensor
    prompt_length: int
    current_length: int

    @classmethod
    def start(cls, input_ids: torch.LongTensor, generation_config: "GenerationConfig") -> "BeamGroups":
        """
        Makes the groups of each item from its prompt.

        Args:
            input_ids (`torch.LongTensor` of shape `(B * N, L)`): The prompts, each N times.
            generation_config ([`GenerationConfig`]): The generation configuration.
        """
        groups, group_size = beam_groups_shape(generation_config)
        batch_size = input_ids.shape[0] // (groups * group_size)
        prompt_length, max_length = input_ids.shape[1], generation_config.max_length
        shape, device = (batch_size, groups, group_size), input_ids.device

        running_sequences = torch.full(
            (*shape, max_length), padding_value(generation_config), dtype=torch.long, device=device
        )
        running_sequences[..., :prompt_length] = input_ids.view(*shape, prompt_length)
        beam_indices = torch.full((*shape, max_length - prompt_length), -1, dtype=torch.int32, device=device)
        # The beams of a group are equal at first, so that only one of them is a hypothesis
        running_scores = torch.full(shape, NO_HYPOTHESIS_SCORE, dtype=torch.float, device=device)
        running_scores[..., 0] = 0.0
        return cls(
            running_sequences=running_sequences,
            running_scores=running_scores,
            running_beam_indices=beam_indices,
            sequences=running_sequences.flatten(0, 1).clone(),
            scores=torch.full_like(running_scores, NO_HYPOTHESIS_SCORE).flatten(0, 1),
            beam_indices=beam_indices.flatten(0, 1).clone(),
            is_finished=torch.zeros_like(running_scores, dtype=torch.bool).flatten(0, 1),
            can_improve=torch.ones((batch_size * groups, 1), dtype=torch.bool, device=device),
            prompt_length=prompt_length,
            current_length=prompt_length,
        )

    @property
    def step(self) -> int:
        """Number of tokens that the running hypotheses have had added."""
        return self.current_length - self.prompt_length

    def flat_running_sequences(self) -> torch.LongTensor:
        """The running hypotheses as rows of shape `(B * N, current_length)`."""
        return self.running_sequences[..., : self.current_length].flatten(0, 2)

    def is_decoding(self, early_stopping: bool | str) -> torch.BoolTensor:
        """Which groups still look for hypotheses, of shape `(B, G)`."""
        is_full = self.is_finished.all(dim=-1) & (early_stopping is True)
        return (self.can_improve[:, 0] & ~is_full).view(self.running_scores.shape[:2])


class GroupCandidates(NamedTuple):
    """
    The best continuations of one group at one step, K = `max(2, 1 + number of eos tokens) * M` per item.

    Args:
        log_probs (`torch.FloatTensor` of shape `(B, K)`): Accumulated scores, in descending order.
        sequences (`torch.LongTensor` of shape `(B, K, T)`): The sequences with the new token.
        beam_indices (`torch.IntTensor` of shape `(B, K, T - L)`): The row in which each of their tokens was chosen.
        is_stopped (`torch.BoolTensor` of shape `(B, K)`): Which of them meet a stopping criterion.
    """

    log_probs: torch.FloatTensor
    sequences: torch.LongTensor
    beam_indices: torch.IntTensor
    is_stopped: torch.BoolTensor


def beam_groups_shape(generation_config: "GenerationConfig") -> tuple[int, int]:
    """Returns the number of groups G and the number of beams per group M."""
    groups = generation_config.num_beam_groups
    return groups, generation_config.num_beams // groups


def padding_value(generation_config: "GenerationConfig") -> int:
    """Returns what fills sequences behind their end: the padding token, else an eos token, else -1 as beam search."""
    for token in (generation_config._pad_token_tensor, generation_config._eos_token_tensor):
        if token is not None:
            return int(token.flatten()[0])
    return -1


def is_chosen_word(
    tokens: torch.LongTensor, log_probs: torch.FloatTensor, group_size: int, eos_token_id: torch.LongTensor | None
) -> torch.BoolTensor:
    """
    Tells which candidates keep later groups off their token: the M best ones that don't end with an eos token. Hypotheses
    of different groups may end at the same length.

    Args:
        tokens (`torch.LongTensor` of shape `(B, K)`): The last tokens of the candidates, best first.
        log_probs (`torch.FloatTensor` of shape `(B, K)`): Their accumulated scores.
        group_size (`int`): M.
        eos_token_id (`torch.LongTensor`, *optional*): The eos tokens.
    """
    is_word = log_probs > NO_HYPOTHESIS_SCORE / 2
    if eos_token_id is not None:
        is_word &= torch.isin(tokens, eos_token_id.to(tokens.device), invert=True)
    return is_word & (is_word.cumsum(dim=-1) <= group_size)


def penalize_chosen_tokens(log_probs: torch.FloatTensor, choices: torch.FloatTensor, penalty: float) -> None:
    """
    Subtracts the Hamming diversity penalty in place. A forced token (the only one that processors leave to a beam) is
    spared: no other one could be chosen, and the group would only lose rank.

    Args:
        log_probs (`torch.FloatTensor` of shape `(B, M, V)`): Processed log probabilities of one group.
        choices (`torch.FloatTensor` of shape `(B, V)`): How many beams of earlier groups chose a token at this step.
        penalty (`float`): What each of these beams costs.
    """
    has_choice = torch.isfinite(log_probs).sum(dim=-1, keepdim=True) > 1
    log_probs -= penalty * choices[:, None, :] * has_choice


class GroupBeamSearchMixin:
    """The part of [`GenerationMixin`] that decodes with diverse beam search."""

    def _validate_beam_groups(
        self,
        generation_config: "GenerationConfig",
        custom_generate: Callable | None,
        assistant_model: Optional["PreTrainedModel"],
        streamer: Optional["BaseStreamer"],
    ) -> None:
        """
        Refuses options that don't go together with groups of beams, before any forward pass.

        Args:
            generation_config ([`GenerationConfig`]): The configuration of this call, defaults filled in.
            custom_generate (`Callable`, *optional*): A decoding method of the caller, which has its own rules.
            assistant_model ([`PreTrainedModel`], *optional*): Refused with groups.
            streamer ([`BaseStreamer`], *optional*): Refused with groups.

        Raises:
            `ValueError`: If `num_beam_groups` is no divisor of `num_beams`, if `diversity_penalty` is negative or not
                finite, or if there are several groups and an assistant, a streamer or `low_memory=True`.
        """
        groups, beams = generation_config.num_beam_groups, generation_config.num_beams
        penalty = generation_config.diversity_penalty
        if custom_generate is not None or groups is None:
            return
        if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
            raise ValueError(f"`num_beam_groups` must be an integer of at least 1, but is {groups!r}.")
        if not isinstance(penalty, (int, float)) or not 0 <= penalty < math.inf:
            raise ValueError(f"`diversity_penalty` must be a finite number of at least 0, but is {penalty!r}.")
        if groups == 1:
            if penalty > 0:
                logger.warning_once(
                    f"`diversity_penalty`={penalty} has no effect: it acts between groups of beams, and "
                    "`num_beam_groups` is 1."
                )
            return
        if groups > beams:
            raise ValueError(f"`num_beam_groups` must be at most `num_beams` ({beams}), but is {groups}.")
        if beams % groups != 0:
            raise ValueError(f"`num_beam_groups` must be a divisor of `num_beams` ({beams}), but is {groups}.")
        for name, value in (("assistant_model", assistant_model), ("streamer", streamer)):
            if value is not None:
                raise ValueError(
                    f"`{name}` must be `None` with groups of beams (`num_beam_groups` is {groups}), but is a "
                    f"{type(value).__name__}."
                )
        if generation_config.low_memory:
            raise ValueError(
                f"`low_memory` must not be set with groups of beams (`num_beam_groups` is {groups}), but is "
                f"{generation_config.low_memory}."
            )
        if penalty == 0:
            logger.warning_once(
                f"`diversity_penalty` is 0 with `num_beam_groups`={groups}: nothing keeps the groups apart, and without "
                "sampling all of them find the same sequences. Set it above 0."
            )

    def _group_beam_search(
        self: "PreTrainedModel",
        input_ids: torch.LongTensor,
        logits_processor: "LogitsProcessorList",
        stopping_criteria: "StoppingCriteriaList",
        generation_config: "GenerationConfig",
        synced_gpus: bool = False,
        prefill_plan: Optional["PrefillPlan"] = None,
        **model_kwargs: Any,
    ) -> "GenerateBeamOutput | torch.LongTensor":
        r"""
        Generates sequences with diverse beam search, or with diverse beam sampling if `do_sample=True`.

        Args:
            input_ids (`torch.LongTensor` of shape `(B * N, L)`):
                The prompts, each N times.
            logits_processor (`LogitsProcessorList`):
                Processes the log probabilities of all B * N rows at every step, before the penalty.
            stopping_criteria (`StoppingCriteriaList`):
                Called once per group and step on its B * K candidates.
            generation_config ([`GenerationConfig`]):
                The generation configuration.
            synced_gpus (`bool`, *optional*, defaults to `False`):
                Whether to go on with forward passes until all peers have finished.
            prefill_plan ([`PrefillPlan`], *optional*):
                How the prompts are forwarded. Without it, `model_kwargs` hold all rows.
            model_kwargs:
                The other inputs of the model.

        Returns:
            [`GenerateBeamDecoderOnlyOutput`], [`GenerateBeamEncoderDecoderOutput`] or `torch.LongTensor`: The best
            `num_return_sequences` hypotheses per item over all groups. Their scores contain the penalties.
        """
        state = BeamGroups.start(input_ids, generation_config)
        records = self._start_records(generation_config)
        rows, is_first = input_ids, not generation_config.is_assistant
        if prefill_plan is None:
            outputs = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first)
        else:
            outputs, model_kwargs = prefill_plan.prefill(
                self, input_ids, generation_config, model_kwargs, is_first_iteration=is_first
            )
        this_peer_finished = False
        while self._has_unfinished_sequences(this_peer_finished, synced_gpus, device=input_ids.device):
            if outputs is None:
                rows = state.flat_running_sequences()
                outputs = self._forward_running_beams(rows, model_kwargs)
            model_kwargs = self._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_encoder_decoder=self.config.is_encoder_decoder
            )
            # With `synced_gpus`, a process that has finished only takes part in the forward passes of the others
            log_probs = None
            if not this_peer_finished:
                log_probs = self._process_and_record(outputs, rows, logits_processor, records)
            outputs = None
            if log_probs is not None:
                this_peer_finished = not self._decode_groups(
                    state, log_probs, stopping_criteria, records.get("scores"), generation_config
                )
                row_indices = state.running_beam_indices[..., state.step - 1].flatten()
                self._reorder_cache_rows(model_kwargs, row_indices)
                reorder_processors(logits_processor, row_indices)
        return self._group_beam_search_output(state, records, generation_config, model_kwargs)

    def _start_records(self: "PreTrainedModel", generation_config: "GenerationConfig") -> dict[str, tuple]:
        """Returns an empty tuple for each output field that gets one entry per step."""
        if not generation_config.return_dict_in_generate:
            return {}
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        wanted = {
            "scores": generation_config.output_scores,
            "logits": generation_config.output_logits,
            f"{prefix}attentions": generation_config.output_attentions,
            f"{prefix}hidden_states": generation_config.output_hidden_states,
            "cross_attentions": self.config.is_encoder_decoder and generation_config.output_attentions,
        }
        return {name: () for name, is_wanted in wanted.items() if is_wanted}

    def _forward_running_beams(
        self: "PreTrainedModel", rows: torch.LongTensor, model_kwargs: dict[str, Any]
    ) -> ModelOutput:
        """Forwards the last tokens of all B * N running hypotheses (or all of their tokens, without a cache)."""
        next_sequence_length = 1 if model_kwargs["use_cache"] else None
        model_inputs = self.prepare_inputs_for_generation(
            rows, next_sequence_length=next_sequence_length, **model_kwargs
        )
        return self(**model_inputs, return_dict=True)

    @staticmethod
    def _process_and_record(
        outputs: ModelOutput,
        rows: torch.LongTensor,
        logits_processor: "LogitsProcessorList",
        records: dict[str, tuple],
    ) -> torch.FloatTensor:
        """
        Computes the processed log probabilities of the next tokens, and records the outputs of this step.

        Returns:
            `torch.FloatTensor` of shape `(B * N, V)`: The recorded scores themselves, so that penalties subtracted
            from them in place are recorded, too.
        """
        # A copy doesn't keep the logits of a whole prompt alive
        logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32, device=rows.device)
        log_probs = logits_processor(rows, nn.functional.log_softmax(logits, dim=-1))
        # Processors may hold on to what they return
        log_probs = log_probs.clone(memory_format=torch.contiguous_format)
        step = {**outputs, "logits": logits, "scores": log_probs}
        for name in records:
            records[name] += (step.get(name),)
        return log_probs

    def _decode_groups(
        self,
        state: BeamGroups,
        log_probs: torch.FloatTensor,
        stopping_criteria: "StoppingCriteriaList",
        scores: tuple[torch.FloatTensor, ...] | None,
        generation_config: "GenerationConfig",
    ) -> bool:
        """
        Takes one step of beam search in each group: a group needs the choices of the ones before it, all else is done
        for all groups at once.

        Args:
            state ([`BeamGroups`]): The hypotheses. Changed in place.
            log_probs (`torch.FloatTensor` of shape `(B * N, V)`): Processed log probabilities. Penalized in place.
            stopping_criteria (`StoppingCriteriaList`): Tells which candidates are finished.
            scores (`tuple(torch.FloatTensor)`, *optional*): Recorded scores, for stopping criteria that want them.
            generation_config ([`GenerationConfig`]): The generation configuration.

        Returns:
            `bool`: Whether there is a next step.
        """
        batch_size, groups, group_size = state.running_scores.shape
        log_probs = log_probs.view(batch_size, groups, group_size, -1)
        choices = log_probs.new_zeros(batch_size, log_probs.shape[-1])
        is_decoding = state.is_decoding(generation_config.early_stopping)
        candidates = []
        for group in range(groups):
            if group > 0 and generation_config.diversity_penalty > 0:
                penalize_chosen_tokens(log_probs[:, group], choices, generation_config.diversity_penalty)
            candidates.append(
                self._extend_group(state, group, log_probs[:, group], stopping_criteria, scores, generation_config)
            )
            tokens = candidates[-1].sequences[:, :, state.current_length]
            is_chosen = is_decoding[:, group, None] & is_chosen_word(
                tokens, candidates[-1].log_probs, group_size, generation_config._eos_token_tensor
            )
            choices.scatter_add_(dim=1, index=tokens, src=is_chosen.to(choices.dtype))

        # (B, G, K, ...) -> (B * G, K, ...)
        candidates = GroupCandidates(
            *(torch.stack(field, dim=1).flatten(0, 1) for field in zip(*candidates, strict=True))
        )
        self._update_finished_hypotheses(state, candidates, generation_config)
        state.current_length += 1
        state.can_improve = self._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=state.can_improve,
            running_beam_scores=state.running_scores.flatten(0, 1),
            beam_scores=state.scores,
            is_sent_finished=state.is_finished,
            cur_len=state.current_length,
            max_length=generation_config.max_length,
            decoder_prompt_len=state.prompt_length,
            early_stopping=generation_config.early_stopping,
            length_penalty=generation_config.length_penalty,
        )
        return self._beam_search_has_unfinished_sequences(
            state.can_improve, state.is_finished, candidates.is_stopped, generation_config.early_stopping
        )

    def _extend_group(
        self,
        state: BeamGroups,
        group: int,
        log_probs: torch.FloatTensor,
        stopping_criteria: "StoppingCriteriaList",
        scores: tuple[torch.FloatTensor, ...] | None,
        generation_config: "GenerationConfig",
    ) -> GroupCandidates:
        """
        Chooses the candidates of one group from its penalized `log_probs` of shape `(B, M, V)`, and replaces its
        running hypotheses by the best ones that go on.
        """
        batch_size, groups, group_size = state.running_scores.shape
        eos_token_id = generation_config._eos_token_tensor
        n_eos_tokens = 0 if eos_token_id is None else eos_token_id.shape[0]
        topk_log_probs, topk_sequences, topk_beam_indices = self._get_top_k_continuations(
            accumulated_log_probs=(log_probs + state.running_scores[:, group, :, None]).flatten(1),
            running_sequences=state.running_sequences[:, group],
            running_beam_indices=state.running_beam_indices[:, group],
            cur_len=state.current_length,
            decoder_prompt_len=state.prompt_length,
            do_sample=generation_config.do_sample,
            beams_to_keep=max(2, 1 + n_eos_tokens) * group_size,
            num_beams=group_size,
            batch_size=batch_size,
        )
        # The helper counts rows within the group: (b, m) -> b * M + m, but the row is b * N + g * M + m
        items = torch.arange(batch_size, device=topk_beam_indices.device)[:, None]
        topk_beam_indices[:, :, state.step] += (items * (groups - 1) + group) * group_size

        is_stopped = stopping_criteria(topk_sequences[:, :, : state.current_length + 1].flatten(0, 1), scores)
        candidates = GroupCandidates(
            topk_log_probs, topk_sequences, topk_beam_indices, is_stopped.view(batch_size, -1)
        )
        running = self._get_running_beams_for_next_iteration(*candidates, num_beams=group_size)
        state.running_sequences[:, group], state.running_scores[:, group] = running[:2]
        state.running_beam_indices[:, group] = running[2]
        return candidates

    def _update_finished_hypotheses(
        self, state: BeamGroups, candidates: GroupCandidates, generation_config: "GenerationConfig"
    ) -> None:
        """Enters the candidates of shape `(B * G, K, ...)` that are finished and among the M best of their group."""
        group_size = state.scores.shape[1]
        ranks = torch.arange(candidates.log_probs.shape[1], device=state.scores.device)
        state.sequences, state.scores, state.beam_indices, state.is_finished = self._update_finished_beams(
            sequences=state.sequences,
            topk_running_sequences=candidates.sequences,
            beam_scores=state.scores,
            topk_log_probs=candidates.log_probs,
            beam_indices=state.beam_indices,
            topk_running_beam_indices=candidates.beam_indices,
            is_early_stop_heuristic_unsatisfied=state.can_improve,
            is_sent_finished=state.is_finished,
            next_token_hits_stopping_criteria=candidates.is_stopped,
            top_num_beam_mask=ranks < group_size,
            num_beams=group_size,
            cur_len=state.current_length,
            decoder_prompt_len=state.prompt_length,
            length_penalty=generation_config.length_penalty,
            early_stopping=generation_config.early_stopping,
        )

    def _reorder_cache_rows(self, model_kwargs: dict[str, Any], row_indices: torch.IntTensor) -> None:
        """Reorders the cache, if there is one, to the B * N rows that the running hypotheses go on from."""
        from .utils import ALL_CACHE_NAMES

        name = next((name for name in ALL_CACHE_NAMES if name in model_kwargs), None)
        if name is None:
            return
        # Models with state of their own have a method for it
        if hasattr(self, "_reorder_cache"):
            model_kwargs[name] = self._reorder_cache(model_kwargs[name], row_indices)
        elif hasattr(model_kwargs[name], "reorder_cache"):
            model_kwargs[name].reorder_cache(row_indices)
        else:
            raise ValueError(
                f"`num_beam_groups` must be 1 with {type(self).__name__}: its cache, a "
                f"{type(model_kwargs[name]).__name__}, can't be reordered."
            )

    def _group_beam_search_output(
        self: "PreTrainedModel",
        state: BeamGroups,
        records: dict[str, tuple],
        generation_config: "GenerationConfig",
        model_kwargs: dict[str, Any],
    ) -> "GenerateBeamOutput | torch.LongTensor":
        """Ranks the hypotheses of an item over all of its groups, and returns the best ones."""
        from .utils import ALL_CACHE_NAMES, GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

        batch_size, groups, group_size = state.running_scores.shape
        # (B * G, M, ...) -> (B, N, ...)
        scores = state.scores.view(batch_size, groups * group_size)
        # Of equal scores the one of the earlier group is first
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : generation_config.num_return_sequences]

        def take_best(hypotheses: torch.Tensor) -> torch.Tensor:
            hypotheses = hypotheses.view(batch_size, groups * group_size, *hypotheses.shape[2:])
            return self._flatten_beam_dim(self._gather_beams(hypotheses, best))

        sequences, scores, beam_indices = (take_best(x) for x in (state.sequences, state.scores, state.beam_indices))
        # Nothing but padding lies behind the longest hypothesis
        generated_length = (beam_indices >= 0).sum(dim=1).max()
        sequences = sequences[:, : state.prompt_length + generated_length]
        if not generation_config.return_dict_in_generate:
            return sequences

        cache_name = next((name for name in ALL_CACHE_NAMES if name in model_kwargs), None)
        fields = {
            **records,
            "sequences": sequences,
            "sequences_scores": scores if generation_config.output_scores else None,
            "beam_indices": beam_indices[:, :generated_length],
            "cache": model_kwargs.get(cache_name),
        }
        if not self.config.is_encoder_decoder:
            return GenerateBeamDecoderOnlyOutput(**fields)
        encoder_outputs = model_kwargs["encoder_outputs"]
        if generation_config.output_attentions:
            fields["encoder_attentions"] = encoder_outputs.get("attentions")
        if generation_config.output_hidden_states:
            fields["encoder_hidden_states"] = encoder_outputs.get("hidden_states")
        return GenerateBeamEncoderDecoderOutput(**fields)
