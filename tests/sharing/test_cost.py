# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Where the default shares: in layers for which it was measured to pay."""

import logging
import unittest
from collections import Counter

import pytest
import torch
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.prefix_sharing import SegmentedStates
from transformers.prefix_sharing.caches import share_cache
from transformers.prefix_sharing.cost import BREAK_EVEN, TOKENS_PER_STEP, Decoding, why_not_pays


MANY_STEPS = Decoding(steps=10**6, reorders=True)


def keys(items: int, heads: int, length: int, size: int, device: str = "cpu") -> torch.Tensor:
    # Without storage: only shapes matter
    return torch.empty(1, device=device).expand(items, heads, length, size)


class RuleTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("self", MANY_STEPS, 4, "self"),
            ("self", Decoding(10**6, reorders=False), 4, "self"),
            ("cross", MANY_STEPS, 4, "cross, reordered"),
            ("cross", Decoding(10**6, reorders=False), 4, "cross"),
            ("cross", Decoding(10**6, reorders=False), 8, "cross, many rows"),
        ]
    )
    def test_from_break_even_on(self, kind, decoding, repeats, name):
        length = BREAK_EVEN[name] // (repeats * 2 * 16)
        self.assertIsNone(why_not_pays(keys(1, 2, length, 16), repeats, kind, decoding))
        reason = why_not_pays(keys(1, 2, length - 1, 16), repeats, kind, decoding)
        self.assertIn(f"{repeats} rows of {length - 1} tokens", reason)
        self.assertIn(str(BREAK_EVEN[name]), reason)

    def test_items_count_as_rows(self):
        length = BREAK_EVEN["self"] // (4 * 4 * 2 * 16)
        self.assertIsNone(why_not_pays(keys(4, 2, length, 16), 4, "self", MANY_STEPS))
        self.assertIsNotNone(why_not_pays(keys(1, 2, length, 16), 4, "self", MANY_STEPS))

    def test_few_steps_after_many_tokens_that_upstream_computes_more_often(self):
        steps = 3 * 100 // TOKENS_PER_STEP
        self.assertIsNone(why_not_pays(keys(1, 2, 100, 8), 4, "self", Decoding(steps, False)))
        self.assertIsNotNone(why_not_pays(keys(1, 2, 100, 8), 4, "self", Decoding(steps + 1, False)))
        # Upstream computes an encoder's states once
        self.assertIsNotNone(why_not_pays(keys(1, 2, 100, 8), 4, "cross", Decoding(steps, False)))

    @parameterized.expand([(256, 8, True), (255, 8, False), (256, 7, False), (4096, 7, False)])
    def test_published_rule_on_a_device_without_measurements(self, length, repeats, pays):
        reason = why_not_pays(keys(1, 2, length, 16, device="meta"), repeats, "self", MANY_STEPS)
        self.assertEqual(reason is None, pays)
        if not pays:
            self.assertIn("without measurements", reason)


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.cost_rule
class DefaultTest(unittest.TestCase):
    def generate(self, length: int, steps: int, **arguments) -> tuple[list[type], str]:
        """Returns the types of the keys in the last step, and the strategy that was logged."""
        model, types = llama(), []
        model.register_forward_hook(lambda module, args, output: types.append(type(output.cache.layers[0].keys)))
        prompt = torch.arange(length)[None] % 50 + 3
        logging.Logger.info_once.cache_clear()
        with self.assertLogs("transformers.generation.prefill", logging.INFO) as logs:
            sequences = model.generate(prompt, num_beams=4, max_new_tokens=steps, **arguments)
        self.assertEqual(sequences.shape, (1, length + steps))
        return types[-1], "".join(logs.output)

    def test_short_prompt_is_copied(self):
        kept, log = self.generate(length=20, steps=5)
        self.assertIs(kept, torch.Tensor)
        self.assertRegex(log, r"prompt_expansion='copy' \(4 rows of 20 tokens are \d+ elements of keys")

    def test_long_prompt_is_shared(self):
        kept, log = self.generate(length=BREAK_EVEN["self"] // (4 * 2 * 16), steps=5)
        self.assertIs(kept, SegmentedStates)
        self.assertIn("prompt_expansion='share'", log)

    def test_few_steps_are_shared(self):
        kept, log = self.generate(length=100, steps=2)
        self.assertIs(kept, SegmentedStates)
        self.assertIn("prompt_expansion='share'", log)

    def test_who_asks_for_it_gets_it(self):
        kept, log = self.generate(length=20, steps=5, prompt_expansion="share")
        self.assertIs(kept, SegmentedStates)
        self.assertIn("prompt_expansion='share'", log)


class CallCounter(TorchDispatchMode):
    """Counts the operations of torch, and among them those that compute something."""

    VIEWS = {"view", "_unsafe_view", "transpose", "expand", "slice", "select", "unsqueeze", "t", "permute", "split"}

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class CallsTest(unittest.TestCase):
    """A layer's step, with its part of the reordering, makes few calls more than with a copied prompt."""

    def count(self, share: bool, padded: bool) -> Counter[str]:
        """Calls of the second layer: those of a model with two less those of one with one."""
        counts = []
        for layers in (1, 2):
            model, rows, length = llama(layers), 4, 64
            mask = torch.ones(1, length, dtype=torch.long)
            mask[:, : 2 * padded] = 0
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(torch.arange(length)[None] % 50, attention_mask=mask, cache=cache)
                if share:
                    share_cache(cache, rows)
                else:
                    cache.batch_repeat_interleave(rows)
                mask = mask.repeat_interleave(rows, 0)
                for step in range(3):
                    mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
                    positions = (mask.cumsum(-1) - 1)[:, -1:]
                    with CallCounter() if step == 2 else torch.no_grad() as counter:
                        model(torch.full((rows, 1), 5), attention_mask=mask, position_ids=positions, cache=cache)
                        cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
            counts.append(counter.calls)
        counts[1].subtract(counts[0])
        return counts[1]

    @parameterized.expand([(False,), (True,)])
    def test_calls_of_a_layer(self, padded):
        shared, copied = self.count(True, padded), self.count(False, padded)
        # The prompt is read by a kernel of its own
        name = "_scaled_dot_product_flash_attention_for_cpu"
        self.assertEqual((shared[name], copied[name]), (2, 1))
        self.assertLessEqual(shared.total() - copied.total(), 20)
        computing = [
            sum(n for call, n in calls.items() if call not in CallCounter.VIEWS) for calls in (shared, copied)
        ]
        self.assertLessEqual(computing[0] - computing[1], 5)
