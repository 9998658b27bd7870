# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Whisper with several sequences per audio: each segment of an audio is encoded once, beam search returns its best
hypotheses, and what upstream does as well it does with the same tokens.
"""

import unittest
from hashlib import sha256
from typing import Any

import torch
from parameterized import parameterized

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, WhisperConfig
from transformers import WhisperForConditionalGeneration as Whisper
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from .runs import oracle


# Text tokens come first, as in real vocabularies: end, start, languages, task, no speech, and one timestamp per position
EOS, SOT, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS, VOCABULARY = 60, 61, 62, 64, 68, 100
SEGMENT_FRAMES, MEL_BINS = 60, 8

SHORT, LONG = (SEGMENT_FRAMES, SEGMENT_FRAMES), (150, 130)
TIMESTAMPS = {"return_timestamps": True, "max_new_tokens": 6}
ONE_CALL = {"force_unique_generate_call": True, "max_new_tokens": 6}
SAMPLE = {"do_sample": True, "temperature": 0.8}
# Of the tiny model's segments some stay above the threshold at the first temperature, others go on to the next
FALLBACK = {"temperature": (0.0, 0.4, 0.8), "logprob_threshold": -0.8}
DETECTION = {**FALLBACK, "no_speech_threshold": 0.001}
FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ALL_FIELDS = {**FIELDS, "output_attentions": True, "output_hidden_states": True}


def build_whisper(**config: Any) -> Whisper:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "init_std": 0.5, "num_mel_bins": MEL_BINS}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    tokens = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS, "decoder_start_token_id": SOT}
    positions = {"max_source_positions": SEGMENT_FRAMES // 2, "max_target_positions": 60}
    suppressed = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = Whisper(
        WhisperConfig(vocab_size=VOCABULARY, **sizes, **tokens, **positions, **suppressed, **config)
    ).eval()
    model.generation_config.update(
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=NO_TIMESTAMPS - 2,
        alignment_heads=[[0, 0], [1, 2]],
        allow_custom_entries=True,
    )
    return model


def build_audio(lengths: tuple[int, ...], silence: bool = False) -> dict[str, torch.Tensor]:
    """
    Returns one row of features per length (in frames) and the mask, with `silence` as the first segment of the first
    row: what the tiny model takes for it.
    """
    shape = (len(lengths), MEL_BINS, max(lengths))
    features = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if silence:
        candidates = torch.randn((8, MEL_BINS, SEGMENT_FRAMES), generator=torch.Generator().manual_seed(3))
        features[0, :, :SEGMENT_FRAMES] = 3 * candidates[1]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_features": features, "attention_mask": mask}


def add_languages(model: Whisper) -> None:
    model.generation_config.update(
        is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH},
        task_to_id={"transcribe": TRANSCRIBE},
        allow_custom_entries=True,
    )


def transcribe(
    lengths: tuple[int, ...],
    arguments: dict[str, Any],
    training: bool = False,
    silence: bool = False,
    audio: int | None = None,
) -> dict[str, Any]:
    """
    Calls `generate` after `torch.manual_seed(0)`, on all audios or on one of them. Runs in the fork and, by name, in
    the oracle.

    Returns:
        `dict`: The output fields as plain data, the `encoded` segments (a digest of each row that the encoder got, but
        for padding) and the rows of each forward of the decoder.
    """
    model = build_whisper(**({"dropout": 0.2} if training else {})).train(training)
    if "language" in arguments:
        add_languages(model)
    if arguments.get("output_attentions"):
        model.set_attn_implementation("eager")
    encoded, decoder_rows = [], []

    def record_encoder(module, args, kwargs):
        features = args[0] if args else kwargs["input_features"]
        encoded.extend(sha256(row.numpy().tobytes()).hexdigest() for row in features if row.any())

    model.get_encoder().register_forward_pre_hook(record_encoder, with_kwargs=True)
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: decoder_rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    inputs = build_audio(lengths, silence)
    if audio is not None:
        inputs = {name: value[audio : audio + 1] for name, value in inputs.items()}
    torch.manual_seed(0)
    outputs = model.generate(**inputs, **arguments)
    fields = dict(outputs) if isinstance(outputs, dict) else {"sequences": outputs}
    fields.pop("cache", None)
    segments = fields.pop("segments", None)
    if segments is not None:
        fields["segments"] = [
            [(float(part["start"]), float(part["end"]), part["tokens"].tolist()) for part in row] for row in segments
        ]
    return {**fields, "encoded": encoded, "decoder_rows": decoder_rows}


def transcribe_both(lengths: tuple[int, ...], arguments: dict[str, Any], **kwargs: Any) -> tuple[dict, dict]:
    ours = transcribe(lengths, arguments, **kwargs)
    return ours, oracle().run(transcribe, lengths, arguments, **kwargs)


def search(
    features: torch.Tensor, prompt: tuple[int, ...], num_beams: int, num_hypotheses: int, timestamps: bool = False
) -> dict[str, Any]:
    """
    The beam search of [`GenerationMixin`], which Whisper's own `generate` calls for each segment, on one segment per
    row. In the oracle it is the reference for hypotheses and transition scores.
    """
    model = build_whisper()
    processors = []
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=len(prompt)))
    outputs = GenerationMixin.generate(
        model,
        features,
        decoder_input_ids=torch.tensor([prompt] * len(features)),
        num_beams=num_beams,
        num_return_sequences=num_hypotheses,
        max_new_tokens=6,
        logits_processor=processors,
        **FIELDS,
    )
    transition_scores = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    return {"sequences": outputs.sequences, "scores": outputs.scores, "transition_scores": transition_scores}


def cut_off(hypothesis: torch.Tensor, num_frames: int) -> tuple[list[int], int]:
    """Returns the tokens of a segment that Whisper keeps, and the frames that they cover."""
    parts, offset = Whisper._retrieve_segment(
        seek_sequence=hypothesis[hypothesis != EOS],
        seek_outputs=[None],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=NO_TIMESTAMPS + 1,
        seek_num_frames=torch.tensor([num_frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.tensor([[SOT]]),
    )
    return torch.cat([part["tokens"] for part in parts]).tolist(), int(offset)


def transcribe_hypotheses(
    features: torch.Tensor, num_beams: int, num_hypotheses: int, prompt: tuple[int, ...] = (SOT,)
) -> list[list[int]]:
    """
    The reference for long-form hypotheses of one audio: a search for each segment of each row. Rows that are equal so
    far take different hypotheses.
    """
    num_frames = features.shape[-1]
    rows = [(0, [])] * num_hypotheses
    while any(seek < num_frames for seek, _ in rows):
        before = list(rows)
        for row, (seek, tokens) in enumerate(before):
            if seek < num_frames:
                segment = features[:, :, seek : seek + SEGMENT_FRAMES]
                padded = torch.nn.functional.pad(segment, (0, SEGMENT_FRAMES - segment.shape[-1]))
                hypotheses = search(padded, prompt, num_beams, num_hypotheses, timestamps=True)["sequences"]
                rank = before[:row].count((seek, tokens))
                kept, offset = cut_off(hypotheses[rank, len(prompt) :], segment.shape[-1])
                rows[row] = (seek + offset, tokens + kept)
    return [tokens for _, tokens in rows]


def without_padding(sequences: torch.Tensor) -> list[list[int]]:
    return [row[row != EOS].tolist() for row in sequences]


class WhisperTest(unittest.TestCase):
    def assert_equal(self, ours: Any, theirs: Any, name: str = "") -> None:
        """Asserts that nested outputs agree: integers are equal, floating-point numbers to 1e-5."""
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)
        elif isinstance(theirs, torch.Tensor):
            self.assertEqual(ours.tolist(), theirs.tolist(), name)
        elif isinstance(theirs, tuple):
            self.assertEqual(len(ours), len(theirs), name)
            for our, their in zip(ours, theirs, strict=True):
                self.assert_equal(our, their, name)
        else:
            self.assertEqual(ours, theirs, name)

    def assert_same_outputs(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        counts = {"encoded", "decoder_rows"}
        self.assertEqual(ours.keys(), theirs.keys())
        for name in sorted(ours.keys() - counts, key=lambda name: (name != "sequences", name)):
            self.assert_equal(ours[name], theirs[name], name)

    def assert_encoded_once(self, ours: dict[str, Any], theirs: dict[str, Any] | None = None) -> None:
        """Asserts that no segment was encoded twice, and that upstream encodes the same ones, some of them again."""
        self.assertEqual(len(ours["encoded"]), len(set(ours["encoded"])))
        if theirs is not None:
            self.assertGreater(len(theirs["encoded"]), len(ours["encoded"]))
            self.assertEqual(set(ours["encoded"]), set(theirs["encoded"]))


class WhisperSamplingTest(WhisperTest):
    """Pristine upstream, which encodes and decodes B * R rows, is the oracle."""

    @parameterized.expand(
        [
            ("short", SHORT, ONE_CALL),
            ("timestamps", SHORT, TIMESTAMPS),
            ("long", LONG, TIMESTAMPS),
            ("long_conditioned", LONG, {**TIMESTAMPS, "condition_on_prev_tokens": True}),
            ("long_language", LONG, {**TIMESTAMPS, "language": "en"}),
            ("long_static", LONG, {**TIMESTAMPS, "cache_implementation": "static"}),
        ]
    )
    def test_sampling(self, _, lengths: tuple[int, ...], arguments: dict[str, Any]):
        ours, theirs = transcribe_both(lengths, {**arguments, **SAMPLE, "num_return_sequences": 3})
        self.assert_encoded_once(ours, theirs)
        self.assertEqual((ours["decoder_rows"][0], theirs["decoder_rows"][0]), (2, 6))
        self.assertEqual(len(set(map(tuple, ours["sequences"].tolist()))), 6)
        self.assert_same_outputs(ours, theirs)

    def test_a_segment_is_kept_for_rows_that_come_to_it_later(self):
        """With five rows at different speeds, some come to a segment that another row has had before."""
        ours = transcribe(LONG[:1], {**TIMESTAMPS, **SAMPLE, "num_return_sequences": 5})
        self.assert_encoded_once(ours)
        self.assertGreater(len(ours["encoded"]), 5)

    @parameterized.expand(
        [
            ("greedy", SHORT, {**ONE_CALL, "do_sample": True, "num_return_sequences": 3}),
            ("fallback_one", LONG, {**TIMESTAMPS, **FALLBACK}),
            ("fallback", LONG, {**TIMESTAMPS, **FALLBACK, "do_sample": True, "num_return_sequences": 3}),
            ("fallback_static", LONG, {**TIMESTAMPS, **FALLBACK, "cache_implementation": "static"}),
            ("detection_one", SHORT, {**TIMESTAMPS, **DETECTION, "language": "en"}),
            ("detection", LONG, {**TIMESTAMPS, **DETECTION, "do_sample": True, "num_return_sequences": 3}),
        ]
    )
    def test_fallback(self, _, lengths: tuple[int, ...], arguments: dict[str, Any]):
        """Another temperature, a greedy row and the detection of silence read what has been encoded before."""
        ours, theirs = transcribe_both(lengths, {**arguments, "return_segments": "return_timestamps" in arguments})
        self.assert_encoded_once(ours, theirs)
        self.assert_same_outputs(ours, theirs)

    @parameterized.expand([("sample", {**SAMPLE, "num_return_sequences": 3}), ("greedy", {})])
    def test_outputs(self, _, arguments: dict[str, Any]):
        """Every field of an output without beams, and encoder fields with one row per audio."""
        ours, theirs = transcribe_both(SHORT, {**ONE_CALL, **ALL_FIELDS, **arguments})
        self.assert_encoded_once(ours)
        self.assertEqual(len(ours["encoder_attentions"][0]), 2)
        self.assertIn("cross_attentions", ours)
        self.assert_same_outputs(ours, theirs)

    def test_training_mode_encodes_each_row(self):
        ours, theirs = transcribe_both(SHORT, {**ONE_CALL, **SAMPLE, "num_return_sequences": 3}, training=True)
        self.assertEqual(len(ours["encoded"]), 6)
        self.assert_same_outputs(ours, theirs)

    @parameterized.expand([(1,), (2,)])
    def test_token_timestamps(self, num_sequences: int):
        """Upstream fails with audios of several lengths if some rows fall back: each audio alone is the reference."""
        fallback = {"temperature": (0.0, 0.8), "logprob_threshold": -0.83}
        arguments = {**TIMESTAMPS, **ONE_CALL, "return_token_timestamps": True, **fallback}
        ours = transcribe((60, 50), {**arguments, "do_sample": True, "num_return_sequences": num_sequences})
        self.assert_encoded_once(ours)
        self.assertEqual((ours["decoder_rows"][0], ours["decoder_rows"][-1]), (2 * num_sequences, num_sequences))
        for audio in range(2):
            alone = {**arguments, "do_sample": True, "num_return_sequences": num_sequences}
            theirs = oracle().run(transcribe, (60, 50), alone, audio=audio)
            rows = slice(audio * num_sequences, (audio + 1) * num_sequences)
            for name in ("sequences", "token_timestamps"):
                self.assert_equal(ours[name][rows], theirs[name], name)


class WhisperHypothesesTest(WhisperTest):
    """The reference is upstream's beam search without Whisper's own `generate` around it."""

    @parameterized.expand([(1, 4, 4), (2, 4, 4), (2, 4, 3), (2, 3, 1)])
    def test_short_form(self, batch_size: int, num_beams: int, num_hypotheses: int):
        ours = transcribe(
            SHORT[:batch_size], {**ONE_CALL, "num_beams": num_beams, "num_return_sequences": num_hypotheses}
        )
        self.assert_encoded_once(ours)
        self.assertEqual(ours["decoder_rows"][:2], [batch_size, batch_size * num_beams])
        features = build_audio(SHORT)["input_features"][:batch_size]
        theirs = oracle().run(search, features, (SOT, NO_TIMESTAMPS), num_beams, num_hypotheses)
        self.assert_equal(ours["sequences"], theirs["sequences"])
        self.assertEqual(len(set(map(tuple, ours["sequences"].tolist()))), batch_size * num_hypotheses)

    @parameterized.expand(
        [
            ("short", SHORT, ONE_CALL, False),
            ("long", LONG, TIMESTAMPS, False),
            ("long_conditioned", LONG, {**TIMESTAMPS, "condition_on_prev_tokens": True}, False),
            ("fallback", LONG, {**TIMESTAMPS, **FALLBACK}, True),
            ("detection", LONG, {**TIMESTAMPS, **DETECTION, "language": "en"}, True),
        ]
    )
    def test_one_hypothesis_same_as_upstream(self, _, lengths, arguments: dict[str, Any], encodes_again: bool):
        ours, theirs = transcribe_both(lengths, {**arguments, "num_beams": 3})
        self.assert_encoded_once(ours, theirs if encodes_again else None)
        self.assertEqual((ours["decoder_rows"][0], theirs["decoder_rows"][0]), (2, 6))
        self.assert_same_outputs(ours, theirs)

    def assert_hypotheses(
        self, ours: dict[str, Any], audios: list[torch.Tensor], num_hypotheses: int, prompt: tuple[int, ...] = (SOT,)
    ) -> None:
        """Asserts that the hypotheses of each audio are those of the reference, and different."""
        arguments = (3, num_hypotheses, prompt)
        theirs = [tokens for audio in audios for tokens in oracle().run(transcribe_hypotheses, audio, *arguments)]
        self.assertEqual(without_padding(ours["sequences"]), theirs)
        self.assertEqual(len(set(map(tuple, theirs))), len(audios) * num_hypotheses)

    def test_long_form(self):
        """The hypotheses of the first segment go on each by itself; the first of them is what upstream returns."""
        ours = transcribe(LONG, {**TIMESTAMPS, "num_beams": 3, "num_return_sequences": 3})
        self.assert_encoded_once(ours)
        self.assertEqual(ours["decoder_rows"][:2], [2, 6])
        features = build_audio(LONG)["input_features"]
        self.assert_hypotheses(ours, [features[:1], features[1:, :, : LONG[1]]], 3)
        best = oracle().run(transcribe, LONG, {**TIMESTAMPS, "num_beams": 3})
        self.assertEqual(without_padding(ours["sequences"][::3]), without_padding(best["sequences"]))

    @parameterized.expand([("recompute", 6), ("copy", 2), ("share", 2)])
    def test_prompt_expansion(self, prompt_expansion: str, rows: int):
        """The decoder's prompt obeys the knob; the encoder has been run before, once per segment in any case."""
        arguments = {**TIMESTAMPS, "num_beams": 3, "num_return_sequences": 3}
        ours = transcribe(LONG, {**arguments, "prompt_expansion": prompt_expansion})
        self.assert_encoded_once(ours)
        self.assertEqual(ours["decoder_rows"][0], rows)
        self.assert_equal(ours["sequences"], transcribe(LONG, arguments)["sequences"])

    def test_fallback_of_single_hypotheses(self):
        """Only hypotheses below the threshold are decoded again; their audio isn't encoded again."""
        beams = {**ONE_CALL, "num_beams": 4, "num_return_sequences": 4, "return_segments": True}
        hypotheses = transcribe(SHORT, beams)
        ours = transcribe(SHORT, {**beams, "temperature": (0.0, 1.0), "logprob_threshold": -0.9})
        self.assert_encoded_once(ours)
        again = ours["decoder_rows"][-1]
        self.assertTrue(0 < again < 8, f"{again} of 8 rows fell back")
        kept = [our == their for our, their in zip(ours["segments"], hypotheses["segments"], strict=True)]
        self.assertEqual(kept.count(False), again)

    @parameterized.expand([("english", {}, (SOT,)), ("language", {"language": "en"}, (SOT, ENGLISH, TRANSCRIBE))])
    def test_silence_before_the_first_segment(self, _, arguments: dict[str, Any], prompt: tuple[int, ...]):
        """A segment that is skipped makes no difference between rows: they take the hypotheses of the next one."""
        # All log-probabilities are below 0: whether a segment is skipped hangs on the probability of silence alone
        detection = {"temperature": 0.0, "logprob_threshold": 0.0, "no_speech_threshold": 0.0125}
        arguments = {**TIMESTAMPS, **arguments, **detection, "num_beams": 3, "num_return_sequences": 2}
        ours = transcribe(LONG, arguments, silence=True)
        self.assert_encoded_once(ours)
        features = build_audio(LONG, silence=True)["input_features"]
        self.assert_hypotheses(ours, [features[:1, :, SEGMENT_FRAMES:], features[1:, :, : LONG[1]]], 2, prompt)


class WhisperBeamOutputsTest(WhisperTest):
    @parameterized.expand([(1,), (3,)])
    def test_transition_scores(self, num_hypotheses: int):
        model = build_whisper()
        outputs = model.generate(
            **build_audio(SHORT), **ONE_CALL, **FIELDS, num_beams=3, num_return_sequences=num_hypotheses
        )
        self.assertEqual({tuple(scores.shape) for scores in outputs.scores}, {(6, VOCABULARY)})
        transition_scores = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
        features = build_audio(SHORT)["input_features"]
        theirs = oracle().run(search, features, (SOT, NO_TIMESTAMPS), 3, num_hypotheses)
        self.assert_equal(outputs.sequences, theirs["sequences"])
        self.assert_equal(transition_scores, theirs["transition_scores"])
        self.assert_equal(outputs.scores, theirs["scores"])
        # No sequence ends early, so that its score is the mean over six tokens
        self.assert_equal(transition_scores.sum(-1) / 6, outputs.sequences_scores)

    def test_rows_of_each_field(self):
        model = build_whisper()
        model.set_attn_implementation("eager")
        outputs = model.generate(**build_audio(SHORT), **ONE_CALL, **ALL_FIELDS, num_beams=3, num_return_sequences=2)
        for name in ("scores", "logits"):
            self.assertEqual({len(step) for step in outputs[name]}, {6}, name)
        for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
            self.assertEqual({len(layer) for step in outputs[name] for layer in step}, {6}, name)
        for name in ("encoder_attentions", "encoder_hidden_states"):
            self.assertEqual({len(layer) for layer in outputs[name]}, {2}, name)
        self.assertEqual(len(outputs.cache.self_attention_cache.layers[0].keys), 6)
        self.assertEqual([len(outputs[name]) for name in ("sequences", "sequences_scores", "beam_indices")], [4, 4, 4])


class WhisperInputsTest(WhisperTest):
    def test_passed_segments_are_forgotten(self):
        # Only the fork has it, and the oracle imports this module
        from transformers.models.whisper.segment_generation import AudioSegments

        segments = AudioSegments(num_audios=2, sequences_per_audio=2)
        known = [(0, 0), (0, 20), (0, 40), (1, 0)]
        segments.keep(known, BaseModelOutput(last_hidden_state=torch.zeros(4, 1, 1)))
        # Both rows of audio 0 are past its frame 0, and audio 1 is finished
        segments.start_segment([0, 1], seek=torch.tensor([40, 20, 60, 60]))
        self.assertEqual([segment for segment in known if segments.is_encoded(segment)], [(0, 20), (0, 40)])

    @parameterized.expand([("beam", {"num_beams": 3}), ("sample", SAMPLE), ("greedy", {"do_sample": True})])
    def test_encoder_outputs_are_reused(self, _, arguments: dict[str, Any]):
        model = build_whisper()
        features = build_audio(SHORT)["input_features"]
        arguments = {**ONE_CALL, **arguments, "num_return_sequences": 2}
        with torch.no_grad():
            encoder_outputs = model.get_encoder()(features)
        hidden_state = encoder_outputs.last_hidden_state.clone()
        torch.manual_seed(0)
        expected = model.generate(features, **arguments)
        model.get_encoder().register_forward_pre_hook(lambda *_: self.fail("the encoder ran"))
        for _ in range(2):
            torch.manual_seed(0)
            self.assert_equal(model.generate(encoder_outputs=encoder_outputs, **arguments), expected)
        self.assert_equal(encoder_outputs.last_hidden_state, hidden_state)

    def test_decoder_input_ids_have_one_row_per_audio_or_sequence(self):
        model, features = build_whisper(), build_audio(SHORT)["input_features"]
        prompts = torch.tensor([[SOT, 5], [SOT, 7]])
        arguments = {**ONE_CALL, "num_beams": 3, "num_return_sequences": 3}
        outputs = model.generate(features, decoder_input_ids=prompts, **arguments)
        self.assertEqual(outputs[:, :2].tolist(), prompts.repeat_interleave(3, dim=0).tolist())
        repeated = model.generate(features, decoder_input_ids=prompts.repeat_interleave(3, dim=0), **arguments)
        self.assert_equal(repeated, outputs)
        model.register_forward_pre_hook(lambda *_: self.fail("the model ran"))
        model.get_encoder().register_forward_pre_hook(lambda *_: self.fail("the encoder ran"))
        with self.assertRaisesRegex(ValueError, r"`decoder_input_ids` must .* \(2\) .* \(2 \* 3 = 6\), .* 4 rows"):
            model.generate(features, decoder_input_ids=prompts.repeat(2, 1), **arguments)

    def test_checks_come_before_the_encoder(self):
        model = build_whisper()
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for part in (cache.self_attention_cache, cache.cross_attention_cache):
            part.update(torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8), 0)
        model.get_encoder().register_forward_pre_hook(lambda *_: self.fail("the encoder ran"))
        arguments = {**build_audio(SHORT), **ONE_CALL, "num_beams": 3, "num_return_sequences": 3}
        for name, value in (("cache", cache), ("prompt_expansion", "sharing"), ("misspelt", 1)):
            with self.assertRaisesRegex(ValueError, name):
                model.generate(**arguments, **{name: value})

    @parameterized.expand([("beam", {"num_beams": 3}), ("sample", SAMPLE)])
    def test_prefix_allowed_tokens_fn_is_told_the_audio(self, _, arguments: dict[str, Any]):
        """In each segment, whichever rows are left."""
        seen = set()

        def allowed(audio: int, tokens: torch.Tensor) -> list[int]:
            seen.add(audio)
            return [*range(audio, EOS, 2), *range(NO_TIMESTAMPS + 1, VOCABULARY)]

        arguments = {**TIMESTAMPS, **arguments, "num_return_sequences": 3, "prefix_allowed_tokens_fn": allowed}
        sequences = build_whisper().generate(**build_audio(LONG), **arguments)
        self.assertEqual(seen, {0, 1})
        for row, sequence in enumerate(sequences.tolist()):
            self.assertEqual({token % 2 for token in sequence if token < EOS}, {row // 3})


if __name__ == "__main__":
    unittest.main()
