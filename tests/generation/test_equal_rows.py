# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The same prompt many times in one batch: distinct rows are forwarded, and what comes out is upstream's."""

import logging
import unittest
from collections import Counter
from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

import transformers
from transformers import DynamicCache, GenerationConfig
from transformers.generation import equal_rows as module
from transformers.generation import prefill
from transformers.generation.equal_rows import EqualRows, find_equal_rows, fingerprint_rows, why_not_compare
from transformers.prefix_sharing import SegmentedStates
from transformers.utils import logging as transformers_logging

from .runs import ALL_OUTPUTS, assert_same, forwarded, run_both
from .tiny_models import EOS, PAD, VOCABULARY, build_inputs, build_model


# Which distinct prompt each row of the batch holds
LAYOUTS = {
    "consecutive": [0, 0, 0, 1, 1, 1],
    "all_equal": [0, 0, 0, 0],
    "none_equal": [0, 1, 2],
    "shuffled": [1, 0, 1, 0, 0, 1],
    "unequal_sizes": [0, 0, 0, 1, 2, 2],
}
REPEATED = [name for name in LAYOUTS if name != "none_equal"]
MODES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "sample_several": {"do_sample": True, "num_return_sequences": 3},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "beam_sample": {"do_sample": True, "num_beams": 3},
}
TOKENS = {"max_new_tokens": 5, "eos_token_id": None}


def repeated_inputs(name: str, layout: list[int], length: int = 9) -> dict[str, torch.Tensor]:
    """Prompts of different padding, the rows picked by `layout`."""
    return {key: value[layout] for key, value in build_inputs(name, max(layout) + 1, length).items()}


def expand_size_of(arguments: dict) -> int:
    return max(arguments.get("num_beams", 1), arguments.get("num_return_sequences", 1))


def generate(model, inputs: dict, **arguments) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns what is generated, and the (rows, query length) of each forward."""
    torch.manual_seed(0)
    with forwarded(model) as shapes:
        output = model.generate(**inputs, **{**TOKENS, **arguments})
    return output, shapes


@contextmanager
def logged() -> list[str]:
    """Collects what is logged about the prompt at info level."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers.generation.prefill")
    level = logger.level
    transformers_logging.info_once.cache_clear()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class FindEqualRowsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("consecutive", [0, 2, 4], [0, 0, 1, 1, 2, 2], 2),
            ("all_equal", [0], [0, 0, 0], 3),
            ("shuffled", [0, 1], [0, 1, 0, 1], 1),
            ("sizes_that_divide_on_average", [0, 1], [0, 1, 1, 1], 1),
            ("not_consecutive", [0, 1], [0, 1, 1, 0], 1),
        ]
    )
    def test_groups(self, _, firsts: list[int], groups: list[int], group_size: int):
        rows = torch.tensor([[3, 5, 7], [5, 3, 7], [3, 5, 8]])[groups]
        found = find_equal_rows([rows])
        self.assertEqual(found, EqualRows(firsts, groups))
        self.assertEqual(found.group_size, group_size)

    @parameterized.expand(
        [
            ("order_of_tokens", [[1, 2, 3], [3, 2, 1]]),
            ("swapped_zeros", [[0, 7, 0], [7, 0, 0]]),
            ("same_sum", [[2, 2, 2], [1, 2, 3]]),
            ("sign_of_zero", [[0.0, 1.0], [-0.0, 1.0]]),
            ("booleans", [[True, False], [False, True]]),
        ]
    )
    def test_different_rows(self, _, rows: list[list]):
        self.assertIsNone(find_equal_rows([torch.tensor(rows)]))

    @parameterized.expand(
        [
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ]
    )
    def test_types(self, dtype: torch.dtype):
        rows = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0]]).to(dtype)
        self.assertEqual(find_equal_rows([rows]), EqualRows([0, 1], [0, 1, 0]))
        # Not contiguous, more dimensions, one dimension, and no number in a row
        self.assertEqual(find_equal_rows([rows.t().contiguous().t()]), EqualRows([0, 1], [0, 1, 0]))
        self.assertEqual(find_equal_rows([rows.view(3, 2, 2)]), EqualRows([0, 1], [0, 1, 0]))
        self.assertEqual(find_equal_rows([rows[:, 0]]), EqualRows([0, 1], [0, 1, 0]))
        self.assertEqual(find_equal_rows([rows[:, :0]]), EqualRows([0], [0, 0, 0]))

    def test_rows_must_be_equal_in_all_tensors(self):
        equal, different = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[1, 1], [1, 0]])
        self.assertIsNotNone(find_equal_rows([equal, equal]))
        self.assertIsNone(find_equal_rows([equal, different]))
        self.assertIsNone(find_equal_rows([different, equal]))

    def test_fingerprints_that_collide_are_not_trusted(self):
        rows = torch.tensor([[1, 2], [1, 3], [1, 2]])
        with mock.patch.object(module, "fingerprint_rows", lambda tensor: torch.zeros(len(tensor), dtype=torch.long)):
            self.assertIsNone(find_equal_rows([rows]))
            self.assertIsNotNone(find_equal_rows([rows[[0, 2]]]))

    def test_fingerprints_of_similar_rows_differ(self):
        """All prompts of two tokens out of 67, and rows of one token that stands at any of 5,000 positions."""
        tokens = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
        self.assertEqual(len(fingerprint_rows(tokens).unique()), VOCABULARY**2)
        self.assertEqual(len(fingerprint_rows(torch.eye(5000, dtype=torch.uint8)).unique()), 5000)

    def test_no_random_number_is_drawn(self):
        state = torch.get_rng_state()
        find_equal_rows([torch.tensor([[1, 2], [1, 2]])])
        self.assertTrue(torch.equal(torch.get_rng_state(), state))

    @parameterized.expand(
        [
            ("image", {"pixel_values": torch.zeros(2, 3, 4, 4)}, "`pixel_values` belongs to which row"),
            ("unknown", {"anything": torch.zeros(2)}, "`anything` belongs to which row"),
            ("other_rows", {"attention_mask": torch.zeros(3, 5)}, "`attention_mask` belongs to which row"),
            ("one_for_all", {"position_ids": torch.zeros(1, 5)}, "`position_ids` belongs to which row"),
            ("object", {"encoder_outputs": object()}, "`encoder_outputs` belongs to which row"),
            ("cache", {"cache": DynamicCache()}, "a cache was passed in"),
            ("flags", {"use_cache": True, "logits_to_keep": 1, "attention_mask": None}, None),
            ("axes_first", {"position_ids": torch.zeros(3, 2, 5)}, None),
        ]
    )
    def test_inputs_that_cannot_be_compared(self, _, inputs: dict, reason: str | None):
        if reason is None:
            self.assertIsNone(why_not_compare(inputs, 2))
        else:
            self.assertIn(reason, why_not_compare(inputs, 2))


class SameAsUpstreamTest(unittest.TestCase):
    """Pristine upstream, in a process of its own, is the oracle. It forwards B * N rows."""

    def assert_prefilled_once(
        self, name: str, layout: list[int], arguments: dict, distinct: int | None = None, **options
    ):
        inputs = options.pop("inputs", None) or repeated_inputs(name, layout)
        arguments = {**arguments, **ALL_OUTPUTS, "max_new_tokens": 5}
        # Up to 18 rows become one, whose products round differently; logits reach 15
        tolerance = options.pop("tolerance", 3e-5)
        ours, theirs = run_both(name, len(layout), arguments, inputs=inputs, **options)
        self.assertEqual(ours["rows"], len(set(layout)) if distinct is None else distinct)
        self.assertEqual(theirs["rows"], len(layout) * expand_size_of(arguments))
        assert_same(ours, theirs, tolerance)
        return ours, theirs

    @parameterized.expand(product(("llama", "bart", "gemma3", "mamba"), LAYOUTS, MODES))
    def test_layouts(self, name: str, layout: str, mode: str):
        ours, theirs = self.assert_prefilled_once(name, LAYOUTS[layout], MODES[mode])
        rows, distinct = len(LAYOUTS[layout]), len(set(LAYOUTS[layout]))
        if name in ("llama", "gemma3"):
            flops = rows * expand_size_of(MODES[mode]) // distinct
            self.assertEqual(ours["prefill_flops"] * flops, theirs["prefill_flops"])

    @parameterized.expand(product(("t5", "gpt2", "gpt_neox", "qwen3_next", "deepseek_v3", "falcon_h1"), REPEATED))
    def test_other_models(self, name: str, layout: str):
        for mode in ("sample", "beam"):
            self.assert_prefilled_once(name, LAYOUTS[layout], MODES[mode])

    @parameterized.expand(product(("llama", "bart"), REPEATED, ("copy", "share")))
    def test_strategies(self, name: str, layout: str, strategy: str):
        for mode in ("greedy", "sample_several", "beam"):
            fork_arguments = {"prompt_expansion": strategy}
            self.assert_prefilled_once(name, LAYOUTS[layout], MODES[mode], fork_arguments=fork_arguments)

    @parameterized.expand(product(("llama", "bart", "gemma3"), ("consecutive", "shuffled"), ("greedy", "beam")))
    def test_attentions_and_hidden_states(self, name: str, layout: str, mode: str):
        """Those of the encoder too, which have one row per prompt."""
        arguments = {**MODES[mode], "output_attentions": True, "output_hidden_states": True}
        ours, _ = self.assert_prefilled_once(
            name, LAYOUTS[layout], arguments, attn_implementation="eager", tolerance=1e-4
        )
        if name == "bart":
            self.assertEqual(ours["encoder_hidden_states.0"].shape[0], len(LAYOUTS[layout]))

    @parameterized.expand(
        product(
            ("consecutive", "shuffled"),
            (
                ("static", {"cache_implementation": "static", "disable_compile": True}),
                (
                    "static_chunks",
                    {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": 4},
                ),
                ("quantized", {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
                ("chunks", {"prefill_chunk_size": 4}),
                ("no_cache", {"use_cache": False}),
            ),
        )
    )
    def test_caches(self, layout: str, options: tuple[str, dict]):
        for mode in ("greedy", "sample_several", "beam"):
            inputs = repeated_inputs("llama", LAYOUTS[layout])
            arguments = {**MODES[mode], **options[1], "output_scores": True, "return_dict_in_generate": True}
            ours, theirs = run_both("llama", 6, {**arguments, "max_new_tokens": 5}, inputs=inputs)
            self.assertEqual(ours["rows"], 2)
            # Chunks of a few rows round differently from those of many, and keys and values reach 30
            assert_same(ours, theirs, tolerance=1e-4)

    @parameterized.expand(
        product(("llama", "t5"), ("consecutive", "shuffled"), ("greedy", "sample", "sample_several"))
    )
    def test_streamer_and_stopping_criteria_see_what_they_saw(self, name: str, layout: str, mode: str):
        ours, _ = self.assert_prefilled_once(name, LAYOUTS[layout], MODES[mode], record=True)
        self.assertEqual(ours["streamed.0"].shape[0], 6 * expand_size_of(MODES[mode]))

    @parameterized.expand(product(("llama", "bart"), ("consecutive", "shuffled", "unequal_sizes")))
    def test_processors(self, name: str, layout: str):
        options = {"repetition_penalty": 1.7, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}
        for mode in MODES:
            self.assert_prefilled_once(name, LAYOUTS[layout], {**MODES[mode], **options})

    @parameterized.expand(("consecutive", "shuffled"))
    def test_rows_draw_independently(self, layout: str):
        ours, _ = self.assert_prefilled_once("llama", LAYOUTS[layout], {**MODES["sample"], "temperature": 2.0})
        drawn = {tuple(row) for row in ours["sequences"].tolist()}
        self.assertEqual(len(drawn), 6)

    @parameterized.expand(
        [
            ("mask", "llama", {"attention_mask": [[1] * 6, [0] + [1] * 5, [1] * 6]}, 2),
            ("positions", "llama", {"position_ids": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 9], [0, 1, 2, 3, 4, 5]]}, 2),
            ("token_types", "gpt2", {"token_type_ids": [[5] * 6, [5] * 5 + [6], [5] * 6]}, 2),
            ("decoder_prompt", "bart", {"decoder_input_ids": [[1, 7], [1, 8], [1, 7]]}, 2),
            ("decoder_prompt_mask", "bart", {"decoder_attention_mask": [[1], [0], [1]]}, 2),
            ("encoder_mask", "t5", {"attention_mask": [[1] * 6, [1] * 5 + [0], [1] * 6]}, 2),
            ("all_of_them", "llama", {"attention_mask": [[1] * 6] * 3, "position_ids": [list(range(6))] * 3}, 1),
        ]
    )
    def test_equal_tokens_with_another_input(self, _, name: str, others: dict, distinct: int):
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]] * 3)}
        inputs |= {key: torch.tensor(value) for key, value in others.items()}
        for mode in ("greedy", "beam"):
            self.assert_prefilled_once(name, [0, 0, 0], MODES[mode], distinct, inputs=inputs)

    def test_embeddings(self):
        generator = torch.Generator().manual_seed(0)
        embeddings = torch.randn(2, 6, 32, generator=generator)
        for layout in (LAYOUTS["consecutive"], LAYOUTS["shuffled"]):
            inputs = {"inputs_embeds": embeddings[layout], "attention_mask": torch.ones(6, 6, dtype=torch.long)}
            for mode in ("greedy", "sample_several"):
                ours, theirs = run_both("llama", 6, {**MODES[mode], **ALL_OUTPUTS, "max_new_tokens": 5}, inputs=inputs)
                self.assertEqual((ours["rows"], ours["query_length"]), (2, 6))
                assert_same(ours, theirs)

    def test_start_tokens_of_each_row(self):
        """Which `generate` turns into prompts of the decoder after rows were compared."""
        inputs = repeated_inputs("bart", [0, 0])
        arguments = {"decoder_start_token_id": [5, 6]}
        ours, _ = self.assert_prefilled_once("bart", [0, 0], arguments, distinct=2, inputs=inputs)
        self.assertEqual(ours["sequences"][:, 0].tolist(), [5, 6])


class ForkTest(unittest.TestCase):
    """`generate` against itself with `prompt_expansion="recompute"`."""

    def test_groups_of_beams(self):
        model = build_model("llama")
        for layout in REPEATED:
            inputs = repeated_inputs("llama", LAYOUTS[layout])
            arguments = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2}
            want, _ = generate(model, inputs, **arguments, prompt_expansion="recompute")
            got, shapes = generate(model, inputs, **arguments)
            self.assertEqual(shapes[0][0], len(set(LAYOUTS[layout])))
            self.assertTrue(torch.equal(got, want))

    @parameterized.expand(product(("llama", "bart"), LAYOUTS))
    def test_recompute_switches_it_off(self, name: str, layout: str):
        inputs = repeated_inputs(name, LAYOUTS[layout])
        with mock.patch.object(module, "fingerprint_rows") as fingerprint, logged() as messages:
            _, shapes = generate(build_model(name), inputs, prompt_expansion="recompute")
        self.assertEqual(shapes[0][0], len(LAYOUTS[layout]))
        fingerprint.assert_not_called()
        self.assertEqual(messages, [])

    @parameterized.expand(product(("bart", "t5"), LAYOUTS))
    def test_encoder_runs_on_distinct_rows(self, name: str, layout: str):
        model, rows = build_model(name), []
        model.get_encoder().register_forward_hook(lambda _, args, output: rows.append(len(output.last_hidden_state)))
        # Who asks for it says that the hook doesn't mind
        generate(model, repeated_inputs(name, LAYOUTS[layout]), num_beams=2, prompt_expansion="copy")
        self.assertEqual(rows, [len(set(LAYOUTS[layout]))])

    def test_encoder_that_the_caller_has_run(self):
        model, inputs = build_model("bart"), repeated_inputs("bart", LAYOUTS["shuffled"])
        want, _ = generate(model, inputs, num_beams=2, prompt_expansion="recompute")
        encoder_outputs = model.get_encoder()(**inputs, return_dict=True)
        given = {"encoder_outputs": encoder_outputs, "attention_mask": inputs["attention_mask"]}
        kept = encoder_outputs.last_hidden_state
        # Rounding may depend on the position in the batch: rows are equal if the caller makes them so
        equal = kept[[0, 1, 0, 1, 1, 0]]
        for states, distinct in ((equal, 2), (equal + torch.arange(6)[:, None, None] * 1e-7, 6)):
            encoder_outputs.last_hidden_state = states
            got, shapes = generate(model, given, num_beams=2)
            self.assertEqual(shapes[0][0], distinct)
            self.assertTrue(torch.equal(got, want))
            self.assertIs(encoder_outputs.last_hidden_state, states)

    def test_encoder_outputs_of_another_layout(self):
        """The encoder runs once more, on all rows, with the reason logged."""
        model, inputs, rows = build_model("bart"), repeated_inputs("bart", LAYOUTS["consecutive"]), []

        def add_output(module, args, output):
            rows.append(len(output.last_hidden_state))
            output.attentions = (torch.zeros(5, 1),)
            return output

        want, _ = generate(model, inputs, num_beams=2, prompt_expansion="recompute")
        model.get_encoder().register_forward_hook(add_output)
        with logged() as messages:
            got, shapes = generate(model, inputs, num_beams=2, prompt_expansion="copy")
        self.assertEqual((rows, shapes[0][0]), ([2, 6], 6))
        self.assertTrue(torch.equal(got, want))
        self.assertRegex(messages[-1], "all prefilled .*the encoder's outputs have another number of rows")

    def test_inputs_are_not_written_to(self):
        for name, layout in product(("llama", "bart"), ("consecutive", "shuffled")):
            inputs = repeated_inputs(name, LAYOUTS[layout])
            before = {key: value.clone() for key, value in inputs.items()}
            generate(build_model(name), inputs)
            for key, value in before.items():
                self.assertTrue(torch.equal(inputs[key], value))

    def test_keys_and_values_of_a_group_are_stored_once(self):
        """While decoding, of groups of one size; a copy per row otherwise."""
        model, found = build_model("llama"), []

        def record(module, args, kwargs):
            keys = kwargs["cache"].layers[0].keys if kwargs["cache"].layers else None
            found.append(keys.segments[0].shape[0] if isinstance(keys, SegmentedStates) else 0)

        model.register_forward_pre_hook(record, with_kwargs=True)
        for layout, prefixes in (("consecutive", [0, 2, 2, 2, 2]), ("shuffled", [0, 0, 0, 0, 0])):
            found.clear()
            generate(model, repeated_inputs("llama", LAYOUTS[layout]))
            self.assertEqual(found, prefixes)

    def test_mode_that_cannot_share_is_not_refused_for_equal_rows(self):
        """Nobody asked for several rows: what the batch holds must not make a call fail."""
        model, inputs = build_model("llama"), repeated_inputs("llama", LAYOUTS["consecutive"])
        with logged() as messages:
            _, shapes = generate(model, inputs, prompt_expansion="share", use_cache=False)
        self.assertEqual(shapes[0][0], 2)
        self.assertRegex(messages[-1], "prompt_expansion='copy' .*there is no cache")
        with self.assertRaisesRegex(ValueError, "prompt_expansion='share'"):
            generate(model, inputs, prompt_expansion="share", use_cache=False, num_beams=2)


class ReasonTest(unittest.TestCase):
    """What is decided is logged, and nothing if nothing repeats."""

    @parameterized.expand(
        [
            ("consecutive", r"LlamaForCausalLM: equal rows are prefilled once \(groups of one size\)"),
            ("shuffled", r"LlamaForCausalLM: equal rows are prefilled once \(copied to where they repeat\)"),
            ("none_equal", None),
        ]
    )
    def test_logged(self, layout: str, pattern: str | None):
        model = build_model("llama")
        with logged() as messages:
            for _ in range(2):
                generate(model, repeated_inputs("llama", LAYOUTS[layout]))
        if pattern is None:
            self.assertEqual(messages, [])
        else:
            self.assertRegex(messages[0], pattern)
            self.assertEqual(len(messages), len(set(messages)))

    def assert_all_prefilled(self, pattern: str, model, inputs: dict, **arguments) -> None:
        want, _ = generate(model, inputs, **{**arguments, "prompt_expansion": "recompute"})
        with logged() as messages:
            got, shapes = generate(model, inputs, **arguments)
        self.assertEqual(shapes[0][0], len(inputs["input_ids"]))
        self.assertTrue(torch.equal(got, want))
        self.assertEqual(len(messages), 1)
        self.assertRegex(messages[0], pattern)

    def test_cache_of_the_caller(self):
        model, inputs = build_model("llama"), repeated_inputs("llama", [0, 0])
        with logged() as messages:
            _, shapes = generate(model, inputs, cache=DynamicCache(config=model.config))
        self.assertEqual(shapes[0][0], 2)
        self.assertRegex(messages[0], "equal rows are all prefilled .*a cache was passed in")

    def test_loop_of_the_caller(self):
        """It may change each row before it prefills."""

        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, expand_size=1, **kwargs):
            input_ids[0, -1] = 7
            outputs, input_ids, _ = model.prefill_and_expand(
                input_ids, generation_config, kwargs, expand_size=expand_size
            )
            return outputs.logits[:, -1].argmax(-1, keepdim=True)

        self.assert_all_prefilled(
            "loop` may change each row", build_model("llama"), repeated_inputs("llama", [0, 0]), custom_generate=loop
        )

    @parameterized.expand([("consecutive", 2), ("shuffled", 6)])
    def test_state_outside_of_the_cache(self, layout: str, rows: int):
        """It can be repeated, but not be taken by index."""
        config = transformers.RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            context_length=64,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(0)
        model = transformers.RwkvForCausalLM(config).eval()
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 6))[LAYOUTS[layout]]}
        want, _ = generate(model, inputs, prompt_expansion="recompute", pad_token_id=PAD)
        with logged() as messages:
            got, shapes = generate(model, inputs, pad_token_id=PAD)
        self.assertEqual(shapes[0][0], rows)
        self.assertTrue(torch.equal(got, want))
        if rows == 6:
            self.assertRegex(messages[0], "a state outside of its cache")

    def test_reason_against_prefilling_once_counts_here_too(self):
        model = build_model("llama")
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        inputs = repeated_inputs("llama", [0, 0])
        self.assert_all_prefilled("equal rows are all prefilled .*a hook of a LlamaDecoderLayer", model, inputs)
        with logged() as messages:
            generate(model, inputs, num_beams=2)
        self.assertEqual(len(messages), 1)
        self.assertRegex(messages[0], "prompt_expansion='recompute' .*a hook of a LlamaDecoderLayer")

    @parameterized.expand([("gpt2", 6), ("llama", 2)])
    def test_training_mode(self, name: str, rows: int):
        """Trainers generate in training mode. It matters where there is dropout."""
        inputs = repeated_inputs(name, LAYOUTS["consecutive"])
        arguments = {"do_sample": True, **ALL_OUTPUTS, "max_new_tokens": 4}
        ours, theirs = run_both(name, 6, arguments, inputs=inputs, training=True)
        self.assertEqual(ours["rows"], rows)
        assert_same(ours, theirs)
        with logged() as messages:
            generate(build_model(name).train(), inputs)
        self.assertRegex(messages[0], "its own dropout" if rows == 6 else "equal rows are prefilled once")


class Synchronizations(TorchDispatchMode):
    """Counts where the host waits for a device (a CPU shows the same calls), and the operations that read `numel`."""

    def __init__(self, numel: int | None = None):
        super().__init__()
        self.numel, self.readers, self.waits = numel, Counter(), 0
        self.patches = [
            mock.patch.object(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))
            for name in ("tolist", "numpy", "cpu")
        ]

    def counted(self, method):
        def call(tensor, *args, **kwargs):
            self.waits += 1
            return method(tensor, *args, **kwargs)

        return call

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # The states of random number generators, bytes, are on the CPU wherever the model is
        is_random_state = function is torch.ops.aten.equal.default and args[0].dtype == torch.uint8
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.waits += not is_random_state
        output = function(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if not function.is_view and any(tensor.numel() == self.numel for tensor in tensors):
            self.readers[str(function.overloadpacket)] += 1
        return output


class CostTest(unittest.TestCase):
    def test_different_rows_are_read_once(self):
        """One product with the weights and one sum for each input, and one wait for all of them."""
        ids, mask = torch.arange(7 * 11).view(7, 11), torch.ones(7, 11, dtype=torch.long)
        with Synchronizations(numel=77) as counter:
            self.assertIsNone(find_equal_rows([ids, mask]))
        self.assertEqual(counter.waits, 1)
        self.assertEqual(counter.readers, {"aten.mul": 2, "aten.sum": 2})

    def test_counter_counts(self):
        with Synchronizations() as counter:
            (
                bool((torch.ones(3) == 1).all()),
                torch.ones(1).item(),
                torch.ones(2).tolist(),
                torch.equal(torch.ones(2), torch.ones(2)),
            )
        self.assertEqual(counter.waits, 4)

    def waits(self, name: str, inputs: dict, **arguments) -> int:
        model = build_model(name)
        with Synchronizations() as counter:
            generate(model, inputs, **arguments)
        return counter.waits

    @parameterized.expand(product(("llama", "bart"), ({}, {"num_beams": 3}, {"do_sample": True})))
    def test_generate_waits_once_more_where_nothing_repeats(self, name: str, arguments: dict):
        """And not at all for one prompt. Copying is taken for the comparison: sharing beams has checks of its own."""
        for rows, added in ((3, 1), (1, 0)):
            inputs = build_inputs(name, rows)
            upstream = self.waits(name, inputs, **arguments, prompt_expansion="recompute")
            ours = self.waits(name, inputs, **arguments, prompt_expansion="copy")
            self.assertEqual(ours, upstream + added)

    def test_one_row_is_not_looked_at(self):
        with mock.patch.object(prefill, "find_equal_rows") as find:
            for arguments in ({}, {"num_beams": 3}):
                generate(build_model("llama"), build_inputs("llama", 1), **arguments)
            find.assert_not_called()
            find.return_value = None
            generate(build_model("llama"), build_inputs("llama", 2))
            find.assert_called_once()


class TrainerLayoutTest(unittest.TestCase):
    """
    The batches of TRL's GRPO: each prompt comes `num_generations` times in a row, padded on the left, one sequence is
    drawn for each row, and the model is in training mode.
    """

    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17]]

    def assert_takes_the_path(self, indices: list[int], num_generations: int) -> None:
        for start in range(0, len(indices), 2 * num_generations):
            rows = [self.prompts[index] for index in indices[start : start + 2 * num_generations]]
            length = max(map(len, rows))
            padded = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
            config = GenerationConfig(max_new_tokens=5, do_sample=True, pad_token_id=PAD, eos_token_id=EOS, top_k=0)
            inputs = {"input_ids": padded, "attention_mask": mask}
            results = {}
            for strategy in ("recompute", "auto"):
                config.prompt_expansion = strategy
                torch.manual_seed(0)
                model = build_model("llama").train()
                with forwarded(model) as shapes, torch.no_grad():
                    results[strategy] = model.generate(**inputs, generation_config=config)
                self.assertEqual(shapes[0][0], 2 * num_generations if strategy == "recompute" else 2)
            self.assertTrue(torch.equal(results["auto"], results["recompute"]))

    def test_prompts_repeated_consecutively(self):
        order = [2, 0, 3, 1]
        self.assert_takes_the_path([index for index in order for _ in range(4)], num_generations=4)

    def test_sampler_of_trl(self):
        RepeatSampler = pytest.importorskip("trl.trainer.utils").RepeatSampler  # noqa: N806
        sampler = RepeatSampler(self.prompts, mini_repeat_count=4, batch_size=2, seed=0)
        self.assert_takes_the_path(list(sampler), num_generations=4)
