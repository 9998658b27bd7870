# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
How Whisper decodes several sequences per audio.

`generate` turns B audios into B * R rows, item by item, for the R sequences to return, and decodes all of them segment
by segment; every row has a position of its own in its audio (`seek`). Here, rows are led back to what they share: a
segment is encoded once for all rows that stand at its beginning, and one beam search per audio returns its R best
hypotheses in place of R beam searches that all return the same one.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...generation.equal_rows import group_equal
from ...generation.logits_process import WhisperNoSpeechDetection
from ...generation.prefill_obstacles import is_overridden
from ...utils import ModelOutput, logging


if TYPE_CHECKING:
    from ...generation import GenerationConfig
    from ...modeling_outputs import BaseModelOutput


logger = logging.get_logger(__name__)

# An audio (index in the batch) and the first frame of the segment in it
Segment = tuple[int, int]

# Fields of a generation output that have one row per audio, per hypothesis and per beam
ENCODER_FIELDS = ("encoder_attentions", "encoder_hidden_states")
HYPOTHESIS_FIELDS = ("sequences", "sequences_scores", "beam_indices")
BEAM_FIELDS = ("scores", "logits", "decoder_attentions", "decoder_hidden_states", "cross_attentions", "cache")


def map_tensors(function: Callable[..., torch.Tensor], *trees: Any) -> Any:
    """Applies `function` to the tensors of alike `trees`: tensors in tuples, lists, dicts and model outputs."""
    return pytree.tree_map(lambda *leaves: function(*leaves) if torch.is_tensor(leaves[0]) else leaves[0], *trees)


def select_rows(tree: Any, rows: list[int]) -> Any:
    return map_tensors(lambda tensor: tensor[rows], tree)


def find_detector(logits_processor: list | None) -> WhisperNoSpeechDetection | None:
    return next((item for item in logits_processor or [] if isinstance(item, WhisperNoSpeechDetection)), None)


class AudioSegments:
    """
    What the rows of one call of `generate` share, from segment to segment.

    Args:
        num_audios (`int`): Number B of audios.
        sequences_per_audio (`int`): Number R of sequences to return for each of them.
    """

    def __init__(self, num_audios: int, sequences_per_audio: int) -> None:
        self.num_audios = num_audios
        self.sequences_per_audio = sequences_per_audio
        self.num_active_rows = num_audios * sequences_per_audio
        # Which hypothesis of a beam search over its segment a row takes
        self.hypotheses = [0] * self.num_active_rows
        # The per-beam fields of a beam search that returned the hypotheses of all rows
        self.beam_fields: dict[str, Any] = {}
        self._encoded: dict[Segment, tuple[BaseModelOutput, int]] = {}

    def audio(self, row: int) -> int:
        return row // self.sequences_per_audio

    def start_segment(self, active_rows: list[int], seek: torch.Tensor) -> None:
        """Forgets the segments that all of the rows still to be decoded have passed."""
        self.num_active_rows = len(active_rows)
        self.beam_fields = {}
        earliest: dict[int, int] = {}
        for row in active_rows:
            audio, position = self.audio(row), int(seek[row])
            earliest[audio] = min(position, earliest.get(audio, position))
        self._encoded = {
            (audio, position): encoded
            for (audio, position), encoded in self._encoded.items()
            if audio in earliest and position >= earliest[audio]
        }

    def assign_hypotheses(self, active_rows: list[int], seek: torch.Tensor, parts: list[list[dict]]) -> None:
        """
        Lets the rows of an audio take the best hypotheses of its segment, as long as they are equal: a row that is
        different from the others takes the best one.

        Args:
            active_rows (`list[int]`): The rows still to be decoded.
            seek (`torch.LongTensor` of shape `(B * R,)`): First frame of the segment of each row.
            parts (`list[list[dict]]`): What has been transcribed for each of the B * R rows, with its `tokens`.
        """
        num_equal: Counter = Counter()
        for row in active_rows:
            tokens = torch.cat([part["tokens"] for part in parts[row]]).tolist() if parts[row] else []
            state = (self.audio(row), int(seek[row]), tuple(tokens))
            self.hypotheses[row] = num_equal[state]
            num_equal[state] += 1

    def is_encoded(self, segment: Segment) -> bool:
        return segment in self._encoded

    def keep(self, segments: list[Segment], encoder_outputs: "BaseModelOutput") -> None:
        self._encoded.update((segment, (encoder_outputs, row)) for row, segment in enumerate(segments))

    def encoder_outputs(self, segments: list[Segment]) -> "BaseModelOutput":
        """Returns the outputs of the encoder with one row for each of `segments`, all of which have been encoded."""
        sources = [self._encoded[segment] for segment in segments]
        first, rows = sources[0][0], [row for _, row in sources]
        if any(source is not first for source, _ in sources):
            parts = [select_rows(source, [row]) for source, row in sources]
            return map_tensors(lambda *rows: torch.cat(rows), *parts)
        if rows == list(range(len(first[0]))):
            return copy.copy(first)
        return select_rows(first, rows)


@dataclass
class SegmentBatch:
    """
    What one call of the decoding loop gets to decode P rows: G rows and a number of sequences to make of each.

    Args:
        segments (`AudioSegments`): The state of the call of `generate`.
        rows (`list[int]`): The P rows, among all B * R rows.
        row_segments (`list[tuple[int, int]]`): The segment of each of the P rows.
        firsts (`list[int]`): The positions, among the P rows, of the G rows.
        groups (`list[int]`): Which of the G rows stands for each of the P rows.
        hypotheses (`list[int]`): Which of its sequences each of the P rows takes.
        detector (`WhisperNoSpeechDetection`, *optional*): Reads the encoder's outputs of the P rows as well.
    """

    segments: AudioSegments
    rows: list[int]
    row_segments: list[Segment]
    firsts: list[int]
    groups: list[int]
    hypotheses: list[int]
    detector: WhisperNoSpeechDetection | None = None

    @property
    def num_return_sequences(self) -> int:
        return max(self.hypotheses) + 1

    @property
    def is_identity(self) -> bool:
        return self.num_return_sequences == 1 and len(self.firsts) == len(self.rows)

    def select_inputs(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """
        Returns `model_kwargs` for G rows. The decoder's mask is made for each segment and has P rows; tensors that the
        caller passed in have B or B * R.
        """
        if self.segments.sequences_per_audio == 1:
            return model_kwargs
        rows = [self.rows[first] for first in self.firsts]
        by_rows = {
            self.segments.num_audios: [self.segments.audio(row) for row in rows],
            self.segments.num_audios * self.segments.sequences_per_audio: rows,
        }

        def select(value: torch.Tensor) -> torch.Tensor:
            return value[by_rows[len(value)]] if value.ndim > 0 and len(value) in by_rows else value

        selected = dict(model_kwargs)
        for name, value in model_kwargs.items():
            if name == "decoder_attention_mask" and value is not None:
                selected[name] = value[self.firsts]
            elif name == "prefix_allowed_tokens_fn" and value is not None:
                selected[name] = self._by_audio(value)
            elif isinstance(value, torch.Tensor) or name == "encoder_outputs":
                selected[name] = map_tensors(select, value)
        return selected

    def _by_audio(self, prefix_allowed_tokens_fn: Callable) -> Callable:
        """Which rows are decoded changes from segment to segment: the caller's function is told the audio instead."""
        return lambda group, tokens: prefix_allowed_tokens_fn(self.row_segments[self.firsts[group]][0], tokens)

    def restore_rows(self, outputs: ModelOutput | torch.LongTensor) -> ModelOutput | torch.LongTensor:
        """Leads the `G * num_return_sequences` sequences of `outputs`, and all that belongs to them, back to P rows."""
        if self.is_identity:
            return outputs
        sequences = [
            group * self.num_return_sequences + hypothesis
            for group, hypothesis in zip(self.groups, self.hypotheses, strict=True)
        ]
        if isinstance(outputs, torch.Tensor):
            return outputs[sequences]
        for fields, rows in ((HYPOTHESIS_FIELDS, sequences), (ENCODER_FIELDS, self.groups)):
            for name in fields:
                if outputs.get(name) is not None:
                    outputs[name] = select_rows(outputs[name], rows)
        return outputs


class SegmentGenerationMixin:
    """
    The part of [`WhisperGenerationMixin`] that decodes R sequences per audio from one run of the encoder, and returns
    the R best hypotheses of one beam search per audio.

    In long-form transcription, the R rows of an audio take the R best hypotheses of its first segment. From there on
    each row is decoded by itself: by beam search, it continues with its best hypothesis. Rows that are equal after all
    (a segment was skipped as silence, or the hypotheses differ only after the last timestamp, where the segment is cut
    off) take different hypotheses of the next segment.
    """

    def _expand_variables_per_sequence(
        self,
        *,
        kwargs: dict[str, Any],
        generation_config: "GenerationConfig",
        batch_size: int,
        input_features: torch.Tensor | None,
        **variables: Any,
    ) -> tuple:
        """
        Prepares the variables of `generate` for B * R rows, see `_expand_variables_for_generation`.

        Args:
            kwargs (`dict`):
                The inputs of the model. They are changed in place: `segments` is added, the decoder's inputs are
                repeated.
            generation_config ([`GenerationConfig`]): The configuration of this call alone, changed in place.
            batch_size (`int`): Number B of audios.
            input_features (`torch.Tensor` of shape `(B, num_mel_bins, num_frames)`, *optional*):
                The features, `None` if `kwargs` holds `encoder_outputs`.
            variables: The other arguments of `_expand_variables_for_generation`.

        Raises:
            `ValueError`: If `decoder_input_ids` or `decoder_attention_mask` have neither B nor B * R rows.
        """
        num_sequences = generation_config.num_return_sequences or 1
        if is_overridden(self, "generate_with_fallback"):
            # It knows nothing of segments, and gets rows that have nothing in common, as ever
            logger.info_once(
                "Whisper decodes all rows by themselves: `generate_with_fallback` is not the library's own"
            )
        else:
            kwargs["segments"] = AudioSegments(batch_size, num_sequences)
        if num_sequences > 1:
            for name in ("decoder_input_ids", "decoder_attention_mask"):
                if kwargs.get(name) is not None:
                    kwargs[name] = self._repeat_per_sequence(name, kwargs[name], batch_size, num_sequences)
            if getattr(generation_config, "num_frames", None) is not None:
                generation_config.num_frames = generation_config.num_frames.repeat_interleave(num_sequences)

        features = input_features if input_features is not None else torch.empty(batch_size, 0)
        batch_idx_map, cur_bsz, features, *expanded = self._expand_variables_for_generation(
            generation_config=generation_config, batch_size=batch_size, input_features=features, **variables
        )
        return batch_idx_map, cur_bsz, features if input_features is not None else None, *expanded

    @staticmethod
    def _repeat_per_sequence(name: str, value: torch.Tensor, batch_size: int, num_sequences: int) -> torch.Tensor:
        if value.shape[0] == batch_size:
            return value.repeat_interleave(num_sequences, dim=0)
        if value.shape[0] != batch_size * num_sequences:
            raise ValueError(
                f"`{name}` must have one row per audio ({batch_size}) or one row per returned sequence "
                f"({batch_size} * {num_sequences} = {batch_size * num_sequences}), but it has {value.shape[0]} rows."
            )
        return value

    def _generate_rows_with_fallback(
        self,
        *,
        kwargs: dict[str, Any],
        seek: torch.Tensor,
        batch_idx_map: list[int],
        current_segments: list[list[dict]],
        **arguments: Any,
    ) -> tuple:
        """Decodes the next segment of each active row, see `generate_with_fallback`."""
        segments: AudioSegments | None = kwargs.get("segments")
        if segments is not None:
            segments.start_segment(batch_idx_map, seek)
            if segments.sequences_per_audio > 1 and arguments["generation_config"].num_beams > 1:
                segments.assign_hypotheses(batch_idx_map, seek, current_segments)
        return self.generate_with_fallback(kwargs=kwargs, seek=seek, batch_idx_map=batch_idx_map, **arguments)

    def _generate_segment(
        self,
        segment_input: torch.Tensor | None,
        *,
        row_indices: list[int],
        seek: torch.Tensor,
        generation_config: "GenerationConfig",
        decoder_input_ids: torch.LongTensor,
        segments: AudioSegments | None = None,
        **kwargs: Any,
    ) -> ModelOutput | torch.LongTensor:
        """
        Decodes one segment of each of P rows, at one temperature.

        Args:
            segment_input (`torch.Tensor` of shape `(P, num_mel_bins, num_frames)`, *optional*):
                The features of the segments, `None` if `kwargs` holds `encoder_outputs`. There may be more rows than
                `row_indices` tells of, as padding for a static cache.
            row_indices (`list[int]`): The rows among all B * R rows.
            seek (`torch.LongTensor` of shape `(B * R,)`): First frame of the segment of each row.
            generation_config ([`GenerationConfig`]): The generation configuration, for one sequence per row.
            decoder_input_ids (`torch.LongTensor` of shape `(P, L)`): The prompts.
            segments (`AudioSegments`, *optional*):
                State of this call of `generate`. Without it, rows have nothing in common.
            kwargs: The other arguments of [`~GenerationMixin.generate`].

        Returns:
            [`~utils.ModelOutput`] or `torch.LongTensor`: The output of [`~GenerationMixin.generate`] for P rows. Its
            per-beam fields have one row per beam of each search.
        """
        if segments is None:
            return super().generate(
                segment_input, generation_config=generation_config, decoder_input_ids=decoder_input_ids, **kwargs
            )
        batch = self._plan_batch(
            segments, row_indices, seek, generation_config, decoder_input_ids, kwargs.get("decoder_attention_mask")
        )
        kwargs = batch.select_inputs(kwargs)
        if not batch.is_identity:
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = batch.num_return_sequences
            decoder_input_ids = decoder_input_ids[batch.firsts]
            segment_input = segment_input[batch.firsts] if segment_input is not None else None
        segments.beam_fields = {}
        detector = find_detector(kwargs.get("logits_processor"))
        if self.training:
            logger.info_once("Whisper encodes anew for each call: in training mode, each run draws its own dropout")
        elif kwargs.get("encoder_outputs") is None:
            batch.detector = detector
            # Only a placeholder: all checks of `generate` come before the encoder runs
            kwargs["encoder_outputs"] = batch

        outputs = super().generate(
            segment_input, generation_config=generation_config, decoder_input_ids=decoder_input_ids, **kwargs
        )
        if generation_config.num_beams > 1:
            self._keep_beam_fields(batch, outputs)
            self._align_no_speech_probability(batch, detector, generation_config.num_beams)
        return batch.restore_rows(outputs)

    def _plan_batch(
        self,
        segments: AudioSegments,
        row_indices: list[int],
        seek: torch.Tensor,
        generation_config: "GenerationConfig",
        decoder_input_ids: torch.LongTensor,
        decoder_attention_mask: torch.Tensor | None,
    ) -> SegmentBatch:
        """Decides which rows are decoded together, as several sequences of one row."""
        num_rows = len(decoder_input_ids)
        # What is decoded for a padding row is dropped: any segment will do
        num_padding = num_rows - len(row_indices)
        rows = row_indices + row_indices[:1] * num_padding
        row_segments = [(segments.audio(row), int(seek[row])) for row in rows]
        positions = list(range(num_rows))
        single = SegmentBatch(segments, rows, row_segments, positions, positions, [0] * num_rows)
        if segments.sequences_per_audio == 1:
            return single

        if generation_config.num_beams > 1:
            single.hypotheses = [segments.hypotheses[row] for row in rows]
        if num_padding > 0:
            # A static cache is to keep its number of rows
            return single

        prompts = [tuple(prompt) for prompt in decoder_input_ids.tolist()]
        masks = decoder_attention_mask.tolist() if decoder_attention_mask is not None else [[]] * num_rows
        firsts, groups = group_equal(list(zip(row_segments, prompts, map(tuple, masks), strict=True)))
        if generation_config.num_beams > 1:
            return replace(single, firsts=firsts, groups=groups)
        # A row that draws has to draw for itself, in the order of the rows
        size = num_rows // len(firsts)
        is_even = groups == [position // size for position in positions]
        if generation_config.do_sample and is_even and not self.training:
            hypotheses = [position % size for position in positions]
            return replace(single, firsts=firsts, groups=groups, hypotheses=hypotheses)
        return single

    def _maybe_prepare_encoder_kwargs_for_generation(
        self,
        inputs_tensor: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: "GenerationConfig",
    ) -> dict[str, Any]:
        """Runs the encoder on the segments that it hasn't seen yet, where `encoder_outputs` is a [`SegmentBatch`]."""
        batch = model_kwargs.get("encoder_outputs")
        if not isinstance(batch, SegmentBatch):
            return super()._maybe_prepare_encoder_kwargs_for_generation(
                inputs_tensor, model_kwargs, model_input_name, generation_config
            )
        del model_kwargs["encoder_outputs"]
        row_segments = [batch.row_segments[first] for first in batch.firsts]
        firsts, _ = group_equal(row_segments)
        new = [row for row in firsts if not batch.segments.is_encoded(row_segments[row])]
        if new:
            encoded = super()._maybe_prepare_encoder_kwargs_for_generation(
                inputs_tensor[new], dict(model_kwargs), model_input_name, generation_config
            )
            batch.segments.keep([row_segments[row] for row in new], encoded["encoder_outputs"])
        model_kwargs["encoder_outputs"] = batch.segments.encoder_outputs(row_segments)
        self._share_with_detector(batch)
        return model_kwargs

    @staticmethod
    def _share_with_detector(batch: SegmentBatch) -> None:
        """Hands the encoder's outputs to a detector that forwards the prompts once more, for all of their rows."""
        detector = batch.detector
        if detector is None or detector.start_of_trans_offset <= 1:
            return
        if detector.inputs.get("encoder_outputs") is None:
            num_rows = len(detector.inputs["input_features"])
            detector.inputs["encoder_outputs"] = batch.segments.encoder_outputs(batch.row_segments[:num_rows])

    @staticmethod
    def _align_no_speech_probability(
        batch: SegmentBatch, detector: WhisperNoSpeechDetection | None, num_beams: int
    ) -> None:
        """Gives each of the P rows its own probability, where a detector has read the scores of all beams."""
        if batch.segments.sequences_per_audio > 1 and detector is not None and detector.start_of_trans_offset <= 1:
            detector._no_speech_prob = detector._no_speech_prob[[group * num_beams for group in batch.groups]]

    def _postprocess_rows(self, *, row_indices: list[int], batch_idx_map: list[int], **arguments: Any) -> tuple:
        """Splits the outputs into rows, see `_postprocess_outputs`, with the audio lengths of just these rows."""
        num_rows = len(arguments["decoder_input_ids"])
        rows = row_indices + row_indices[:1] * (num_rows - len(row_indices))
        return self._postprocess_outputs(batch_idx_map=rows, **arguments)

    @staticmethod
    def _keep_beam_fields(batch: SegmentBatch, outputs: ModelOutput | torch.LongTensor) -> None:
        """Keeps the per-beam fields of a beam search for the output of `generate`, if it serves all rows."""
        if isinstance(outputs, ModelOutput) and len(batch.rows) == batch.segments.num_active_rows:
            batch.segments.beam_fields = {name: outputs[name] for name in BEAM_FIELDS if outputs.get(name) is not None}

    def _stack_segment_outputs(
        self, seek_outputs: list[dict[str, Any]], model_output_type: type, device: torch.device, kwargs: dict[str, Any]
    ) -> ModelOutput | dict[str, Any]:
        """
        Stacks the outputs of single rows, see `_stack_split_outputs`. Fields that have one row per beam are returned
        as beam search has left them: `beam_indices` tells which of their rows belong to a sequence.
        """
        outputs = self._stack_split_outputs(seek_outputs, model_output_type, device, kwargs)
        if (segments := kwargs.get("segments")) is not None:
            for name, value in segments.beam_fields.items():
                outputs[name] = value
        return outputs
