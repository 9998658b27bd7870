# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Cache classes from outside of the library: what they inherit is right for their own tensors, or they are not trusted."""

import unittest
from typing import Any

import torch
from parameterized import parameterized

from transformers.cache_expansion import cache_rows, cannot_expand
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from .fillings import FILLINGS
from .test_batch_expansion import ONE_EACH, THREE_EACH


class ListLayer(CacheLayerMixin):
    """Keeps keys and values of each token in a list, and knows how to reorder them."""

    def __init__(self):
        super().__init__()
        self.tokens: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.lazy_initialization(key_states, value_states)
        self.tokens += zip(key_states.split(1, dim=-2), value_states.split(1, dim=-2))
        return tuple(torch.cat(states, dim=-2) for states in zip(*self.tokens))

    def get_mask_sizes(self, query_length):
        return len(self.tokens) + query_length, 0

    def get_seq_length(self):
        return len(self.tokens)

    def get_max_length(self):
        return -1

    def reorder_cache(self, beam_idx):
        self.tokens = [tuple(states.index_select(0, beam_idx) for states in token) for token in self.tokens]


class ForgetfulLayer(DynamicLayer):
    """Keeps the sum of all keys beside them, and leaves it behind when rows are taken."""

    sums = None

    def update(self, key_states, value_states, *args, **kwargs):
        added = key_states.sum(dim=-2)
        self.sums = added if self.sums is None else self.sums + added
        return super().update(key_states, value_states)


class ReordersSums:
    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.sums = self.sums.index_select(0, beam_idx)


class SummedLayer(ForgetfulLayer):
    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.sums = self.sums.index_select(0, beam_idx)


class ComposedLayer(ReordersSums, ForgetfulLayer):
    """Takes over its reordering from a class beside the layer that it extends."""


class RepeatedSummedLayer(ForgetfulLayer):
    """Has both methods, in the way of upstream's own layers: nothing may be repeated twice."""

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.sums = self.sums.index_select(0, beam_idx)

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self.sums = self.sums.repeat_interleave(repeats, dim=0)


class StaticForgetfulLayer(StaticLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states)


class StatefulLinearLayer(LinearAttentionCacheLayerMixin):
    """A linear-attention layer written from scratch."""

    def lazy_initialization(self, conv_states=None, recurrent_states=None, state_idx=0):
        self.is_recurrent_states_initialized[state_idx] = True

    def update_conv_state(self, conv_states, state_idx=0):
        raise NotImplementedError

    def update_recurrent_state(self, recurrent_states, state_idx=0):
        self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class LoggingCache(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class ReorderedCache(DynamicCache):
    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)


class RepeatedCache(LoggingCache, ReorderedCache):
    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)


class NamedCache(DynamicCache):
    name = "mine"


def cache_of(layer_class: type) -> Cache:
    return Cache(layer_class_to_replicate=layer_class)


def filled(cache: Any, rows: list[int]) -> Any:
    filling = FILLINGS["dynamic"]()
    with torch.no_grad():
        filling.prefill(cache, rows)
    return cache


class ForeignLayersTest(unittest.TestCase):
    @parameterized.expand([(cls,) for cls in (ListLayer, SummedLayer, RepeatedSummedLayer, ComposedLayer)])
    def test_own_tensors_are_repeated(self, layer_class: type):
        filling = FILLINGS["dynamic"]()
        cache, expected = filled(cache_of(layer_class), ONE_EACH), filled(cache_of(layer_class), THREE_EACH)
        self.assertIsNone(cannot_expand(cache))
        self.assertEqual(cache_rows(cache), 2)
        cache.batch_repeat_interleave(3)
        self.assertEqual(cache_rows(cache), 6)
        for layer, other in zip(cache.layers, expected.layers):
            if hasattr(layer, "sums"):
                torch.testing.assert_close(layer.sums, other.sums, atol=1e-5, rtol=1e-5)
        got, wanted = filling.next(cache, THREE_EACH), filling.next(expected, THREE_EACH)
        self.assertGreater((wanted[0] - wanted[-1]).abs().max(), 1e-2)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        cache.batch_repeat_interleave(1)
        self.assertEqual(cache_rows(cache), 6)

    @parameterized.expand([(cls,) for cls in (ListLayer, SummedLayer, ComposedLayer)])
    def test_own_tensors_are_selected(self, layer_class: type):
        filling = FILLINGS["dynamic"]()
        cache, expected = filled(cache_of(layer_class), [0, 1, 1]), filled(cache_of(layer_class), [1, 0])
        cache.batch_select_indices(torch.tensor([2, 0]))
        for layer, other in zip(cache.layers, expected.layers):
            if hasattr(layer, "sums"):
                torch.testing.assert_close(layer.sums, other.sums, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(filling.next(cache, [1, 0]), filling.next(expected, [1, 0]), atol=1e-5, rtol=1e-5)

    def test_linear_attention_from_scratch(self):
        cache = Cache(layers=[StatefulLinearLayer(number_of_states=2)])
        self.assertIsNone(cache_rows(cache))
        cache.batch_repeat_interleave(3)
        states = torch.arange(8.0).view(2, 4)
        cache.update_recurrent_state(states, 0, state_idx=1)
        self.assertEqual(cache_rows(cache), 2)
        cache.batch_repeat_interleave(3)
        self.assertTrue(torch.equal(cache.layers[0].recurrent_states[1], states[THREE_EACH]))
        self.assertEqual(cache_rows(cache), 6)


class CannotExpandTest(unittest.TestCase):
    @parameterized.expand(
        [
            (cache_of(ForgetfulLayer), "`ForgetfulLayer` overrides `update`, but neither"),
            (Cache(layers=[DynamicLayer(), StaticForgetfulLayer(8)]), "`StaticForgetfulLayer` overrides `update`"),
            (LoggingCache(), "`LoggingCache` overrides `update` or `reorder_cache`"),
            (ReorderedCache(), "`ReorderedCache` overrides `update` or `reorder_cache`"),
            (EncoderDecoderCache(DynamicCache(), LoggingCache()), "`LoggingCache`"),
            (((torch.zeros(2, 1, 1, 1),) * 2,), "`tuple` has no `batch_repeat_interleave`"),
            (object(), "`object` has no `batch_repeat_interleave`"),
        ]
    )
    def test_reason(self, cache: Any, reason: str):
        if isinstance(cache, Cache) and getattr(cache, "layer_class_to_replicate", None) is ForgetfulLayer:
            filled(cache, ONE_EACH)
        self.assertIn(reason, cannot_expand(cache))

    @parameterized.expand(
        [
            (DynamicCache(),),
            (NamedCache(),),
            (RepeatedCache(),),
            (Cache(layers=[SummedLayer(), RepeatedSummedLayer(), ComposedLayer(), ListLayer()]),),
            (EncoderDecoderCache(DynamicCache(), NamedCache()),),
        ]
    )
    def test_no_reason(self, cache: Any):
        self.assertIsNone(cannot_expand(cache))

    def test_generate_expands_first(self):
        """What stays behind would be found out too late: such a cache is filled with all rows, as upstream does."""
        filling = FILLINGS["dynamic"]()
        prompts = []
        handle = filling.model.register_forward_pre_hook(
            lambda module, args, kwargs: prompts.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        self.addCleanup(handle.remove)
        sequences = {}
        for cache, rows in ((DynamicCache(), 2), (Cache(layers=[ForgetfulLayer(), ForgetfulLayer()]), 6)):
            prompts.clear()
            torch.manual_seed(0)
            sequences[rows] = filling.model.generate(
                filling.prompt,
                cache=cache,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=4,
                eos_token_id=None,
            )
            self.assertEqual(prompts[0], rows)
        self.assertTrue(torch.equal(sequences[2], sequences[6]))
        self.assertEqual(cache.layers[0].sums.shape[0], 6)


class CacheRowsTest(unittest.TestCase):
    def test_encoder_decoder(self):
        filling = FILLINGS["dynamic"]()
        three, two = filling.fill([0, 1, 1]), filling.fill(ONE_EACH)
        self.assertEqual(cache_rows(EncoderDecoderCache(three, two)), 3)
        self.assertEqual(cache_rows(EncoderDecoderCache(DynamicCache(), two)), 2)
        self.assertIsNone(cache_rows(EncoderDecoderCache(DynamicCache(), DynamicCache())))

    def test_first_layer_that_is_filled(self):
        filled_layer = FILLINGS["dynamic"]().fill(ONE_EACH).layers[0]
        self.assertEqual(cache_rows(Cache(layers=[DynamicLayer(), StaticLayer(8), filled_layer])), 2)

    def test_static_without_waiting_for_a_device(self):
        cache = FILLINGS["static"]().fill(ONE_EACH)
        self.assertIsInstance(cache, StaticCache)
        # A length on the meta device can't be read
        for layer in cache.layers:
            layer.cumulative_length = layer.cumulative_length.to("meta")
        self.assertEqual(cache_rows(cache), 2)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.arange(6))
        self.assertEqual(cache_rows(cache), 6)

    def test_something_else(self):
        self.assertIsNone(cache_rows(object()))
