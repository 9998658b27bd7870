# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""A cache whose rows are repeated, selected or reordered is the cache that would have been filled with those rows."""

import copy
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode

from transformers.cache_expansion import cache_rows, cannot_expand
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    StaticCache,
    StaticLayer,
)
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from .fillings import FILLINGS, QUANTIZED_FILLINGS, STATIC_FILLINGS, Filling, addresses, states


ONE_EACH, THREE_EACH = [0, 1], [0, 0, 0, 1, 1, 1]
# Beams stay within their item in practice, where rows would start as equals: these go across items
BEAMS, BEAM_ITEMS = [4, 0, 3, 1, 5, 2], [1, 0, 1, 0, 1, 0]
WRONG_REPEATS = (0, -1, 1.5, "2", None)


def available(name: str) -> bool:
    backends = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}
    return backends.get(name.partition("_")[0], lambda: True)()


class CacheTestCase(unittest.TestCase):
    def assert_same_states(self, cache: Any, expected: Any) -> None:
        got, wanted = dict(states(cache)), dict(states(expected))
        self.assertEqual(got.keys(), wanted.keys())
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                self.assertEqual(got[name].shape, value.shape, name)
                # fp8 tensors can't be compared as they are
                states_close = torch.allclose(got[name].float(), value.float(), atol=1e-5, rtol=1e-5)
                self.assertTrue(states_close, f"{name}:\n{got[name]}\n{value}")
            else:
                self.assertEqual(got[name], value, name)

    def assert_same_as_filled(self, filling: Filling, cache: Any, rows: Sequence[int]) -> None:
        expected = filling.fill(rows)
        self.assert_same_states(cache, expected)
        got, wanted = filling.next(cache, rows), filling.next(expected, rows)
        # Rows of different items differ by much more than the tolerance: a mix-up of rows can't pass
        distinct = wanted[[rows.index(item) for item in set(rows)]]
        if len(distinct) > 1:
            self.assertGreater((distinct[0] - distinct[1]).abs().max(), 1e-2)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        self.assert_same_states(cache, expected)


class BatchExpansionTest(CacheTestCase):
    @parameterized.expand(FILLINGS)
    def test_repeated_rows(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        self.assertEqual(cache_rows(cache), 2)
        self.assertIsNone(cannot_expand(cache))
        cache.batch_repeat_interleave(3)
        self.assertEqual(cache_rows(cache), 6)
        self.assert_same_as_filled(filling, cache, THREE_EACH)

    @parameterized.expand(FILLINGS)
    def test_repeated_twice(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill([1])
        cache.batch_repeat_interleave(2)
        cache.batch_repeat_interleave(3)
        self.assert_same_as_filled(filling, cache, [1] * 6)

    @parameterized.expand(FILLINGS)
    def test_beams_after_repeat(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor(BEAMS))
        self.assert_same_as_filled(filling, cache, BEAM_ITEMS)

    @parameterized.expand(FILLINGS)
    def test_reordered_rows(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill([0, 0, 1])
        cache.reorder_cache(torch.tensor([2, 1, 2]))
        self.assert_same_as_filled(filling, cache, [1, 0, 1])

    @parameterized.expand(FILLINGS)
    def test_selected_rows(self, name: str):
        filling = FILLINGS[name]()
        for indices in (torch.tensor([-1, 0]), torch.tensor([True, False, True])):
            cache = filling.fill([0, 1, 1])
            cache.batch_select_indices(indices)
            self.assertEqual(cache_rows(cache), 2)
            self.assert_same_as_filled(filling, cache, torch.tensor([0, 1, 1])[indices].tolist())

    @parameterized.expand(FILLINGS)
    def test_one_repeat_copies_nothing(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        before = addresses(cache)
        self.assertGreater(len(before), 0)
        cache.batch_repeat_interleave(1)
        for layer in getattr(cache, "layers", []):
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(1)
        self.assertEqual(addresses(cache), before)
        self.assert_same_as_filled(filling, cache, ONE_EACH)

    @parameterized.expand(FILLINGS)
    def test_wrong_repeats_change_nothing(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        before = addresses(cache)
        layers = [layer for layer in getattr(cache, "layers", []) if hasattr(layer, "batch_repeat_interleave")]
        for repeats in WRONG_REPEATS:
            for part in (cache, *layers):
                with self.assertRaisesRegex(ValueError, f"`repeats` must be an integer of at least 1.* {repeats!r}"):
                    part.batch_repeat_interleave(repeats)
        self.assertEqual(addresses(cache), before)
        self.assert_same_as_filled(filling, cache, ONE_EACH)

    @parameterized.expand(name for name in FILLINGS if name not in ("xlstm", "static_early_initialized"))
    def test_nothing_held(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.new_cache(3)
        self.assertIsNone(cache_rows(cache))
        self.assertIsNone(cannot_expand(cache))
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0]))
        with self.assertRaisesRegex(ValueError, "`repeats`"):
            cache.batch_repeat_interleave(0)
        with torch.no_grad():
            filling.prefill(cache, ONE_EACH)
        self.assert_same_as_filled(filling, cache, ONE_EACH)

    @parameterized.expand(FILLINGS)
    def test_copy_of_a_cache_is_its_own(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        kept = copy.deepcopy(cache)
        cache.batch_repeat_interleave(3)
        self.assert_same_as_filled(filling, kept, ONE_EACH)

    @parameterized.expand(["dynamic", "sliding_not_full", "encoder_decoder"])
    def test_cropped_to_nothing(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        cache.crop(-cache.get_seq_length())
        # Nothing is cached, but the empty tensors have rows that the next ones are appended to
        cache.batch_repeat_interleave(3)
        self.assertEqual(cache.get_seq_length(), 0)
        with torch.no_grad():
            filling.prefill(cache, THREE_EACH)
        self.assert_same_as_filled(filling, cache, THREE_EACH)


class QuantizedExpansionTest(CacheTestCase):
    """
    Repeated rows take what was quantized once. To quantize repeated rows is something else for group-wise stores, whose
    groups cross rows: these caches are compared with the rows of the one that was not repeated.
    """

    def filled(self, name: str) -> tuple[Filling, Any]:
        if not available(name):
            self.skipTest(f"{name} is not installed")
        filling = QUANTIZED_FILLINGS[name]()
        return filling, filling.fill(ONE_EACH)

    @parameterized.expand(
        [(name, indices, rows) for name in QUANTIZED_FILLINGS for indices, rows in ((None, THREE_EACH), ([1], [1]))]
    )
    def test_rows_of_the_next_step(self, name: str, indices: list[int] | None, rows: list[int]):
        filling, cache = self.filled(name)
        expected = filling.next(filling.fill(ONE_EACH), ONE_EACH)
        stores = [(layer._quantized_keys, layer._quantized_values) for layer in cache.layers]
        with (
            mock.patch.object(type(cache.layers[0]), "_dequantize", side_effect=AssertionError),
            mock.patch.object(type(cache.layers[0]), "_quantize", side_effect=AssertionError),
        ):
            if indices is None:
                cache.batch_repeat_interleave(3)
            else:
                cache.batch_select_indices(torch.tensor(indices))
            self.assertEqual(cache_rows(cache), len(rows))
        if not name.startswith("fp8"):
            for layer, store in zip(cache.layers, stores):
                self.assertIs(layer._quantized_keys, store[0])
                self.assertIs(layer._quantized_values, store[1])
        self.assertGreater((expected[0] - expected[1]).abs().max(), 1e-2)
        torch.testing.assert_close(filling.next(cache, rows), expected[rows], atol=1e-5, rtol=1e-5)

    @parameterized.expand(QUANTIZED_FILLINGS)
    def test_beams_and_steps_after_repeat(self, name: str):
        filling, cache = self.filled(name)
        expected = filling.fill(ONE_EACH)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor(BEAMS))
        # Group-wise stores are quantized again every four tokens, all rows together: until then rows don't mix
        for _ in range(1 if name.endswith("residual") else 3):
            got, wanted = filling.next(cache, BEAM_ITEMS), filling.next(expected, ONE_EACH)
            torch.testing.assert_close(got, wanted[BEAM_ITEMS], atol=1e-5, rtol=1e-5)

    @parameterized.expand(["fp8", "fp8_decoding"])
    def test_fp8_rows_equal_filled_rows(self, name: str):
        filling, cache = self.filled(name)
        cache.batch_repeat_interleave(3)
        self.assert_same_as_filled(filling, cache, THREE_EACH)

    @parameterized.expand(QUANTIZED_FILLINGS)
    def test_stored_again_after_repeat(self, name: str):
        filling, cache = self.filled(name)
        cache.batch_repeat_interleave(3)
        for _ in range(5):
            outputs = filling.next(cache, THREE_EACH)
        self.assertEqual(cache_rows(cache), 6)
        self.assertIsNone(getattr(cache.layers[0], "_pending_beam_idx", None))
        self.assertEqual(outputs.shape[0], 6)

    @parameterized.expand(QUANTIZED_FILLINGS)
    def test_one_repeat_and_wrong_repeats(self, name: str):
        filling, cache = self.filled(name)
        before = [{**vars(layer)} for layer in cache.layers]
        cache.batch_repeat_interleave(1)
        for repeats in WRONG_REPEATS:
            for part in (cache, *cache.layers):
                with self.assertRaisesRegex(ValueError, "`repeats`"):
                    part.batch_repeat_interleave(repeats)
        for layer, attributes in zip(cache.layers, before):
            for attribute, value in attributes.items():
                self.assertIs(vars(layer)[attribute], value, attribute)

    @parameterized.expand(QUANTIZED_FILLINGS)
    def test_nothing_held(self, name: str):
        if not available(name):
            self.skipTest(f"{name} is not installed")
        filling = QUANTIZED_FILLINGS[name]()
        cache = filling.new_cache(2)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0]))
        self.assertIsNone(cache_rows(cache))
        filled = filling.fill(ONE_EACH)
        filled.reset()
        self.assertIsNone(cache_rows(filled))


class OffloadedLayersTest(CacheTestCase):
    """The `meta` device stands for an accelerator that the layers have been moved away from."""

    @parameterized.expand(
        ["dynamic", "sliding", "static", "static_sliding", "indexed", "jamba", "hybrid", "static_hybrid_sliding"]
    )
    def test_layers_stay_where_they_are(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        home = [layer.device for layer in cache.layers]
        for layer in cache.layers:
            layer.device = torch.device("meta")
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 1, 3, 4]))
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(3)
        self.assertEqual({layer.device.type for layer in cache.layers}, {"meta"})
        self.assertEqual({value.device.type for _, value in states(cache) if isinstance(value, torch.Tensor)}, {"cpu"})
        for layer, device in zip(cache.layers, home):
            layer.device = device
        self.assert_same_as_filled(filling, cache, THREE_EACH)

    @parameterized.expand(
        [
            (DynamicLayer,),
            (partial(StaticLayer, max_cache_len=8),),
            (Fp8QuantizedLayer,),
            (LinearAttentionAndFullAttentionLayer,),
            (partial(LinearAttentionAndStaticFullAttentionLayer, max_cache_len=8),),
        ]
    )
    def test_devices(self, new_layer: Callable[[], Any]):
        """Fake tensors of an accelerator refuse an index from elsewhere, as real ones do."""
        with FakeTensorMode():
            layer = new_layer()
            layer.update(*torch.zeros(2, 2, 4, 3, 16, device="cuda"))
            if hasattr(layer, "conv_states"):
                layer.lazy_initialization(conv_states=layer.keys, recurrent_states=layer.keys)
            for repeats, move, device in (
                (2, lambda: None, "cuda"),
                (4, layer.offload, "cpu"),
                (8, layer.prefetch, "cuda"),
            ):
                move()
                layer.batch_repeat_interleave(2)
                held = [value for _, value in states(layer) if isinstance(value, torch.Tensor) and value.dim() > 1]
                self.assertGreater(len(held), 1)
                self.assertEqual({state.shape[0] for state in held}, {2 * repeats})
                # Quantized stores aren't moved
                expected = "cuda" if isinstance(layer, Fp8QuantizedLayer) else device
                self.assertEqual({state.device.type for state in held}, {expected})

    def test_copies_under_way_are_waited_for(self):
        filling = FILLINGS["dynamic"]()
        cache = filling.fill(ONE_EACH)
        cache.offloading = True
        devices = [torch.device("cuda", index) for index in range(len(cache.layers))]
        for layer, device in zip(cache.layers, devices):
            layer.device = device
        with mock.patch("torch.cuda.synchronize") as synchronize:
            cache.batch_repeat_interleave(1)
            self.assertEqual(synchronize.call_count, 0)
            cache.batch_repeat_interleave(3)
        self.assertEqual({call.args[0] for call in synchronize.call_args_list}, set(devices))


class HalfExpandedTest(CacheTestCase):
    """A cache with a layer that can't be repeated stays as it is."""

    class Bare:
        """A layer that knows nothing but to be there."""

        keys = values = None

    @parameterized.expand([("batch_repeat_interleave", 3), ("batch_select_indices", torch.tensor([0]))])
    def test_encoder_decoder(self, method: str, argument: Any):
        filling = FILLINGS["encoder_decoder"]()
        cache = filling.fill(ONE_EACH)
        cache.cross_attention_cache.layers.append(self.Bare())
        before = addresses(cache)
        with self.assertRaisesRegex(TypeError, f"`{method}` .*`Bare`"):
            getattr(cache, method)(argument)
        self.assertEqual(addresses(cache), before)

    def test_last_layer(self):
        filling = FILLINGS["static"]()
        cache = filling.fill(ONE_EACH)
        cache.layers.append(self.Bare())
        before = addresses(cache)
        with self.assertRaisesRegex(TypeError, "`Bare`"):
            cache.batch_repeat_interleave(3)
        self.assertEqual(addresses(cache), before)
        self.assertIn("`Bare`", cannot_expand(cache))
        self.assertIn("`Bare`", cannot_expand(EncoderDecoderCache(cache, DynamicCache())))


class StaticBatchSizeTest(CacheTestCase):
    @parameterized.expand([name for name in STATIC_FILLINGS if "encoder" not in name])
    def test_batch_size_follows(self, name: str):
        cache = STATIC_FILLINGS[name]().fill(ONE_EACH)
        self.assertEqual(cache.batch_size, 2)
        cache.batch_repeat_interleave(3)
        self.assertEqual(cache.batch_size, 6)
        cache.batch_select_indices(torch.tensor([5]))
        self.assertEqual(cache.batch_size, 1)

    def test_rows_after_reset(self):
        cache = STATIC_FILLINGS["static"]().fill(ONE_EACH)
        self.assertIsInstance(cache, StaticCache)
        cache.reset()
        # The buffers are zeroed, not given up
        self.assertEqual(cache_rows(cache), 2)
