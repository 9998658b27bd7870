# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""How a strategy is chosen, asked for and refused, and the contracts with callers: caches, loops and objects of theirs."""

import copy
import logging
import tempfile
import unittest
from itertools import product
from unittest import mock

import torch
from parameterized import parameterized
from torch import nn
from torch.nn import functional as F

import transformers
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM
from transformers.generation import prefill_obstacles
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe
from transformers.prefix_sharing import SegmentedStates
from transformers.utils import logging as transformers_logging

from .runs import ALL_OUTPUTS, MODES, assert_same, forwarded, run_both
from .tiny_models import build_inputs, build_model


def generate(model, arguments: dict, **inputs) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns the generated tokens and the (rows, query length) of each forward."""
    torch.manual_seed(0)
    with forwarded(model) as shapes:
        output = model.generate(**inputs, **arguments)
    return output, shapes


class ExpansionTestCase(unittest.TestCase):
    def assert_refused(self, pattern: str, model, **arguments) -> None:
        """Asserts that `generate` raises a ValueError, without a forward of any module."""
        forwards = []
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
        encoder = model.get_encoder() if model.config.is_encoder_decoder else model
        encoder_handle = encoder.register_forward_pre_hook(lambda *_: forwards.append(1))
        with self.assertRaisesRegex(ValueError, pattern):
            model.generate(**arguments)
        handle.remove()
        encoder_handle.remove()
        self.assertEqual(forwards, [])

    def reasons(self, model, arguments: dict) -> list[str]:
        """Returns what `generate` logs about the strategy at info level."""
        transformers_logging.info_once.cache_clear()
        logger = logging.getLogger("transformers.generation.prefill")
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            with self.assertLogs(logger, "INFO") as captured:
                for _ in range(2):  # once, however often it is taken
                    model.generate(**arguments)
        finally:
            logger.setLevel(level)
        return [record.getMessage() for record in captured.records]


class KnobTest(ExpansionTestCase):
    def test_value_is_validated(self):
        with self.assertRaisesRegex(ValueError, r"`prompt_expansion` must be one of .*'auto'.* but is 'twice'"):
            GenerationConfig(prompt_expansion="twice")
        self.assert_refused("'twice'", build_model("bart"), **build_inputs("bart", 1), prompt_expansion="twice")

    @parameterized.expand(["recompute", "copy", "share", "auto"])
    def test_value_is_kept(self, value: str):
        config = GenerationConfig(prompt_expansion=value)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.assertEqual(GenerationConfig.from_pretrained(folder).prompt_expansion, value)
        model = build_model("llama")
        model.generate(**build_inputs("llama", 1), generation_config=config, num_beams=2, max_new_tokens=1)
        self.assertEqual(config.prompt_expansion, value)
        self.assertEqual(config, GenerationConfig(prompt_expansion=value))

    def test_default_of_the_model(self):
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        model.generation_config.prompt_expansion = "recompute"
        _, shapes = generate(model, {"num_beams": 3, "max_new_tokens": 2}, **inputs)
        self.assertEqual(shapes[0], (6, 9))
        _, shapes = generate(model, {"num_beams": 3, "max_new_tokens": 2, "prompt_expansion": "auto"}, **inputs)
        self.assertEqual(shapes[0], (2, 9))

    @parameterized.expand(product(("llama", "t5"), MODES))
    def test_recompute_is_upstream(self, name: str, mode: str):
        """The rows forwarded as well as the outputs."""
        arguments = {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 5}
        ours, theirs = run_both(name, 2, arguments, fork_arguments={"prompt_expansion": "recompute"})
        self.assertEqual(ours["rows"], 6)
        self.assertEqual(ours["prefill_flops"], theirs["prefill_flops"])
        assert_same(ours, theirs)

    @parameterized.expand(["llama", "bart"])
    def test_all_but_recompute_prefill_once(self, name: str):
        model, inputs = build_model(name), build_inputs(name, 2)
        outputs = {}
        for value in ("recompute", "copy", "share", "auto", None):
            arguments = {"num_beams": 3, "max_new_tokens": 5, "prompt_expansion": value}
            outputs[value], shapes = generate(model, arguments, **inputs)
            self.assertEqual(shapes[0][0], 6 if value == "recompute" else 2)
            self.assertTrue(torch.equal(outputs[value], outputs["recompute"]))


class ShareTest(ExpansionTestCase):
    """Where the prompt's keys and values are stored once."""

    def held_bytes(self, model, name: str, arguments: dict) -> list[int]:
        """Returns the bytes of all storages that the cache holds before each forward."""
        held = []

        def measure(module, args, kwargs):
            storages = {}
            pending, seen = [kwargs.get("cache")], set()
            while pending:
                value = pending.pop()
                if id(value) in seen:
                    continue
                seen.add(id(value))
                if isinstance(value, torch.Tensor):
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
                elif isinstance(value, (list, tuple)):
                    pending.extend(value)
                elif isinstance(value, dict):
                    pending.extend(value.values())
                elif hasattr(value, "__dict__"):
                    pending.extend(vars(value).values())
            held.append(sum(storages.values()))

        handle = model.register_forward_pre_hook(measure, with_kwargs=True)
        generate(model, arguments, **build_inputs(name, 2, length=60))
        handle.remove()
        return held

    @parameterized.expand(product(("llama", "bart"), MODES))
    def test_bytes_held(self, name: str, mode: str):
        arguments = {**MODES[mode](8), "max_new_tokens": 5, "eos_token_id": None}
        model = build_model(name)
        shared = self.held_bytes(model, name, {**arguments, "prompt_expansion": "share"})
        copied = self.held_bytes(model, name, {**arguments, "prompt_expansion": "copy"})
        # llama: 2 layers x keys and values x 2 heads of 8 x 4 bytes; bart: 4 heads, for the 60 tokens of the encoder
        prompt = 2 * 60 * 2 * 2 * (2 if name == "llama" else 4) * 8 * 4
        self.assertGreaterEqual(copied[1], 8 * prompt)
        self.assertLess(shared[-1], 2 * prompt)

    def test_prefix_is_never_moved(self):
        """The prompt's keys stay in the same memory from the prefill to the last step, and nobody reads a copy."""
        model, addresses = build_model("llama"), []

        def record(module, args, kwargs):
            keys = [layer.keys for layer in kwargs["cache"].layers]
            shared = [states for states in keys if isinstance(states, SegmentedStates)]
            addresses.append([states.segments[0].data_ptr() for states in shared])

        handle = model.register_forward_pre_hook(record, with_kwargs=True)
        generate(model, {**MODES["beam"](4), "max_new_tokens": 6, "eos_token_id": None}, **build_inputs("llama", 2))
        handle.remove()
        self.assertEqual([len(found) for found in addresses], [0, 2, 2, 2, 2, 2])
        self.assertTrue(all(found == addresses[1] for found in addresses[1:]))

    @parameterized.expand(product(("llama", "gemma3", "bart"), MODES))
    def test_returned_cache_has_upstreams_layout(self, name: str, mode: str):
        """And a second call goes on from it."""
        model, inputs = build_model(name), build_inputs(name, 2)
        arguments = {**MODES[mode](3), "max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True}
        arguments["num_return_sequences"] = 3
        outputs = {}
        for strategy in ("recompute", "share"):
            output, _ = generate(model, {**arguments, "prompt_expansion": strategy}, **inputs)
            outputs[strategy] = output
        ours, theirs = outputs["share"], outputs["recompute"]
        self.assertTrue(torch.equal(ours.sequences, theirs.sequences))
        parts = [(ours.cache, theirs.cache)]
        if name == "bart":
            parts = [
                (getattr(ours.cache, part), getattr(theirs.cache, part))
                for part in ("self_attention_cache", "cross_attention_cache")
            ]
        for our_part, their_part in parts:
            for our_layer, their_layer in zip(our_part.layers, their_part.layers, strict=True):
                self.assertIs(type(our_layer), type(their_layer))
                torch.testing.assert_close(our_layer.keys, their_layer.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(our_layer.values, their_layer.values, atol=1e-4, rtol=1e-4)

    @parameterized.expand(
        [
            ("no_cache", {"use_cache": False}, "there is no cache"),
            (
                "quantized",
                {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
                "a 'quantized' cache can't be shared",
            ),
            ("attentions", {"output_attentions": True, "return_dict_in_generate": True}, "attention weights"),
        ]
    )
    def test_obstacle(self, _, options: dict, pattern: str):
        """`auto` copies, with the reason logged, and `share` is refused with it."""
        model = build_model("llama", "eager")
        arguments = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 2, **options}
        _, shapes = generate(model, arguments)
        self.assertEqual(shapes[0][0], 2)
        (reason,) = self.reasons(model, arguments)
        self.assertRegex(reason, f"prompt_expansion='copy' .*{pattern}")
        self.assert_refused(pattern, model, **arguments, prompt_expansion="share")

    def test_attention_that_cannot_share(self):
        with mock.patch.object(F, "scaled_dot_product_attention", lambda *args, **kwargs: None):
            self.assert_refused(
                "`torch.nn.functional.scaled_dot_product_attention` has been replaced",
                build_model("llama"),
                **build_inputs("llama", 2),
                num_beams=3,
                prompt_expansion="share",
            )


class ObstacleTest(ExpansionTestCase):
    """What makes `auto` expand first, with the reason that is logged, is what `copy` refuses."""

    def assert_expands_first(self, pattern: str, model, **arguments) -> None:
        arguments = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 2, **arguments}
        _, shapes = generate(model, arguments)
        self.assertEqual(shapes[0][0], 6)
        (reason,) = self.reasons(model, arguments)
        self.assertRegex(reason, f"prompt_expansion='recompute' .*{pattern}")
        self.assert_refused(pattern, model, **arguments, prompt_expansion="copy")

    def test_reason_to_prefill_once_is_logged(self):
        arguments = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 2}
        (reason,) = self.reasons(build_model("llama"), arguments)
        self.assertRegex(reason, r"LlamaForCausalLM: prompt_expansion='share' \(the prompt's cache can be shared\)")

    def test_training_mode(self):
        self.assert_expands_first("training mode, where each row draws", build_model("gpt2").train())

    def test_training_mode_without_dropout(self):
        """Nothing is drawn, as in most language models of today."""
        for mode in MODES:
            arguments = {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 4}
            ours, theirs = run_both("llama", 2, arguments, training=True)
            self.assertEqual(ours["rows"], 2)
            assert_same(ours, theirs)

    @parameterized.expand(
        [
            ("function", lambda model: setattr(model.model.layers[1].self_attn, "attention_dropout", 0.1)),
            ("module", lambda model: model.add_module("adapter", nn.Dropout(0.1))),
            ("config", lambda model: setattr(model.config, "router_jitter_noise", 0.1)),
            ("batch_norm", lambda model: model.add_module("norm", nn.BatchNorm1d(4))),
        ]
    )
    def test_training_mode_that_matters(self, _, change):
        model = build_model("llama").train()
        self.assertIsNone(prefill_obstacles.look_at_modules(model).drawing)
        change(model)
        self.assert_expands_first("training mode", model)

    def test_training_mode_draws_dropout_per_row(self):
        """gpt2 has dropout: the same random stream as upstream only with B * N rows."""
        ours, theirs = run_both("gpt2", 2, {**MODES["sample"](3), **ALL_OUTPUTS, "max_new_tokens": 4}, training=True)
        self.assertEqual(ours["rows"], 6)
        self.assertGreater((ours["logits.0"][0] - ours["logits.0"][1]).abs().max(), 0)
        assert_same(ours, theirs)

    @parameterized.expand(
        [
            ("ParakeetForRNNT", "the decoder keeps its own state"),
            ("ParakeetForTDT", "the decoder keeps its own state"),
            ("NemotronAsrStreamingForRNNT", "the decoder keeps its own state"),
            ("Qwen2_5OmniTalkerForConditionalGeneration", "kept beside the cache"),
            ("Qwen3OmniMoeTalkerForConditionalGeneration", "kept beside the cache"),
            ("Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration", "kept beside the cache"),
        ]
    )
    def test_own_state(self, name: str, reason: str):
        """These models say so themselves."""
        class_ = getattr(transformers, name, None) or getattr(modeling_qwen3_omni_moe, name)
        self.assertRegex(class_._why_not_prefill_once(None, {}), reason)

    @parameterized.expand([(0.5, False, 6), (1.0, False, 2), (1.0, True, 6)])
    def test_expert_capacity(self, fraction: float, training: bool, rows: int):
        """What a row gets depends on the others, unless experts have room for all."""
        torch.manual_seed(0)
        config = transformers.NllbMoeConfig(
            vocab_size=67,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_experts=4,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
            dropout=0.0,
            attention_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            moe_token_dropout=0.0,
            moe_eval_capacity_token_fraction=fraction,
            decoder_start_token_id=1,
        )
        model = transformers.NllbMoeForConditionalGeneration(config).train(training)
        arguments = {**build_inputs("t5", 2), "num_beams": 3, "max_new_tokens": 2}
        _, shapes = generate(model, arguments)
        self.assertEqual(shapes[0][0], rows)
        if rows == 6:
            self.assert_refused("capacity of the experts", model, **arguments, prompt_expansion="copy")

    def test_custom_loop(self):
        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            model._prefill(input_ids, generation_config, model_kwargs)
            return input_ids

        self.assert_expands_first("loop` doesn't take `expand_size`", build_model("llama"), custom_generate=loop)

    def test_foreign_cache(self):
        class ForeignCache:
            """Nothing that the library knows how to repeat."""

            is_compileable, is_linear = False, [False]

            def __init__(self):
                self.inner = DynamicCache(config=build_model("llama").config)

            def __getattr__(self, name):
                if name in ("inner", "batch_repeat_interleave", "layers") or name.startswith("__"):
                    raise AttributeError(name)
                return getattr(self.inner, name)

        model = build_model("llama")
        self.assert_refused(
            "ForeignCache",
            model,
            **build_inputs("llama", 2),
            cache=ForeignCache(),
            num_beams=3,
            prompt_expansion="copy",
        )

    def test_nothing_to_expand_is_never_refused(self):
        model = build_model("gpt2").train()
        _, shapes = generate(model, {"max_new_tokens": 2, "prompt_expansion": "copy"}, **build_inputs("llama", 2))
        self.assertEqual(shapes[0], (2, 9))


class LoopContractTest(ExpansionTestCase):
    """A decoding method that takes `expand_size` gets B rows, any other gets B * N rows."""

    def test_callable_without_expand_size_gets_expanded_rows(self):
        seen = {}

        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            seen.update(ids=input_ids, mask=model_kwargs["attention_mask"], cache=model_kwargs["cache"])
            return input_ids

        inputs = build_inputs("llama", 2)
        build_model("llama").generate(**inputs, custom_generate=loop, num_return_sequences=3, do_sample=True)
        self.assertTrue(torch.equal(seen["ids"], inputs["input_ids"].repeat_interleave(3, 0)))
        self.assertTrue(torch.equal(seen["mask"], inputs["attention_mask"].repeat_interleave(3, 0)))
        self.assertEqual(seen["cache"].get_seq_length(), 0)

    def test_callable_with_expand_size_owns_the_expansion(self):
        seen = {}

        def loop(
            model, input_ids, logits_processor, stopping_criteria, generation_config, expand_size=1, **model_kwargs
        ):
            seen.update(rows=input_ids.shape[0], expand_size=expand_size)
            outputs, input_ids, model_kwargs = model.prefill_and_expand(
                input_ids, generation_config, model_kwargs, expand_size=expand_size
            )
            seen.update(logits=outputs.logits, mask=model_kwargs["attention_mask"], cache=model_kwargs["cache"])
            return input_ids

        model, inputs = build_model("llama"), build_inputs("llama", 2)
        output = model.generate(**inputs, custom_generate=loop, num_return_sequences=3, do_sample=True)
        self.assertEqual((seen["rows"], seen["expand_size"]), (2, 3))
        self.assertTrue(torch.equal(output, inputs["input_ids"].repeat_interleave(3, 0)))
        self.assertEqual(seen["mask"].shape, (6, 9))
        self.assertEqual(seen["cache"].layers[0].keys.shape[0], 6)
        with torch.no_grad():
            want = model(output, attention_mask=seen["mask"]).logits[:, -1:]
        torch.testing.assert_close(seen["logits"], want, atol=1e-5, rtol=1e-5)

    def test_subclass_with_its_own_loop_gets_expanded_rows(self):
        class OwnLoop(LlamaForCausalLM):
            def _sample(self, input_ids, **kwargs):
                rows.append(input_ids.shape[0])
                return super()._sample(input_ids, **kwargs)

        rows, plain = [], build_model("llama")
        model = OwnLoop(plain.config).eval()
        model.load_state_dict(plain.state_dict())
        arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
        want, _ = generate(plain, arguments, **build_inputs("llama", 2))
        got, shapes = generate(model, arguments, **build_inputs("llama", 2))
        self.assertEqual((rows, shapes[0]), ([6], (6, 9)))
        self.assertTrue(torch.equal(got, want))

    def test_loops_called_directly_take_final_rows(self):
        """As models do that expand by themselves."""
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        seen = {}

        def loop(model, input_ids, **kwargs):
            seen["rows"] = input_ids.shape[0]
            return model._sample(input_ids, **kwargs)

        arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
        want, _ = generate(model, arguments, **inputs)
        got, shapes = generate(model, {**arguments, "custom_generate": loop}, **inputs)
        self.assertEqual((seen["rows"], shapes[0]), (6, (6, 9)))
        self.assertTrue(torch.equal(got, want))


def prefix_cache(model, inputs: dict[str, torch.Tensor], length: int) -> DynamicCache:
    """Returns a cache filled with the first `length` positions of the prompts."""
    cache = DynamicCache(config=model.config)
    mask = inputs["attention_mask"][:, :length]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(inputs["input_ids"][:, :length], attention_mask=mask, position_ids=position_ids, cache=cache)
    return cache


class CallerObjectsTest(ExpansionTestCase):
    @parameterized.expand(["auto", "recompute"])
    def test_encoder_outputs_are_not_written_to(self, prompt_expansion: str):
        model, inputs = build_model("bart"), build_inputs("bart", 2)
        arguments = {"num_beams": 3, "max_new_tokens": 5, "prompt_expansion": prompt_expansion}
        want, _ = generate(model, arguments, **inputs)
        encoder_outputs = model.get_encoder()(**inputs, return_dict=True)
        kept = encoder_outputs.last_hidden_state
        for _ in range(2):
            got, _ = generate(
                model, arguments, encoder_outputs=encoder_outputs, attention_mask=inputs["attention_mask"]
            )
            self.assertTrue(torch.equal(got, want))
            self.assertIs(encoder_outputs.last_hidden_state, kept)
            self.assertIs(encoder_outputs["last_hidden_state"], kept)

    @parameterized.expand(MODES)
    def test_prefix_cache_with_one_row_per_prompt(self, mode: str):
        """Upstream raises. The same cache object comes back, with B * N rows, and the prefix can be used again."""
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        arguments = {**MODES[mode](3), "max_new_tokens": 5}
        want, _ = generate(model, arguments, **inputs)
        prefix = prefix_cache(model, inputs, 6)
        for _ in range(2):
            cache = copy.deepcopy(prefix)
            got, shapes = generate(model, {**arguments, "return_dict_in_generate": True}, cache=cache, **inputs)
            self.assertEqual(shapes[0], (2, 3))
            self.assertTrue(torch.equal(got.sequences, want))
            self.assertIs(got.cache, cache)
            self.assertEqual(cache.layers[0].keys.shape[0], 6)
        self.assertEqual(prefix.layers[0].keys.shape[0], 2)

    @parameterized.expand(MODES)
    def test_prefix_cache_with_one_row_per_beam(self, mode: str):
        """As upstream: the rows are expanded first."""
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        arguments = {**MODES[mode](3), "max_new_tokens": 5}
        want, _ = generate(model, arguments, **inputs)
        cache = prefix_cache(model, {name: value.repeat_interleave(3, 0) for name, value in inputs.items()}, 6)
        got, shapes = generate(model, arguments, cache=cache, **inputs)
        self.assertEqual(shapes[0], (6, 3))
        self.assertTrue(torch.equal(got, want))

    def test_prefix_cache_with_other_rows_is_refused(self):
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        cache = prefix_cache(model, build_inputs("llama", 4), 6)
        pattern = r"one row per prompt \(2\).*\(2 \* 3 = 6\), but it holds 4 rows"
        self.assert_refused(pattern, model, **inputs, cache=cache, num_beams=3)

    def test_inputs_are_not_written_to(self):
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        before = {name: value.clone() for name, value in inputs.items()}
        generate(model, {**MODES["beam"](3), "max_new_tokens": 4}, **inputs)
        for name, value in before.items():
            self.assertTrue(torch.equal(inputs[name], value))


class GuidanceTest(ExpansionTestCase):
    """Classifier-free guidance runs the model on a negative prompt, with a cache of its own."""

    @parameterized.expand(product(MODES, (False, True)))
    def test_negative_prompt_follows_the_rows(self, mode: str, use_cache: bool):
        """The reference recomputes the unconditional scores of each row from its tokens."""
        model, inputs = build_model("llama"), build_inputs("llama", 2)
        negative = torch.tensor([[3, 4, 5], [6, 7, 8]])
        prompt_length = inputs["input_ids"].shape[1]

        def reference(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            prompts = negative.repeat_interleave(input_ids.shape[0] // 2, 0)
            with torch.no_grad():
                logits = model(torch.cat([prompts, input_ids[:, prompt_length:]], 1), use_cache=False).logits[:, -1]
            unconditional = logits.log_softmax(dim=-1)
            return 1.5 * (scores.log_softmax(dim=-1) - unconditional) + unconditional

        arguments = {**MODES[mode](3), "max_new_tokens": 6, "eos_token_id": None, "use_cache": use_cache}
        want, _ = generate(model, {**arguments, "logits_processor": [reference]}, **inputs)
        guided = {"guidance_scale": 1.5, "negative_prompt_ids": negative}
        got, shapes = generate(model, {**arguments, **guided}, **inputs)
        self.assertEqual(shapes[0][0], 2)
        self.assertTrue(torch.equal(got, want), (got, want))
        self.assertEqual(negative.shape, (2, 3))
