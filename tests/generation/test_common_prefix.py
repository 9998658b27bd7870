# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Different prompts that begin alike: their common beginning is forwarded once, and what comes out is upstream's."""

import unittest
from unittest import mock

import torch
from parameterized import parameterized
from safetensors.torch import load

from transformers import DynamicCache
from transformers.generation import common_prefix, prefill
from transformers.generation.common_prefix import align

from .prefix_models import NEW, OTHERS, SETTINGS, generate, run_adapted, run_other
from .runs import ALL_OUTPUTS, assert_same, oracle, run, run_both
from .test_equal_rows import Synchronizations, logged
from .tiny_models import PAD, VOCABULARY, build_model


PREFIX = 12
# Lengths of the tails, and the pads before the longest prompt
LAYOUTS = {
    "uniform": ([3, 3, 3], 0),
    "padded": ([3, 3, 3], 2),
    "ragged": ([1, 5, 3], 0),
    "ragged_padded": ([4, 1, 2], 3),
}
MODES = {
    "greedy": (1, {"do_sample": False}),
    "sample": (2, {"do_sample": True, "num_return_sequences": 2}),
    "beam": (3, {"num_beams": 3, "num_return_sequences": 2}),
    "beam_sample": (2, {"do_sample": True, "num_beams": 2}),
}


def prompts(tails: list[int], pads: int = 0, length: int = PREFIX) -> dict[str, torch.Tensor]:
    """Prompts with `length` tokens in common, padded on the left; tails begin with different tokens."""
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    longest = length + max(tails) + pads
    rows, mask = [], []
    for row, size in enumerate(tails):
        tail = [3 + row, *torch.randint(3, VOCABULARY, (size - 1,), generator=generator).tolist()]
        tokens = prefix + tail
        rows.append([PAD] * (longest - len(tokens)) + tokens)
        mask.append([0] * (longest - len(tokens)) + [1] * len(tokens))
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def one_row_cache(model, inputs: dict, length: int = PREFIX) -> DynamicCache:
    """A cache that holds the first tokens of the first prompt, which has no pads."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:1, :length], cache=cache, use_cache=True)
    return cache


class ShortPrefixTest(unittest.TestCase):
    """Takes prefixes of any length that saves a token."""

    def setUp(self):
        for name, value in (("MINIMAL_TOKENS", 4), ("MINIMAL_SAVING", 1)):
            patch = mock.patch.object(common_prefix, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def assert_refused(self, pattern: str | None, model, inputs: dict, rows: int = 3, **arguments) -> None:
        """Asserts that prompts are computed as a whole, with a reason in the log, and to the same tokens."""
        want, _ = generate(model, inputs, **{**arguments, "prompt_expansion": "recompute"})
        with logged() as messages:
            got, shapes = generate(model, inputs, **arguments)
        self.assertEqual(shapes[0][0], rows)
        self.assertTrue(torch.equal(got, want))
        self.assertNotIn("a common prefix is computed once", "\n".join(messages))
        if pattern is not None:
            self.assertRegex("\n".join(messages), rf"a common prefix is computed for each prompt \(.*{pattern}")


class TokensTest(ShortPrefixTest):
    @parameterized.expand([(mode, layout) for mode in MODES for layout in LAYOUTS])
    def test_modes(self, mode: str, layout: str):
        count, arguments = MODES[mode]
        tails, pads = LAYOUTS[layout]
        inputs = prompts(tails, pads)
        _, shapes = generate(build_model("llama"), inputs, **arguments)
        steps = [(3 * count, 1)] * (NEW - 1)
        self.assertEqual(shapes, [(1, PREFIX), (3, max(tails)), *steps])
        ours, theirs = run_both("llama", 3, {**SETTINGS, **arguments}, inputs=inputs, record=True)
        self.assertEqual((ours.pop("forwards"), theirs.pop("forwards")), (NEW + 1, NEW))
        self.assertEqual((ours.pop("query_length"), ours["rows"]), (PREFIX, 1))
        self.assertEqual(theirs.pop("query_length"), PREFIX + max(tails) + pads)
        assert_same(ours, theirs)

    @parameterized.expand(["share", "copy", "auto"])
    def test_strategies(self, strategy: str):
        inputs, arguments = prompts([1, 5, 3]), {"num_beams": 3, "num_return_sequences": 3, **SETTINGS}
        _, shapes = generate(build_model("llama"), inputs, **arguments, prompt_expansion=strategy)
        self.assertEqual(shapes[:3], [(1, PREFIX), (3, 5), (9, 1)])
        want = load(oracle().run(run, "llama", 3, arguments, inputs=inputs))
        got = load(run("llama", 3, {**arguments, "prompt_expansion": strategy}, inputs=inputs))
        self.assertTrue(torch.equal(got["sequences"], want["sequences"]))

    def test_group_beam_search(self):
        """Upstream doesn't have it: every row is computed for the comparison."""
        inputs, model = prompts([1, 5, 3]), build_model("llama")
        arguments = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4}
        want, whole = generate(model, inputs, **arguments, prompt_expansion="recompute")
        got, shapes = generate(model, inputs, **arguments)
        self.assertEqual((whole[0], shapes[:3]), ((12, PREFIX + 5), [(1, PREFIX), (3, 5), (12, 1)]))
        self.assertTrue(torch.equal(got, want))

    @parameterized.expand([([0, 0, 1, 1, 2, 2],), ([1, 0, 2, 0, 1, 1],)])
    def test_equal_rows_beside_it(self, layout: list[int]):
        inputs = {name: value[layout] for name, value in prompts([1, 5, 3]).items()}
        for arguments in ({"do_sample": True}, {"num_beams": 2}):
            _, shapes = generate(build_model("llama"), inputs, **arguments)
            self.assertEqual(shapes[:2], [(1, PREFIX), (3, 5)])
            want = load(oracle().run(run, "llama", 6, {**SETTINGS, **arguments}, inputs=inputs))
            got = load(run("llama", 6, {**SETTINGS, **arguments}, inputs=inputs))
            self.assertTrue(torch.equal(got["sequences"], want["sequences"]))

    def test_chunks(self):
        inputs, model = prompts([1, 5, 3]), build_model("llama")
        want, _ = generate(model, inputs, prompt_expansion="recompute")
        got, shapes = generate(model, inputs, prefill_chunk_size=5)
        self.assertEqual(shapes[:4], [(1, 5), (1, 5), (1, 2), (3, 5)])
        self.assertTrue(torch.equal(got, want))

    def test_fields_of_the_output(self):
        ours, theirs = run_both("llama", 3, {**SETTINGS, **ALL_OUTPUTS, "num_beams": 2}, inputs=prompts([3, 3, 3]))
        for results in (ours, theirs):
            del results["query_length"], results["forwards"]
        self.assertEqual(ours["rows"], 1)
        assert_same(ours, theirs)

    @parameterized.expand(
        [(name, layout) for name in ("gpt2", "qwen3", "gpt_neox", "mixtral") for layout in ("ragged", "uniform")]
    )
    def test_models(self, name: str, layout: str):
        inputs = prompts(*LAYOUTS[layout])
        for arguments in ({}, {"num_beams": 2}):
            _, shapes = generate(build_model(name), inputs, **arguments)
            self.assertEqual(shapes[0], (1, PREFIX))
            want = load(oracle().run(run, name, 3, {**SETTINGS, **arguments}, inputs=inputs))
            got = load(run(name, 3, {**SETTINGS, **arguments}, inputs=inputs))
            self.assertTrue(torch.equal(got["sequences"], want["sequences"]))


class OtherModelsTest(ShortPrefixTest):
    @parameterized.expand(
        [(name, layout, beams) for name in OTHERS for layout in ("uniform", "ragged") for beams in (1, 2)]
    )
    def test_architectures(self, name: str, layout: str, beams: int):
        inputs = prompts(*LAYOUTS[layout])
        got, shapes = run_other(name, inputs, {"num_beams": beams})
        want, whole = oracle().run(run_other, name, inputs, {"num_beams": beams})
        # Bloom makes its mask by itself; the others count distance in windows
        is_taken = name == "opt" or (layout == "uniform" and name != "bloom")
        self.assertEqual(shapes[0][0], 1 if is_taken else 3)
        self.assertEqual(whole[0][0], 3 * beams)
        self.assertTrue(torch.equal(got, want))

    @parameterized.expand([1, 3])
    def test_lora(self, beams: int):
        inputs = prompts([1, 5, 3])
        got, shapes = run_adapted(inputs, {"num_beams": beams})
        want, _ = oracle().run(run_adapted, inputs, {"num_beams": beams})
        self.assertEqual(shapes[:2], [(1, PREFIX), (3, 5)])
        self.assertTrue(torch.equal(got, want))


class ReasonTest(ShortPrefixTest):
    """Where the common beginning isn't computed by itself."""

    def test_sliding_windows_take_tails_of_one_length(self):
        model = build_model("gemma3")
        self.assert_refused("the model counts distance in its cache", model, prompts([1, 5, 3]))
        inputs = prompts([3, 3, 3])
        _, shapes = generate(model, inputs)
        self.assertEqual(shapes[:2], [(1, PREFIX), (3, 3)])
        want = load(oracle().run(run, "gemma3", 3, SETTINGS, inputs=inputs))
        got = load(run("gemma3", 3, SETTINGS, inputs=inputs))
        self.assertTrue(torch.equal(got["sequences"], want["sequences"]))

    @parameterized.expand(
        [("falcon_h1", "reads a prompt as a whole"), ("mamba", "holds other states than keys and values")]
    )
    def test_models_with_other_states(self, name: str, reason: str):
        self.assert_refused(reason, build_model(name), prompts([3, 3, 3]))

    def test_returned_cache_has_no_pads_of_ours(self):
        model, inputs = build_model("llama"), prompts([1, 5, 3])
        with logged() as messages:
            _, shapes = generate(model, inputs, return_dict_in_generate=True)
        self.assertEqual(shapes[0], (3, PREFIX + 5))
        self.assertRegex("\n".join(messages), "the cache is returned, with its pads")

    @parameterized.expand(
        [
            ("no_cache", {"use_cache": False}),
            ("static", {"cache_implementation": "static", "disable_compile": True}),
        ]
    )
    def test_arguments(self, _, arguments: dict):
        self.assert_refused(None, build_model("llama"), prompts([3, 3, 3]), **arguments)

    @parameterized.expand(["output_attentions", "output_hidden_states"])
    def test_states_of_the_prompt(self, name: str):
        model = build_model("llama", "eager")
        arguments = {name: True, "return_dict_in_generate": True}
        output, shapes = generate(model, prompts([3, 3, 3]), **arguments)
        self.assertEqual(shapes[0], (3, PREFIX + 3))
        field = output["attentions" if name == "output_attentions" else "hidden_states"]
        self.assertEqual(field[0][0].shape[-2], PREFIX + 3)

    def test_embeddings_are_computed_as_a_whole(self):
        model, inputs = build_model("llama"), prompts([3, 3, 3])
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        self.assert_refused(None, model, given)

    def test_pads_on_the_right(self):
        inputs = prompts([3, 3, 3])
        inputs["attention_mask"][1, -1] = 0
        self.assert_refused(None, build_model("llama"), inputs)

    def test_pads_without_a_mask(self):
        """`generate` finds a mask by itself after the plan is made."""
        model, inputs = build_model("llama"), prompts([1, 5, 3])
        del inputs["attention_mask"]
        want = load(oracle().run(run, "llama", 3, SETTINGS, inputs=inputs))["sequences"]
        got, shapes = generate(model, inputs)
        self.assertEqual(shapes[0], (3, PREFIX + 5))
        self.assertTrue(torch.equal(got, want))

    def test_nothing_in_common(self):
        inputs = {name: value[:, PREFIX:] for name, value in prompts([9, 9, 9]).items()}
        self.assert_refused(None, build_model("llama"), inputs)

    def test_rule(self):
        """127 tokens are too few, and so are 128 for 8 rows, which save 896."""
        prefix = common_prefix.CommonPrefix(128, [0] * 9, 140)
        with mock.patch.multiple(common_prefix, MINIMAL_TOKENS=128, MINIMAL_SAVING=1024):
            self.assertTrue(prefix.pays(9))
            self.assertFalse(prefix.pays(8))
            self.assertFalse(prefix.of_length(127).pays(100))


class AlignTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("no_mask", [[5, 6, 7, 8], [5, 6, 9, 8]], None, [1, 2, 0, 0]),
            ("left", [[0, 5, 6, 7], [5, 6, 8, 9]], [[0, 1, 1, 1], [1, 1, 1, 1]], [1, 2, 1, 0]),
            ("right", [[5, 6, 7, 0], [5, 6, 8, 9]], [[1, 1, 1, 0], [1, 1, 1, 1]], [0, 2, 0, 0]),
            ("one_token_is_left", [[0, 0, 5, 6], [0, 5, 6, 7]], [[0, 0, 1, 1], [0, 1, 1, 1]], [1, 1, 2, 1]),
            ("all_equal", [[5, 6, 7], [5, 6, 7]], None, [1, 2, 0, 0]),
            ("nothing", [[5, 6, 7], [8, 6, 7]], None, [1, 0, 0, 0]),
        ]
    )
    def test_align(self, _, ids: list, mask: list | None, want: list[int]):
        self.assertEqual(align(torch.tensor(ids), None if mask is None else torch.tensor(mask)).tolist(), want)


class CostTest(ShortPrefixTest):
    def test_operations(self):
        """The prefill computes P tokens once and the padded tails: less than a third of all rows."""
        inputs = prompts([4] * 6, length=60)
        model = build_model("llama")

        def flops(**arguments) -> int:
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                generate(model, inputs, max_new_tokens=1, **arguments)
            return counter.get_total_flops()

        def forward(rows: int, length: int) -> int:
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, torch.no_grad():
                model(inputs["input_ids"][:1, :1].expand(rows, length), logits_to_keep=1)
            return counter.get_total_flops()

        ours, whole = flops(), flops(prompt_expansion="recompute")
        self.assertLess(ours, whole / 3)
        self.assertEqual(whole, forward(6, 64))
        # Tails attend to the prefix beside themselves, which is what is left
        self.assertGreaterEqual(ours, forward(1, 60) + forward(6, 4))
        self.assertLess(ours, 1.2 * (forward(1, 60) + forward(6, 4)))

    def test_prefix_is_stored_once(self):
        model, found = build_model("llama"), []

        def record(module, args, kwargs):
            keys = kwargs["cache"].layers[0].keys if kwargs["cache"].get_seq_length() else None
            if hasattr(keys, "segments"):
                found.append([tuple(segment.shape[::2]) for segment in keys.segments[:2]])

        model.register_forward_pre_hook(record, with_kwargs=True)
        generate(model, prompts([1, 5, 3]), num_beams=2, prompt_expansion="share")
        self.assertEqual(found[-1], [(1, PREFIX), (3, 5)])

    def test_device_is_waited_for_once(self):
        """By the plan. Upstream's mask of the tails, which see a cache, is looked at once more than that of a prompt."""
        of_plan, compare = [], prefill._compare_prompts

        def compare_counted(*args):
            before = counter.waits
            found = compare(*args)
            of_plan.append(counter.waits - before)
            return found

        total = {}
        for strategy in ("recompute", "copy"):
            model, inputs = build_model("llama"), prompts([3, 3, 3])
            with mock.patch.object(prefill, "_compare_prompts", compare_counted), Synchronizations() as counter:
                generate(model, inputs, prompt_expansion=strategy)
            total[strategy] = counter.waits
        self.assertEqual(of_plan, [1])
        self.assertEqual(total["copy"], total["recompute"] + 2)


class PreparedCacheTest(unittest.TestCase):
    """A cache of one row that the caller passes in for several prompts. There is no least length."""

    @parameterized.expand([(1, "auto"), (1, "copy"), (2, "auto"), (2, "copy"), (2, "share")])
    def test_serves_twice_and_stays(self, count: int, strategy: str):
        model, inputs = build_model("llama"), prompts([3, 5, 1])
        # The first row has pads: the prefix is that of the longest
        cache = one_row_cache(model, {"input_ids": inputs["input_ids"][1:2]}, length=8)
        keys = [layer.keys for layer in cache.layers]
        before = [key.clone() for key in keys]
        arguments = {"num_beams": count, **SETTINGS}
        want = load(oracle().run(run, "llama", 3, arguments, inputs=inputs))["sequences"]
        for _ in range(2):
            got, shapes = generate(model, inputs, num_beams=count, cache=cache, prompt_expansion=strategy)
            self.assertEqual(shapes[:2], [(3, PREFIX + 5 - 8), (3 * count, 1)])
            self.assertTrue(torch.equal(got, want))
            self.assertEqual((cache.get_seq_length(), cache.layers[0].keys.shape[0]), (8, 1))
            for layer, key, value in zip(cache.layers, keys, before, strict=True):
                self.assertIs(layer.keys, key)
                self.assertTrue(torch.equal(key, value))

    def test_longer_than_what_is_common(self):
        model, inputs = build_model("llama"), prompts([3, 3, 3])
        cache = one_row_cache(model, inputs, length=PREFIX + 2)
        with self.assertRaisesRegex(ValueError, f"holds {PREFIX + 2} tokens, but the prompts have {PREFIX} in common"):
            generate(model, inputs, cache=cache, num_beams=2)

    @parameterized.expand([1, 2])
    def test_recompute_is_refused(self, count: int):
        model, inputs = build_model("llama"), prompts([3, 3, 3])
        with self.assertRaisesRegex(ValueError, "can't serve as a common prefix of 3 prompts"):
            generate(model, inputs, cache=one_row_cache(model, inputs), num_beams=count, prompt_expansion="recompute")

    def test_pads_without_a_mask_are_refused(self):
        model, inputs = build_model("llama"), prompts([5, 3, 1])
        cache = one_row_cache(model, inputs, length=8)
        with self.assertRaises(ValueError):
            generate(model, {"input_ids": inputs["input_ids"]}, cache=cache)

    def test_one_prompt_fills_the_cache_as_ever(self):
        model = build_model("llama")
        inputs = {name: value[:1] for name, value in prompts([3, 3, 3]).items()}
        cache = one_row_cache(model, inputs)
        want, _ = generate(model, inputs)
        got, _ = generate(model, inputs, cache=cache)
        self.assertTrue(torch.equal(got, want))
        self.assertEqual(cache.get_seq_length(), PREFIX + 3 + NEW - 1)
