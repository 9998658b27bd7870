# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Groups of beams against two references: what transformers 4.55.4 generated (see `fixtures/make_group_beam_search.py`),
and the definition of diverse beam search in plain Python.
"""

import itertools
import json
import random
import unittest
from functools import cache
from pathlib import Path

import torch
from parameterized import parameterized
from safetensors import safe_open

import transformers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .diverse_beam_reference import Hypothesis, diverse_beam_search
from .runs import forwarded


FIXTURES = Path(__file__).parent / "fixtures" / "group_beam_search.safetensors"

REPETITION = (
    "4.55.4 subtracts the diversity penalty before `repetition_penalty`, which then scales it; the definition adds it to "
    "the score that the other processors leave"
)
PADDED_PROMPT = "`repetition_penalty` spares the padding of the prompt since release 5, in all decoding methods"
FINISHED_COUNTS = (
    "4.55.4 goes on as long as the best candidate could displace a finished hypothesis, even if that candidate has just "
    "finished itself; the definition asks for the best running one"
)
PADDING_COUNTS = (
    "in 4.55.4 a group that is done keeps choosing the padding token, which is penalized in later groups; it chooses "
    "nothing"
)
LAST_STEP = (
    "in 4.55.4 hypotheses that end with an eos token at the last step come before better ones that `max_length` ends at "
    "the same step"
)
# Cases in which 4.55.4 finds other hypotheses. The ones found here are those of the definition in every case.
EXPLAINED = {
    "gpt2_04": REPETITION,
    "gpt2_05": FINISHED_COUNTS,
    "gpt2_11": f"{REPETITION}; {PADDED_PROMPT}",
    "gpt2_18": PADDED_PROMPT,
    "gpt2_19": PADDING_COUNTS,
    "llama_03": FINISHED_COUNTS,
    "llama_08": REPETITION,
    "mistral_10": f"{PADDING_COUNTS}; {LAST_STEP}",
    "mistral_12": REPETITION,
    "t5_09": FINISHED_COUNTS,
}


@cache
def load_fixtures() -> tuple[dict[str, torch.Tensor], dict, dict]:
    """Returns the tensors, the descriptions of the models and the cases."""
    with safe_open(FIXTURES, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, json.loads(metadata["models"]), json.loads(metadata["cases"])


@cache
def load_model(name: str) -> PreTrainedModel:
    tensors, models, _ = load_fixtures()
    config = getattr(transformers, models[name]["config_class"])(**models[name]["config"])
    model = getattr(transformers, models[name]["class"])(config).eval()
    prefix = f"{name}/weights/"
    model.load_state_dict(
        {key.removeprefix(prefix): value.float() for key, value in tensors.items() if key.startswith(prefix)}
    )
    return model


def next_log_probs(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, options: dict):
    """
    Returns the function that the definition needs, for one prompt of shape `(1, L)`: it forwards a whole sequence,
    without a cache, and applies the processors of `options`.
    """
    decoder_prompt = input_ids
    inputs = {}
    if model.config.is_encoder_decoder:
        decoder_prompt = torch.tensor([[model.config.decoder_start_token_id]])
        inputs["encoder_outputs"] = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
    prompt_length = decoder_prompt.shape[1]
    config, _ = model._prepare_generation_config(GenerationConfig(**options))
    config.max_length = prompt_length + options["max_new_tokens"]
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    masks = {} if model.config.is_encoder_decoder else {"attention_mask": attention_mask}
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=input_ids,
        device="cpu",
        model_kwargs=masks,
        logits_processor=LogitsProcessorList(),
    )

    @cache
    @torch.no_grad()
    def log_probs(tokens: tuple[int, ...]) -> list[float]:
        new_tokens = torch.tensor([tokens], dtype=torch.long)
        sequence = torch.cat([decoder_prompt, new_tokens], dim=1)
        if model.config.is_encoder_decoder:
            output = model(decoder_input_ids=sequence, attention_mask=attention_mask, **inputs)
        else:
            mask = torch.cat([attention_mask, torch.ones_like(new_tokens)], dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            output = model(input_ids=sequence, attention_mask=mask, position_ids=positions, use_cache=False)
        return processors(sequence, output.logits[:, -1].log_softmax(-1))[0].tolist()

    return log_probs


def search_by_definition(log_probs, options: dict) -> list[Hypothesis]:
    eos = options.get("eos_token_id")
    hypotheses = diverse_beam_search(
        log_probs,
        groups=options["num_beam_groups"],
        group_size=options["num_beams"] // options["num_beam_groups"],
        penalty=options["diversity_penalty"],
        max_new_tokens=options["max_new_tokens"],
        eos_tokens=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        length_penalty=options["length_penalty"],
        early_stopping=options["early_stopping"],
    )
    return hypotheses[: options["num_return_sequences"]]


def assert_follows_definition(output, log_probs_of_items: list, options: dict, padding: int) -> None:
    """Asserts that `output` holds the hypotheses of the definition, padded, with their scores, for each item."""
    rows = [row for log_probs in log_probs_of_items for row in search_by_definition(log_probs, options)]
    length = max(len(tokens) for _, tokens in rows)
    prompt_length = output.sequences.shape[1] - length
    expected = torch.tensor([(*tokens, *[padding] * (length - len(tokens))) for _, tokens in rows])
    assert torch.equal(output.sequences[:, prompt_length:], expected), f"\n{output.sequences}\n{expected}"
    torch.testing.assert_close(
        output.sequences_scores, torch.tensor([score for score, _ in rows]), atol=1e-5, rtol=1e-5
    )


class GroupBeamSearchOracleTest(unittest.TestCase):
    """Transformers 4.55.4 is the oracle, the definition is the judge."""

    @parameterized.expand(load_fixtures()[1])
    def test_same_model(self, name: str):
        """Weights drawn in 4.55.4 make the same model here."""
        tensors, _, _ = load_fixtures()
        model, mask = load_model(name), tensors[f"{name}/attention_mask"]
        inputs = {"input_ids": tensors[f"{name}/input_ids"], "attention_mask": mask}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.full((2, 1), model.config.decoder_start_token_id)
        else:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(**inputs).logits[:, -1]
        torch.testing.assert_close(logits, tensors[f"{name}/first_logits"], atol=1e-5, rtol=0)

    @parameterized.expand(load_fixtures()[2])
    def test_case(self, case: str):
        tensors, _, cases = load_fixtures()
        name, options = cases[case]["model"], cases[case]["options"]
        model = load_model(name)
        input_ids, attention_mask = tensors[f"{name}/input_ids"], tensors[f"{name}/attention_mask"]
        with forwarded(model) as shapes:
            output = model.generate(
                input_ids,
                attention_mask=attention_mask,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        self.assertEqual(shapes[0][0], 2)
        self.assertEqual({rows for rows, _ in shapes[1:]} - {2 * options["num_beams"]}, set())

        items = [
            next_log_probs(model, input_ids[item : item + 1], attention_mask[item : item + 1], options)
            for item in range(2)
        ]
        assert_follows_definition(output, items, options, padding=options.get("pad_token_id", 0))
        sequences, scores = tensors[f"{case}/sequences"], tensors[f"{case}/sequences_scores"]
        ours = self.write_first_eos_token(output, options)
        if case in EXPLAINED:
            differs = ours.shape != sequences.shape or not torch.equal(ours, sequences)
            self.assertTrue(differs, f"no difference left to explain by: {EXPLAINED[case]}")
        else:
            self.assertTrue(torch.equal(ours, sequences), f"\n{ours}\n{sequences}")
            torch.testing.assert_close(output.sequences_scores, scores, atol=1e-5, rtol=1e-5)

    @staticmethod
    def write_first_eos_token(output, options: dict) -> torch.Tensor:
        """Does what 4.55.4 does: whatever eos token has ended a hypothesis, the first one of the list is written."""
        sequences, eos = output.sequences.clone(), options.get("eos_token_id")
        if isinstance(eos, list):
            lengths = (output.beam_indices >= 0).sum(dim=1)
            ends = output.sequences.shape[1] - output.beam_indices.shape[1] + lengths[:, None] - 1
            last = sequences.gather(1, ends)
            last[torch.isin(last, torch.tensor(eos))] = eos[0]
            sequences.scatter_(1, ends, last)
        return sequences


class BruteForceTest(unittest.TestCase):
    """Tiny random problems on a vocabulary of five tokens."""

    VOCABULARY = 5

    def random_model(self, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=self.VOCABULARY,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.8,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return transformers.LlamaForCausalLM(config).eval()

    def random_options(self, generator: random.Random) -> dict:
        groups, group_size = generator.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (2, 3)])
        # No more eos tokens than leave M continuations to the one hypothesis of the first step
        eos = generator.choice([None, 4, 3, [4], [4, 1]])
        return {
            "num_beams": groups * group_size,
            "num_beam_groups": groups,
            "num_return_sequences": groups * group_size,
            "diversity_penalty": generator.uniform(0.05, 3.0),
            "length_penalty": generator.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
            "early_stopping": generator.choice([True, False, "never"]),
            # From the second step on there are enough hypotheses in every group
            "max_new_tokens": generator.randint(2, 6),
            "eos_token_id": eos,
            "pad_token_id": 0,
        }

    @parameterized.expand(range(20))
    def test_ten_random_problems(self, block: int):
        for seed in range(10 * block, 10 * block + 10):
            generator = random.Random(seed)
            model, options = self.random_model(seed), self.random_options(generator)
            prompts = torch.tensor([[generator.randrange(self.VOCABULARY) for _ in range(3)] for _ in range(2)])
            mask = torch.ones_like(prompts)
            with self.subTest(seed=seed, **options):
                output = model.generate(
                    prompts, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options
                )
                items = [next_log_probs(model, prompt[None], mask[:1], options) for prompt in prompts]
                assert_follows_definition(output, items, options, padding=0)

    @parameterized.expand([(seed,) for seed in range(5)])
    def test_definition_lists_all_sequences(self, seed: int):
        """The reference itself: beams for all 5 ** 3 sequences find all of them, in the order of their scores."""
        options = {"max_new_tokens": 3, "pad_token_id": 0}
        log_probs = next_log_probs(self.random_model(seed), torch.tensor([[1, 2]]), torch.ones(1, 2).long(), options)
        every_sequence = itertools.product(range(self.VOCABULARY), repeat=3)
        expected = {
            tokens: sum(log_probs(tokens[:length])[tokens[length]] for length in range(3)) / 3
            for tokens in every_sequence
        }
        found = diverse_beam_search(log_probs, groups=1, group_size=125, penalty=1.0, max_new_tokens=3)
        self.assertEqual({tokens for _, tokens in found}, expected.keys())
        self.assertEqual([score for score, _ in found], sorted((score for score, _ in found), reverse=True))
        for score, tokens in found:
            self.assertAlmostEqual(score, expected[tokens], places=5)
