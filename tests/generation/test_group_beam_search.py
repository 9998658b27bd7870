# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Groups of beams: outputs, strategies, options, sampling, refusals. Which hypotheses they find is tested apart."""

import math
import string
import unittest
from itertools import permutations, product
from unittest import mock

import torch
from parameterized import parameterized
from tokenizers import Tokenizer, decoders, models

import transformers
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteria
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from .runs import ALL_OUTPUTS, flatten, forwarded
from .tiny_models import BUILDERS, DECODER_ONLY, EOS, PAD, VOCABULARY, build_inputs, build_model


BATCH, GROUPS, GROUP_SIZE, BEAMS, STEPS = 2, 3, 2, 6, 5
GROUP_BEAMS = {"num_beams": BEAMS, "num_beam_groups": GROUPS, "diversity_penalty": 1.0, "num_return_sequences": BEAMS}
TEXT_MODELS = [name for name in BUILDERS if name != "whisper"]


class EndNowAndThen(LogitsProcessor):
    """Makes the eos token about as likely as the best other one where the last token is a multiple of three."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids[:, -1] % 3 == 0
        scores[:, EOS] = torch.where(ends, scores.max(dim=-1).values - 0.1, scores[:, EOS])
        return scores


def generate(model, inputs, **options):
    return model.generate(**inputs, **{**GROUP_BEAMS, **ALL_OUTPUTS, "max_new_tokens": STEPS, **options})


def group_of_rows(output) -> torch.Tensor:
    """Returns the group that each returned sequence comes from, by the row of its first token."""
    return output.beam_indices[:, 0] % BEAMS // GROUP_SIZE


class HypothesesTest(unittest.TestCase):
    def assert_same_hypotheses(self, output, expected):
        self.assertTrue(torch.equal(output.sequences, expected.sequences))
        torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)


class OutputTest(HypothesesTest):
    @parameterized.expand(TEXT_MODELS)
    def test_every_field_at_every_step(self, name: str):
        model, inputs = build_model(name, attn_implementation="eager"), build_inputs(name, BATCH)
        with forwarded(model) as shapes:
            output = generate(
                model,
                inputs,
                output_attentions=True,
                output_hidden_states=True,
                eos_token_id=None,
                min_new_tokens=STEPS,
            )
        length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        self.assertEqual(shapes, [(BATCH, length)] + [(BATCH * BEAMS, 1)] * (STEPS - 1))
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        for step in range(STEPS):
            queries, keys = (length, length) if step == 0 else (1, length + step)
            self.assertEqual(output.scores[step].shape, (BATCH * BEAMS, VOCABULARY))
            self.assertEqual(output.logits[step].shape, (BATCH * BEAMS, VOCABULARY))
            attentions, states = output[f"{prefix}attentions"][step], output[f"{prefix}hidden_states"][step]
            self.assertEqual(attentions[-1].shape[::2], (BATCH * BEAMS, queries))
            self.assertLessEqual(attentions[-1].shape[3], keys)
            self.assertEqual(states[-1].shape[:2], (BATCH * BEAMS, queries))
            if model.config.is_encoder_decoder:
                self.assertEqual(output.cross_attentions[step][-1].shape[::2], (BATCH * BEAMS, queries))
        if model.config.is_encoder_decoder:
            self.assertIsInstance(output, transformers.generation.GenerateBeamEncoderDecoderOutput)
            self.assertEqual(len(output.encoder_attentions), 2)
            self.assertEqual(len(output.encoder_hidden_states), 3)
        else:
            self.assertIsInstance(output, transformers.generation.GenerateBeamDecoderOnlyOutput)
        self.assertEqual(output.sequences.shape, (BATCH * BEAMS, length + STEPS))
        self.assertEqual(output.beam_indices.shape, (BATCH * BEAMS, STEPS))
        # Hypotheses of one item come from its own rows only, and from all groups
        rows = output.beam_indices.view(BATCH, -1)
        self.assertTrue(torch.equal(rows // BEAMS, torch.arange(BATCH)[:, None].expand_as(rows)))
        self.assertEqual(set(group_of_rows(output).tolist()), set(range(GROUPS)))

    @parameterized.expand(TEXT_MODELS)
    def test_transition_scores_add_up(self, name: str):
        model, inputs = build_model(name), build_inputs(name, BATCH)
        seen_lengths = set()
        for length_penalty in (-1.0, 0.0, 1.5):
            processors = LogitsProcessorList([EndNowAndThen()])
            output = generate(
                model, inputs, length_penalty=length_penalty, logits_processor=processors, max_new_tokens=8
            )
            transitions = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
            lengths = (output.beam_indices >= 0).sum(dim=1)
            torch.testing.assert_close(
                transitions.sum(dim=1) / lengths**length_penalty, output.sequences_scores, atol=1e-5, rtol=1e-5
            )
            seen_lengths |= set(lengths.tolist())
        self.assertGreater(len(seen_lengths), 1)

    def test_scores_are_logits_less_the_penalty(self):
        """The recorded scores of a group differ from the log probabilities by multiples of the penalty."""
        output = generate(build_model("llama"), build_inputs("llama", BATCH), eos_token_id=None)
        for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
            paid = (logits.log_softmax(-1) - scores).view(BATCH, GROUPS, GROUP_SIZE, VOCABULARY)
            torch.testing.assert_close(paid, paid.round(), atol=1e-5, rtol=0)
            paid = paid.round()
            self.assertTrue(torch.equal(paid[:, :, 0], paid[:, :, 1]))
            # Each earlier beam has chosen one token
            earlier = (torch.arange(GROUPS) * GROUP_SIZE).float()
            self.assertTrue(torch.equal(paid[:, :, 0].sum(-1), earlier.expand(BATCH, -1)), step)

    def test_plain_tensor_without_dict(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        sequences = model.generate(**inputs, **GROUP_BEAMS, max_new_tokens=STEPS)
        self.assertTrue(torch.equal(sequences, generate(model, inputs).sequences))

    @parameterized.expand([(count,) for count in range(1, BEAMS + 1)])
    def test_best_sequences_come_first(self, count: int):
        model, inputs = build_model("gpt2"), build_inputs("gpt2", BATCH)
        every = generate(model, inputs)
        best = generate(model, inputs, num_return_sequences=count)
        scores = every.sequences_scores.view(BATCH, BEAMS)
        self.assertTrue(torch.equal(scores, scores.sort(dim=1, descending=True).values))
        self.assertTrue(torch.equal(best.sequences_scores.view(BATCH, count), scores[:, :count]))

    def test_padding_token_fills_shorter_sequences(self):
        """Also if it is token 0."""
        output = generate(
            build_model("llama"), build_inputs("llama", BATCH), eos_token_id=[5, 9, 17, 33, 40], max_new_tokens=12
        )
        lengths = (output.beam_indices >= 0).sum(dim=1)
        self.assertLess(lengths.min(), lengths.max())
        behind = torch.arange(lengths.max()) >= lengths[:, None]
        self.assertEqual(set(output.sequences[:, -lengths.max() :][behind].tolist()), {PAD})

    def test_returned_cache_is_the_callers(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        cache = DynamicCache(config=model.config)
        output = generate(model, inputs, cache=cache)
        self.assertIs(output.cache, cache)
        self.assertEqual(cache.layers[0].keys.shape[0], BATCH * BEAMS)
        self.assertEqual(cache.get_seq_length(), inputs["input_ids"].shape[1] + STEPS - 1)

    # The attention of gpt_neox can't share a prompt
    @parameterized.expand(sorted({*product(TEXT_MODELS, ("copy", "share"))} - {("gpt_neox", "share")}))
    def test_strategies_agree(self, name: str, strategy: str):
        """Hypotheses and returned cache are those of a prompt computed for every beam."""
        model, inputs = build_model(name), build_inputs(name, BATCH)
        outputs = {}
        for prompt_expansion, rows in (("recompute", BATCH * BEAMS), (strategy, BATCH)):
            with forwarded(model) as shapes:
                outputs[prompt_expansion] = generate(model, inputs, prompt_expansion=prompt_expansion)
            self.assertEqual(shapes[0][0], rows)
        self.assert_same_hypotheses(outputs[strategy], outputs["recompute"])
        caches = [flatten("cache", output.cache) for output in outputs.values()]
        self.assertEqual(caches[0].keys(), caches[1].keys())
        for key in caches[0]:
            # Deep random models amplify rounding: the cache holds values of up to 30
            torch.testing.assert_close(caches[1][key], caches[0][key], atol=1e-4, rtol=1e-4)

    @parameterized.expand(
        [
            ("no_cache", {"use_cache": False}),
            ("static", {"cache_implementation": "static", "disable_compile": True}),
            ("chunked", {"prefill_chunk_size": 4}),
        ]
    )
    def test_caches_agree(self, _, options: dict):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        self.assert_same_hypotheses(generate(model, inputs, **options), generate(model, inputs))

    def test_embeddings_as_prompt(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        expected = generate(model, inputs)
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        output = generate(model, {"inputs_embeds": embeddings, **inputs})
        self.assertTrue(torch.equal(output.sequences, expected.sequences[:, embeddings.shape[1] :]))

    def test_images(self):
        text = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.35,
        }
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(pad_token_id=PAD, eos_token_id=None, **text),
            vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=32, **vision),
            image_token_id=60,
            vision_feature_layer=-1,
        )
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(config).eval()
        prompts = torch.randint(3, 60, (BATCH, 9))
        prompts[:, 1:5] = 60
        inputs = {"input_ids": prompts, "pixel_values": torch.randn(BATCH, 3, 8, 8)}
        with forwarded(model) as shapes:
            output = generate(model, inputs)
        self.assertEqual(shapes[0][0], BATCH)
        self.assert_same_hypotheses(output, generate(model, inputs, prompt_expansion="recompute"))

    def test_finished_process_keeps_others_company(self):
        """`synced_gpus`: forward passes after the end leave the result alone."""
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        expected = generate(model, inputs)
        waits = iter([True] * 3)

        def has_unfinished(this_peer_finished, synced_gpus, device):
            self.assertTrue(synced_gpus)
            return not this_peer_finished or next(waits, False)

        with mock.patch.object(model, "_has_unfinished_sequences", has_unfinished), forwarded(model) as shapes:
            output = generate(model, inputs, synced_gpus=True)
        self.assertEqual(len(shapes), STEPS + 3)
        self.assert_same_hypotheses(output, expected)


class DiversityTest(unittest.TestCase):
    @parameterized.expand(product(DECODER_ONLY, (True, False, "never")))
    def test_without_penalty_each_group_is_a_beam_search(self, name: str, early_stopping: bool | str):
        model, inputs = build_model(name), build_inputs(name, BATCH)
        options = {"early_stopping": early_stopping, "eos_token_id": [EOS, 9, 17], "max_new_tokens": 8}
        output = generate(model, inputs, diversity_penalty=0.0, **options)
        beams = {"num_beam_groups": 1, "num_beams": GROUP_SIZE, "num_return_sequences": GROUP_SIZE}
        expected = generate(model, inputs, diversity_penalty=0.0, **beams, **options)
        prompt_length = inputs["input_ids"].shape[1]
        # Beam search fills with the eos token where the padding token is 0
        expected_tokens = expected.sequences[:, prompt_length:].masked_fill(expected.beam_indices < 0, PAD)
        for group in range(GROUPS):
            of_group = group_of_rows(output) == group
            self.assertTrue(torch.equal(output.sequences[of_group][:, prompt_length:], expected_tokens))
            # Products of more rows may round differently
            torch.testing.assert_close(
                output.sequences_scores[of_group], expected.sequences_scores, atol=1e-5, rtol=1e-5
            )

    def test_items_of_a_batch_do_not_meet(self):
        """Penalties are counted per item: a batch finds what its items find alone."""
        model, inputs = build_model("llama"), build_inputs("llama", 3)
        batch = generate(model, inputs)
        for item in range(3):
            alone = generate(model, {name: value[item : item + 1] for name, value in inputs.items()})
            rows = slice(item * BEAMS, (item + 1) * BEAMS)
            self.assertTrue(torch.equal(batch.sequences[rows], alone.sequences))
            torch.testing.assert_close(batch.sequences_scores[rows], alone.sequences_scores, atol=1e-5, rtol=1e-5)

    def test_high_penalty_keeps_groups_apart(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        output = generate(model, inputs, diversity_penalty=100.0, eos_token_id=None)
        new_tokens = output.sequences[:, -STEPS:]
        for step, item in product(range(STEPS), range(BATCH)):
            rows = slice(item * BEAMS, (item + 1) * BEAMS)
            words = {
                group: set(new_tokens[rows][group_of_rows(output)[rows] == group, step].tolist())
                for group in range(GROUPS)
            }
            for one, other in permutations(range(GROUPS), 2):
                self.assertFalse(words[one] & words[other], (step, item))

    def test_forced_token_is_not_penalized(self):
        """All groups must begin with it: none loses rank."""
        output = generate(build_model("bart"), build_inputs("bart", BATCH), forced_bos_token_id=7)
        first = 1
        self.assertEqual(set(output.sequences[:, first].tolist()), {7})
        self.assertTrue(torch.equal(output.scores[0][:, 7], torch.zeros(BATCH * BEAMS)))
        # The next step is penalized again
        self.assertGreater(len(output.sequences[:BEAMS, first + 1].unique()), 1)

    def test_eos_token_is_not_penalized(self):
        """A hypothesis of one group may end when those of another have ended."""
        eos = 9

        class ForceEnd(LogitsProcessor):
            def __call__(self, input_ids, scores):
                scores = scores.clone()
                scores[:, eos] = scores.max(dim=-1).values + 1.0
                return scores

        output = generate(
            build_model("llama"),
            build_inputs("llama", BATCH),
            logits_processor=LogitsProcessorList([ForceEnd()]),
            eos_token_id=eos,
            diversity_penalty=100.0,
        )
        first = output.scores[0].view(BATCH, BEAMS, VOCABULARY)[..., eos]
        self.assertTrue(torch.equal(first, first[:, :1].expand_as(first)))


class SamplingTest(unittest.TestCase):
    def test_first_group_draws_what_beam_sampling_draws(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        torch.manual_seed(3)
        output = generate(model, inputs, do_sample=True, max_new_tokens=1)
        torch.manual_seed(3)
        beams = {"num_beam_groups": 1, "num_beams": GROUP_SIZE, "num_return_sequences": GROUP_SIZE}
        expected = generate(model, inputs, do_sample=True, diversity_penalty=0.0, max_new_tokens=1, **beams)
        self.assertTrue(torch.equal(output.sequences[group_of_rows(output) == 0], expected.sequences))

    def test_draws_do_not_depend_on_the_cache(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        outputs = []
        for options in ({}, {"use_cache": False}, {"prompt_expansion": "recompute"}):
            torch.manual_seed(3)
            outputs.append(generate(model, inputs, do_sample=True, **options))
        for output in outputs[1:]:
            self.assertTrue(torch.equal(output.sequences, outputs[0].sequences))
        greedy = generate(model, inputs)
        self.assertFalse(torch.equal(outputs[0].sequences, greedy.sequences))

    def test_distribution(self):
        """
        One beam per group: a group draws two tokens without replacement from the penalized distribution, and keeps the
        likelier one. Compared with the exact probabilities of all pairs of draws of two groups.
        """
        draws, penalty, vocabulary = 4000, 1.5, 5
        log_probs = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).log()

        class Fixed(LogitsProcessor):
            def __call__(self, input_ids, scores):
                scores = torch.full_like(scores, -math.inf)
                scores[:, :vocabulary] = log_probs
                return scores

        torch.manual_seed(0)
        output = build_model("llama").generate(
            torch.full((draws, 2), 4),
            attention_mask=torch.ones(draws, 2, dtype=torch.long),
            logits_processor=LogitsProcessorList([Fixed()]),
            do_sample=True,
            num_beams=2,
            num_beam_groups=2,
            diversity_penalty=penalty,
            num_return_sequences=2,
            max_new_tokens=1,
            eos_token_id=None,
            top_k=0,
            **ALL_OUTPUTS,
        )
        tokens = torch.empty(draws, 2, dtype=torch.long)
        tokens.view(-1)[output.beam_indices[:, 0].long()] = output.sequences[:, -1]
        counts = torch.zeros(vocabulary, vocabulary).index_put_(tuple(tokens.T), torch.ones(draws), accumulate=True)

        def kept(scores: torch.Tensor) -> torch.Tensor:
            """Exact distribution of the likelier one of two draws without replacement."""
            p, result = scores.softmax(-1), torch.zeros(vocabulary)
            for one, other in permutations(range(vocabulary), 2):
                result[one if scores[one] > scores[other] else other] += p[one] * p[other] / (1 - p[one])
            return result

        expected = torch.stack(
            [
                p * kept(log_probs - penalty * torch.nn.functional.one_hot(torch.tensor(token), vocabulary))
                for token, p in enumerate(kept(log_probs))
            ]
        )
        torch.testing.assert_close(expected.sum(), torch.tensor(1.0))
        # Three standard deviations of the most frequent cell are 0.021
        torch.testing.assert_close(counts / draws, expected, atol=0.021, rtol=0)


class OptionsTest(HypothesesTest):
    def test_stop_string_ends_like_an_eos_token(self):
        """Without a penalty: a word that ends a sequence counts as chosen, an eos token doesn't."""
        characters = string.printable[:VOCABULARY]
        backend = Tokenizer(models.BPE({character: token for token, character in enumerate(characters)}, merges=[]))
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        options = {"diversity_penalty": 0.0, "max_new_tokens": 8}
        plain = generate(model, inputs, eos_token_id=None, **options)
        stop = plain.sequences[0, -6].item()
        expected = generate(model, inputs, eos_token_id=stop, **options)
        self.assertFalse(torch.equal(expected.sequences_scores, plain.sequences_scores))
        output = generate(
            model, inputs, eos_token_id=None, stop_strings=characters[stop], tokenizer=tokenizer, **options
        )
        self.assertTrue(torch.equal(output.sequences, expected.sequences))
        self.assertTrue(torch.equal(output.sequences_scores, expected.sequences_scores))

    def test_stopping_criteria_see_candidates_and_scores(self):
        shapes = []

        class Criteria(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                shapes.append((tuple(input_ids.shape), len(scores)))
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        generate(model, inputs, stopping_criteria=[Criteria()], max_new_tokens=2, eos_token_id=None)
        rows, length = BATCH * 2 * GROUP_SIZE, inputs["input_ids"].shape[1]
        expected = [((rows, length + step + 1), step + 1) for step in range(2) for _ in range(GROUPS)]
        self.assertEqual(shapes, expected)

    def test_allowed_tokens_are_asked_per_item(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        allowed = {0: list(range(10, 30)), 1: list(range(30, 60))}
        output = generate(
            model, inputs, prefix_allowed_tokens_fn=lambda item, tokens: allowed[item], eos_token_id=None
        )
        for item in range(BATCH):
            tokens = output.sequences[item * BEAMS : (item + 1) * BEAMS, -STEPS:]
            self.assertLessEqual(set(tokens.flatten().tolist()), set(allowed[item]))

    def test_guidance_follows_the_beams(self):
        """Classifier-free guidance keeps a private cache: same as where it is computed from the tokens at every step."""
        model, inputs = build_model("llama"), build_inputs("llama", 1)
        prompt_length, scale = inputs["input_ids"].shape[1], 1.5

        class Guidance(LogitsProcessor):
            def __call__(self, input_ids, scores):
                unconditional = model(input_ids[:, prompt_length - 1 :], use_cache=False).logits[:, -1].log_softmax(-1)
                return scale * (scores.log_softmax(-1) - unconditional) + unconditional

        options = {"max_new_tokens": 8, "eos_token_id": None}
        output = generate(model, inputs, guidance_scale=scale, **options)
        expected = generate(model, inputs, logits_processor=LogitsProcessorList([Guidance()]), **options)
        self.assert_same_hypotheses(output, expected)
        self.assertFalse(torch.equal(output.sequences, generate(model, inputs, **options).sequences))

    @parameterized.expand(product((True, False, "never"), ("bart", "llama")))
    def test_length_limits(self, early_stopping: bool | str, name: str):
        model, inputs = build_model(name), build_inputs(name, BATCH)
        prompt_length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        limits = {"min_new_tokens": 3, "max_length": prompt_length + 6, "max_new_tokens": None}
        output = generate(model, inputs, eos_token_id=[9, 17, 33, 40], early_stopping=early_stopping, **limits)
        lengths = (output.beam_indices >= 0).sum(dim=1)
        self.assertGreaterEqual(lengths.min(), 4)
        self.assertLessEqual(lengths.max(), 6)


class ValidationTest(unittest.TestCase):
    def assert_refused(self, message: str, **options):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        with forwarded(model) as shapes, self.assertRaisesRegex(ValueError, message):
            model.generate(**inputs, max_new_tokens=2, **options)
        self.assertEqual(shapes, [])

    @parameterized.expand(
        [
            ({"num_beams": 4, "num_beam_groups": 3}, r"`num_beam_groups` must be a divisor of `num_beams` \(4\).* 3"),
            ({"num_beams": 2, "num_beam_groups": 3}, r"`num_beam_groups` must be at most `num_beams` \(2\).* 3"),
            ({"num_beam_groups": 3}, r"`num_beam_groups` must be at most `num_beams` \(1\).* 3"),
            ({"num_beams": 4, "num_beam_groups": 0}, "`num_beam_groups` must be an integer of at least 1.* 0"),
            ({"num_beams": 4, "num_beam_groups": 2.0}, "`num_beam_groups` must be an integer of at least 1.* 2.0"),
            ({"num_beams": 4, "num_beam_groups": "2"}, "`num_beam_groups` must be an integer of at least 1.* '2'"),
            ({"diversity_penalty": -0.5}, "`diversity_penalty` must be a finite number of at least 0.* -0.5"),
            ({"diversity_penalty": math.nan}, "`diversity_penalty` must be a finite number of at least 0.* nan"),
            ({"diversity_penalty": math.inf}, "`diversity_penalty` must be a finite number of at least 0.* inf"),
            ({"diversity_penalty": "1"}, "`diversity_penalty` must be a finite number of at least 0.* '1'"),
            ({"num_return_sequences": 7}, r"`num_return_sequences` \(7\).*`num_beams` \(6\)"),
            ({"low_memory": True}, r"`low_memory` must not be set.*`num_beam_groups` is 3.* True"),
        ]
    )
    def test_bad_options(self, options: dict, message: str):
        groups = {} if "num_beam_groups" in options else GROUP_BEAMS
        self.assert_refused(message, **{**groups, **options})

    def test_streamer(self):
        streamer = transformers.TextStreamer(tokenizer=None)
        self.assert_refused("`streamer` must be `None`.*is 3.*TextStreamer", streamer=streamer, **GROUP_BEAMS)

    def test_assistant(self):
        assistant = build_model("llama")
        self.assert_refused(
            "`assistant_model` must be `None`.*is 3.*LlamaForCausalLM", assistant_model=assistant, **GROUP_BEAMS
        )

    def test_cache_that_cannot_be_reordered(self):
        model = build_model("llama")
        cache = mock.Mock(spec=[])
        with self.assertRaisesRegex(ValueError, "`num_beam_groups` must be 1 with LlamaForCausalLM.*Mock"):
            model._reorder_cache_rows({"cache": cache}, torch.arange(2))

    @parameterized.expand(
        [
            ({"num_beam_groups": 2, "num_beams": 4}, "`diversity_penalty` is 0 with `num_beam_groups`=2"),
            ({"diversity_penalty": 0.7, "num_beams": 4}, "`diversity_penalty`=0.7 has no effect"),
        ]
    )
    def test_warnings_with_reason(self, options: dict, message: str):
        logging.get_logger("transformers.generation.group_beam_search").warning_once.cache_clear()
        logger = logging.get_logger("transformers.generation.group_beam_search")
        with CaptureLogger(logger) as captured:
            build_model("llama").generate(**build_inputs("llama", BATCH), max_new_tokens=2, **options)
        self.assertIn(message, captured.out)

    def test_no_remote_code(self):
        """Neither asked for nor loaded."""
        model = build_model("llama")
        with mock.patch.object(model, "load_custom_generate", side_effect=AssertionError("remote code")):
            generate(model, build_inputs("llama", BATCH))
            generate(model, build_inputs("llama", BATCH), trust_remote_code=True)

    def test_custom_generate_goes_to_the_hub(self):
        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        repository = "transformers-community/group-beam-search"
        remote = mock.Mock(return_value="from the hub")
        with mock.patch.object(model, "load_custom_generate", return_value=remote) as load:
            result = model.generate(**inputs, custom_generate=repository, trust_remote_code=True, **GROUP_BEAMS)
        self.assertEqual(result, "from the hub")
        self.assertEqual(load.call_args.args, (repository,))
        self.assertTrue(load.call_args.kwargs["trust_remote_code"])
        self.assertEqual(remote.call_args.kwargs["num_beam_groups"], GROUPS)

    def test_custom_callable_has_its_own_rules(self):
        """It gets B * N rows, and may divide them into groups as it likes."""
        rows = []

        def decode(model, input_ids, **kwargs):
            rows.append(input_ids.shape[0])
            return input_ids

        model, inputs = build_model("llama"), build_inputs("llama", BATCH)
        model.generate(**inputs, custom_generate=decode, num_beams=4, num_beam_groups=3, max_new_tokens=2)
        self.assertEqual(rows, [BATCH * 4])
