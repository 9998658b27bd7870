# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Caches that hold a prompt once: whatever is done to them, they are upstream's cache of the repeated rows."""

import copy
import functools
import gc
import logging
import sys
import unittest
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from parameterized import parameterized

from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.prefix_sharing import SegmentedStates, caches
from transformers.prefix_sharing.caches import (
    SharedStaticLayer,
    learn_from,
    materialize_cache,
    share_cache,
    why_not_share,
    why_not_share_cache,
)

from ..cache.fillings import FILLINGS
from ..cache.test_batch_expansion import ONE_EACH, THREE_EACH, CacheTestCase
from ..generation.tiny_models import build_inputs, build_model
from .test_attention import Operators


HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 4
MAX_CACHE_LEN = 60
WITHIN, ACROSS = [2, 0, 0, 5, 5, 3], [5, 0, 3, 3, 1, 2]
# How many layers of each kind of cache share, out of two, or of four in encoder-decoder caches
ALL_SHARE = """
    dynamic dynamic_without_config mtp dflash sliding sliding_not_full sliding_recorded_past indexed dummy minimax_m3_vl
    deepseek_v4 unlimited_ocr unlimited_ocr_decoding minimax_attention_last hybrid hybrid_zaya hybrid_sliding static
    static_early_initialized
"""
# The others are layers of recurrent states, of windows of static buffers, or hold nothing
ONE_SHARES = """
    conv_recorded_past indexed_positions minimax conv jamba qwen3_next static_sliding static_sliding_not_full
    static_sliding_becomes_full static_dummy static_linear static_minimax_m3_vl
"""
NONE_SHARES = """
    mamba mamba2 static_indexed static_indexed_positions static_hybrid static_hybrid_sliding static_unlimited_ocr
    static_unlimited_ocr_decoding
"""
SHARED = {
    **dict.fromkeys(ALL_SHARE.split(), 2),
    **dict.fromkeys(ONE_SHARES.split(), 1),
    **dict.fromkeys(NONE_SHARES.split(), 0),
    **dict.fromkeys(["encoder_decoder", "encoder_decoder_mixed", "static_encoder_decoder"], 4),
}
# Layers that become ordinary ones in the first steps: block scores of all keys; a prompt of no tokens
EXPANDED = {"minimax_m3_vl": {"matmul": 1}, "static_early_initialized": {"copy_": 2}}
NO_CACHE = ("reformer", "xlstm", "kyutai_padding", "voxtral_realtime_padding")


def layers_of(cache: Cache) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache.layers + cache.cross_attention_cache.layers
    return cache.layers


def is_shared(layer: Any) -> bool:
    return any(isinstance(states, SegmentedStates) and states.settle() is states for states in vars(layer).values())


def tokens(rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, HEADS, length, size, generator=generator) for size in (KEY_SIZE, VALUE_SIZE))


def filled_layer(window: int | str | None, batch: int, length: int) -> CacheLayerMixin:
    """A layer of full attention, of a window, or static."""
    if window == "static":
        layer = StaticLayer(MAX_CACHE_LEN)
    else:
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    layer.update(*tokens(batch, length))
    return layer


def shared_and_ordinary(
    window: int | str | None = None, batch: int = 2, repeats: int = 3, length: int = 7
) -> tuple[Cache, CacheLayerMixin]:
    """A cache of one shared layer, and upstream's layer of the same tokens, whose rows were repeated."""
    ordinary, cache = filled_layer(window, batch, length), Cache(layers=[filled_layer(window, batch, length)])
    assert share_cache(cache, repeats) == 1
    ordinary.batch_repeat_interleave(repeats)
    return cache, ordinary


def joined(states: Any) -> torch.Tensor | None:
    settled = states.settle() if isinstance(states, SegmentedStates) else states
    return settled.joined() if isinstance(settled, SegmentedStates) else settled


def dynamic_cache(layers: int = 2, length: int = 7) -> DynamicCache:
    cache = DynamicCache()
    for index in range(layers):
        cache.update(*tokens(2, length, seed=index), index)
    return cache


class EveryCacheTest(CacheTestCase):
    """Models decode with shared caches of all kinds, with beams that stay in their item and others that don't."""

    @parameterized.expand([(name,) for name in FILLINGS if name not in NO_CACHE])
    def test_same_outputs_and_states(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill(ONE_EACH)
        ordinary = copy.deepcopy(cache)
        ordinary.batch_repeat_interleave(3)
        self.assertEqual(share_cache(cache, 3), SHARED[name])
        origins = cache.shared_origins
        self.assertEqual(sum(map(is_shared, layers_of(cache))), SHARED[name])
        for index in (list(range(6)), WITHIN, WITHIN):
            expected = filling.next(ordinary, THREE_EACH)
            torch.testing.assert_close(filling.next(cache, THREE_EACH), expected, atol=1e-5, rtol=1e-5)
            self.assertGreater((expected[0] - expected[-1]).abs().max(), 1e-2)
            cache.reorder_cache(torch.tensor(index))
            ordinary.reorder_cache(torch.tensor(index))
        expanded = Counter(origin.expanded_by for origin in origins.values() if origin.expanded_by is not None)
        self.assertEqual(expanded, EXPANDED.get(name, {}))
        for one in (cache, ordinary):
            one.reorder_cache(torch.tensor(ACROSS))
        torch.testing.assert_close(
            filling.next(cache, THREE_EACH), filling.next(ordinary, THREE_EACH), atol=1e-5, rtol=1e-5
        )
        materialize_cache(cache)
        self.assertEqual([type(layer) for layer in layers_of(cache)], [type(layer) for layer in layers_of(ordinary)])
        self.assert_same_states(cache, ordinary)

    @parameterized.expand([(name,) for name in FILLINGS if name not in NO_CACHE])
    def test_repeated_twice_and_selected(self, name: str):
        filling = FILLINGS[name]()
        cache = filling.fill([1])
        ordinary = copy.deepcopy(cache)
        ordinary.batch_repeat_interleave(6)
        share_cache(cache, 2)
        share_cache(cache, 3)
        for one in (cache, ordinary):
            one.batch_select_indices(torch.tensor([0, 2, 3, 5]))
        expected = filling.next(ordinary, [1] * 4)
        torch.testing.assert_close(filling.next(cache, [1] * 4), expected, atol=1e-5, rtol=1e-5)
        materialize_cache(cache)
        self.assert_same_states(cache, ordinary)

    @parameterized.expand([(name,) for name in NO_CACHE])
    def test_no_cache(self, name: str):
        cache = FILLINGS[name]().fill(ONE_EACH)
        self.assertRegex(why_not_share_cache(cache), f"a {type(cache).__name__} is (no `Cache`|not one of)|none of")


class MemoryTest(unittest.TestCase):
    def test_nothing_is_copied_to_share(self):
        cache = dynamic_cache()
        held = [weakref.ref(layer.keys) for layer in cache.layers]
        with Operators() as operators:
            share_cache(cache, 50)
        self.assertEqual(operators.largest, 0)
        for layer, keys in zip(cache.layers, held, strict=True):
            self.assertIs(layer.keys.segments[0], keys())
            self.assertEqual(layer.keys.shape, (100, HEADS, 7, KEY_SIZE))

    def test_prompt_stays_where_it_is(self):
        cache, ordinary = shared_and_ordinary(length=1000)
        (layer,) = cache.layers
        prompt = layer.keys.segments[0]
        for step in range(1, 5):
            with Operators() as operators:
                keys, values = cache.update(*tokens(6, 1, seed=step), 0)
                F.scaled_dot_product_attention(torch.randn(6, HEADS, 1, KEY_SIZE), keys, values)
                cache.reorder_cache(torch.tensor(WITHIN))
            # Of keys of 3 numbers, scores of 3 rows are as large
            self.assertLessEqual(operators.largest, prompt.nbytes)
            self.assertIs(layer.keys.segments[0], prompt)
            self.assertEqual(layer.keys.held_bytes, (2 * 1000 + 6 * step) * HEADS * KEY_SIZE * 4)
            self.assertEqual(layer.values.held_bytes, (2 * 1000 + 6 * step) * HEADS * VALUE_SIZE * 4)
        with Operators() as operators:
            ordinary.reorder_cache(torch.tensor(WITHIN))
        self.assertGreater(operators.largest, 3 * prompt.nbytes)

    def test_old_suffixes_are_let_go(self):
        cache, _ = shared_and_ordinary()
        cache.update(*tokens(6, 1), 0)
        old = [weakref.ref(states.segments[-1]) for states in (cache.layers[0].keys, cache.layers[0].values)]
        for _ in range(2):
            keys, values = cache.update(*tokens(6, 1), 0)
            F.scaled_dot_product_attention(torch.randn(6, HEADS, 1, KEY_SIZE), keys, values)
            cache.reorder_cache(torch.tensor(WITHIN))
        gc.collect()
        self.assertEqual([ref() for ref in old], [None, None])

    def test_window_does_not_hold_the_whole_prompt(self):
        """After the prefill upstream's layer is a view of it."""
        layer = filled_layer(5, 2, 100)
        self.assertGreater(layer.keys.untyped_storage().nbytes(), 20 * layer.keys.nbytes)
        share_cache(Cache(layers=[layer]), 3)
        self.assertEqual(layer.keys.segments[0].untyped_storage().nbytes(), 2 * HEADS * 4 * KEY_SIZE * 4)

    def test_cache_is_let_go(self):
        cache, _ = shared_and_ordinary()
        cache.update(*tokens(6, 1), 0)
        segments = [weakref.ref(segment) for segment in cache.layers[0].keys.segments]
        del cache
        gc.collect()
        self.assertEqual([ref() for ref in segments], [None, None])


class LayersTest(CacheTestCase):
    def test_window_leaves_the_prompt(self):
        cache, ordinary = shared_and_ordinary(window=5, length=9)
        visible = []
        for step in range(6):
            keys, _ = cache.update(*tokens(6, 1, seed=step), 0)
            visible.append(keys.lengths[0] if isinstance(keys, SegmentedStates) else 0)
            self.assertTrue(torch.equal(joined(keys), ordinary.update(*tokens(6, 1, seed=step))[0]))
            self.assertTrue(torch.equal(joined(cache.layers[0].keys), ordinary.keys))
        self.assertEqual(visible, [4, 3, 2, 1, 0, 0])
        self.assertIsInstance(cache.layers[0].keys, torch.Tensor)
        self.assertEqual([origin.expanded_by for origin in cache.shared_origins.values()], [None])

    def test_one_answer_for_all_layers(self):
        """Beam indices are compared once, and again when they have changed; in inference mode, too."""
        for inference in (False, True):
            with torch.inference_mode(inference):
                cache = dynamic_cache(layers=4)
                ordinary = copy.deepcopy(cache)
                ordinary.batch_repeat_interleave(3)
                share_cache(cache, 3)
                index = torch.tensor(WITHIN)
                for value in (2, 1, 5):
                    index[0] = value
                    with Operators() as operators:
                        cache.reorder_cache(index)
                    self.assertEqual(operators.names.count("equal"), 1)
                    ordinary.reorder_cache(index)
                    for ours, theirs in zip(cache.layers, ordinary.layers, strict=True):
                        self.assertTrue(torch.equal(joined(ours.keys), theirs.keys))
                        self.assertTrue(torch.equal(joined(ours.values), theirs.values))

    @parameterized.expand([("assigned",), ("written",), ("in place",)])
    def test_states_from_outside(self, how: str):
        """What is written into the keys of a layer is seen by its next update."""
        cache, ordinary = shared_and_ordinary()
        for layer in (cache.layers[0], ordinary):
            if how == "assigned":
                layer.keys = torch.ones(6, HEADS, 7, KEY_SIZE)
            elif how == "written":
                layer.keys[1, :, 2:5] = 3.0
            else:
                layer.keys.transpose(1, 2).mul_(2)
            keys, _ = layer.update(*tokens(6, 1))
            self.assertIsInstance(joined(keys), torch.Tensor)
            self.assertTrue(torch.equal(joined(keys), joined(layer.keys)))
        self.assertTrue(torch.equal(joined(cache.layers[0].keys), ordinary.keys))
        self.assertTrue(torch.equal(joined(cache.layers[0].values), ordinary.values))

    def test_copies_are_independent(self):
        cache, _ = shared_and_ordinary()
        cache.update(*tokens(6, 1), 0)
        expected = joined(cache.layers[0].keys)
        copied = copy.deepcopy(cache)
        self.assertTrue(is_shared(copied.layers[0]))
        copied.update(*tokens(6, 1), 0)
        copied.layers[0].keys.zero_()
        self.assertTrue(torch.equal(joined(cache.layers[0].keys), expected))
        self.assertTrue(is_shared(cache.layers[0]))

    def test_wrong_repeats(self):
        cache = dynamic_cache()
        for repeats in (0, -1, 1.5, "2", None):
            with self.assertRaisesRegex(ValueError, f"`repeats` must be .* but is {repeats!r}"):
                share_cache(cache, repeats)
        self.assertIsInstance(cache.layers[0].keys, torch.Tensor)
        self.assertEqual(share_cache(cache, 1), 0)
        self.assertIsInstance(cache.layers[0].keys, torch.Tensor)

    def test_materialized(self):
        cache, ordinary = shared_and_ordinary()
        materialize_cache(cache)
        self.assertIs(type(cache.layers[0].keys), torch.Tensor)
        self.assert_same_states(cache, Cache(layers=[ordinary]))
        materialize_cache(cache)
        self.assert_same_states(cache, Cache(layers=[ordinary]))

    def test_empty_cache(self):
        cache = DynamicCache()
        self.assertEqual(share_cache(cache, 3), 0)
        self.assertEqual(cache.layers, [])


class StaticTest(CacheTestCase):
    def test_no_buffer_moves(self):
        """The prompt is where the prefill wrote it, and the suffix where it was made, whatever is decoded."""
        prefilled = filled_layer("static", 2, 7)
        cache = Cache(layers=[prefilled])
        address = prefilled.keys.data_ptr()
        share_cache(cache, 3)
        (layer,) = cache.layers
        self.assertIs(type(layer), SharedStaticLayer)
        buffers = [*layer.keys.segments, *layer.values.segments]
        self.assertEqual(buffers[0].data_ptr(), address)
        self.assertEqual([buffer.shape[:3] for buffer in buffers], [(2, HEADS, 7), (6, HEADS, MAX_CACHE_LEN - 7)] * 2)
        self.assertTrue(all(hasattr(buffer, "_dynamo_static_input_type") for buffer in buffers))
        addresses = [buffer.data_ptr() for buffer in buffers]
        for step in range(5):
            cache.update(*tokens(6, 1, seed=step), 0)
            cache.reorder_cache(torch.tensor(WITHIN))
        self.assertEqual([b.data_ptr() for b in (*layer.keys.segments, *layer.values.segments)], addresses)
        self.assertEqual(layer.get_seq_length(), 12)
        self.assertIsNone(layer.origin.expanded_by)

    def test_without_index_copy(self):
        """Where a device lacks it, upstream assigns items, which needs all rows."""
        cache, ordinary = shared_and_ordinary("static")

        def refuse(*_):
            raise NotImplementedError("no index_copy_ on this device")

        with mock.patch.object(torch.Tensor, "index_copy_", refuse):
            keys, _ = cache.update(*tokens(6, 1), 0)
            expected, _ = ordinary.update(*tokens(6, 1))
        self.assertTrue(torch.equal(joined(keys), expected))

    def test_crop_into_the_prompt(self):
        cache, ordinary = shared_and_ordinary("static")
        for layer in (cache.layers[0], ordinary):
            layer.update(*tokens(6, 2))
            layer.crop(-1)
        self.assertTrue(is_shared(cache.layers[0]))
        for layer in (cache.layers[0], ordinary):
            layer.crop(-3)
            layer.update(*tokens(6, 1, seed=1))
        self.assertFalse(is_shared(cache.layers[0]))
        self.assertEqual(cache.shared_origins["self", 0].expanded_by, "crop")
        self.assertTrue(torch.equal(joined(cache.layers[0].keys)[:, :, :6], ordinary.keys[:, :, :6]))

    def test_reset(self):
        cache, ordinary = shared_and_ordinary("static")
        for layer in (cache.layers[0], ordinary):
            layer.update(*tokens(6, 2))
            layer.reset()
            layer.update(*tokens(6, 3, seed=1))
        self.assertTrue(torch.equal(joined(cache.layers[0].keys), ordinary.keys))
        materialize_cache(cache)
        self.assert_same_states(cache, Cache(layers=[ordinary]))

    def test_compiled_updates(self):
        """Full graphs. All lengths of prompts take one more than with a static cache that isn't shared."""
        counts = []
        for share in (False, True):
            torch._dynamo.reset()
            counter = torch._dynamo.testing.CompileCounter()

            def step(query, keys, values, cache):
                return F.scaled_dot_product_attention(query, *cache.update(keys, values, 0)) * 1

            compiled = torch.compile(step, backend=counter, fullgraph=True)
            for length in (7, 9, 12, 8, 11):
                cache, ordinary = Cache(layers=[filled_layer("static", 2, length)]), filled_layer("static", 2, length)
                share_cache(cache, 3) if share else cache.batch_repeat_interleave(3)
                ordinary.batch_repeat_interleave(3)
                for seed in range(3):
                    query = torch.randn(6, HEADS, 1, KEY_SIZE)
                    ours = compiled(query, *tokens(6, 1, seed=seed), cache)
                    expected = step(query, *tokens(6, 1, seed=seed), Cache(layers=[ordinary]))
                    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
                self.assertEqual(is_shared(cache.layers[0]), share)
                counts.append(counter.frame_count)
            torch._dynamo.reset()
        # One for the first length, one for any length
        self.assertEqual(counts, [1] * 5 + [1] + [2] * 4)


class LearningTest(unittest.TestCase):
    def decode(self, model: torch.nn.Module, cache: Cache) -> tuple[int, list[str]]:
        """Shares a cache of which layer 1 needs all rows. Returns how many layers share, and what is logged."""
        count = share_cache(cache, 3, model)
        for layer in cache.layers[1:]:
            layer.keys.cumsum(0)
        logger, records = logging.getLogger("transformers.prefix_sharing.caches"), []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            learn_from(cache, model)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        return count, records

    def test_layers_that_need_all_rows(self):
        """They become ordinary ones in the first call, and copy at once in the next: those of that class alone."""

        class Learner(torch.nn.Module):
            pass

        class Other(torch.nn.Module):
            pass

        count, logged = self.decode(Learner(), dynamic_cache())
        self.assertEqual(count, 2)
        (message,) = logged
        self.assertRegex(message, r"Learner: .* all rows of their keys and values: self-attention \(cumsum\)")
        cache = dynamic_cache()
        count, logged = self.decode(Learner(), cache)
        self.assertEqual((count, logged), (1, []))
        self.assertIsInstance(cache.layers[1].keys, torch.Tensor)
        self.assertTrue(is_shared(cache.layers[0]))
        self.assertEqual(share_cache(dynamic_cache(), 3, Other()), 2)
        self.assertEqual(share_cache(dynamic_cache(), 3), 2)

    def test_cross_attention_is_learned_apart(self):
        class Learner(torch.nn.Module):
            pass

        cache = EncoderDecoderCache(dynamic_cache(), dynamic_cache())
        self.assertEqual(share_cache(cache, 3, Learner()), 4)
        cache.cross_attention_cache.layers[0].values.sum()
        learn_from(cache, Learner())
        cache = EncoderDecoderCache(dynamic_cache(), dynamic_cache())
        self.assertEqual(share_cache(cache, 3, Learner()), 3)
        self.assertTrue(is_shared(cache.self_attention_cache.layers[0]))
        self.assertFalse(is_shared(cache.cross_attention_cache.layers[0]))

    def test_nothing_to_learn(self):
        class Learner(torch.nn.Module):
            pass

        cache = dynamic_cache()
        share_cache(cache, 3, Learner())
        learn_from(cache, Learner())
        learn_from(dynamic_cache(), Learner())
        self.assertNotIn(Learner, caches._learned)


def in_user_code(function: Callable, **names: Any) -> Callable:
    """A function of which the globals are those of another module than of the library."""

    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class ForeignLayer(DynamicLayer):
    pass


class ForeignCache(DynamicCache):
    pass


class WhyNotTest(unittest.TestCase):
    @contextmanager
    def assert_only_here(self, model: Any, pattern: str) -> Iterator[ExitStack]:
        """Nothing stands in the way before and after what is patched inside, and the reason is told then."""
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            self.assertIsNone(why_not_share(model, cache))
            with ExitStack() as stack:
                yield stack
                self.assertRegex(why_not_share(model, cache) or "", pattern)
            self.assertIsNone(why_not_share(model, cache))

    def patched(self, owner: Any, name: str, pattern: str, wrap: Callable = in_user_code) -> None:
        with self.assert_only_here(build_model("llama"), pattern) as stack:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))

    @parameterized.expand(
        [
            ("Cache.update", Cache, "update", "`DynamicCache.update` has been replaced"),
            ("DynamicLayer.update", DynamicLayer, "update", "`DynamicLayer.update` has been replaced"),
            ("F.sdpa", F, "scaled_dot_product_attention", "scaled_dot_product_attention` has been replaced"),
            ("repeat_kv", modeling_llama, "repeat_kv", "LlamaAttention calls `repeat_kv`, which has been replaced"),
            ("eager", modeling_llama, "eager_attention_forward", "calls `eager_attention_forward`"),
            ("rotary", modeling_llama, "apply_rotary_pos_emb", "calls `apply_rotary_pos_emb`"),
            ("forward", LlamaAttention, "forward", "LlamaAttention has a `forward` of its own"),
        ]
    )
    def test_replaced(self, _, owner: Any, name: str, pattern: str):
        self.patched(owner, name, pattern)
        # With `functools.wraps`, a function says that it is the one that it calls
        self.patched(owner, name, pattern, lambda function: functools.wraps(function)(in_user_code(function)))

    @parameterized.expand([("sdpa",), ("eager",)])
    def test_registered(self, name: str):
        model = build_model("llama")
        before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
        self.addCleanup(lambda: ALL_ATTENTION_FUNCTIONS._local_mapping.update(before))
        with self.assert_only_here(model, "an attention function has been registered anew") as stack:
            mapping = ALL_ATTENTION_FUNCTIONS._local_mapping
            stack.callback(lambda: mapping.__delitem__(name))
            ALL_ATTENTION_FUNCTIONS[name] = in_user_code(sdpa_attention_forward)

    def test_replaced_cache_class(self):
        with self.assert_only_here(build_model("llama"), "the class of the cache has been replaced") as stack:
            module = sys.modules["transformers.generation.utils"]
            stack.enter_context(mock.patch.object(module, "DynamicCache", ForeignCache))

    def test_derived_module(self):
        class Derived(LlamaAttention):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        model = build_model("llama")
        model.model.layers[0].self_attn.__class__ = Derived
        with torch.no_grad():
            self.assertRegex(why_not_share(model), "Derived has a `forward` of its own")

    def test_instance(self):
        model = build_model("llama")
        with self.assert_only_here(model, "LlamaAttention has a `forward` of its own on the instance") as stack:
            attention = model.model.layers[1].self_attn
            stack.enter_context(mock.patch.object(attention, "forward", in_user_code(attention.forward)))

    @parameterized.expand([("model",), ("attention",), ("forward",)])
    def test_compiled(self, what: str):
        model = build_model("llama")
        if what == "model":
            model.compile(backend="eager")
        elif what == "attention":
            model.model.layers[1].self_attn.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")
        with torch.no_grad():
            self.assertRegex(why_not_share(model), "is compiled")

    def test_gradients(self):
        model = build_model("llama")
        self.assertEqual(why_not_share(model), "gradients are computed")
        model.requires_grad_(False)
        self.assertIsNone(why_not_share(model))

    @parameterized.expand([("flex_attention",), ("flash_attention_2",), ("mine",)])
    def test_other_implementation(self, name: str):
        model = build_model("llama")
        model.config._attn_implementation_internal = name
        with torch.no_grad():
            self.assertRegex(why_not_share(model), f"implementation '{name}', which can't read a prefix: use 'sdpa'")

    def test_eager_implementation(self):
        with torch.no_grad():
            self.assertIsNone(why_not_share(build_model("llama", attn_implementation="eager")))

    def test_caches(self):
        static = Cache(layers=[StaticSlidingWindowLayer(10, 8)])
        sliding = Cache(layers=[StaticSlidingWindowLayer(10, 8), DynamicSlidingWindowLayer(4)])
        for cache in (
            DynamicCache(),
            dynamic_cache(),
            sliding,
            Cache(layers=[StaticLayer(10)]),
            EncoderDecoderCache(static, DynamicCache()),
        ):
            self.assertIsNone(why_not_share_cache(cache))
        foreign_update = dynamic_cache()
        foreign_update.update = in_user_code(foreign_update.update)
        layer_update = dynamic_cache()
        layer_update.layers[1].update = in_user_code(layer_update.layers[1].update)
        obstacles = {
            "none of the layers of the Cache can be shared": static,
            "none of the layers": EncoderDecoderCache(static, static),
            "a tuple is no `Cache`": (),
            "a ForeignCache is not one of the library's": ForeignCache(),
            "none of the layers of the Cache can": Cache(layers=[ForeignLayer()]),
            "`update` has been replaced": foreign_update,
            "update` has been replaced": layer_update,
        }
        for pattern, cache in obstacles.items():
            with self.subTest(pattern):
                self.assertRegex(why_not_share_cache(cache) or "", pattern)
        offloaded = SimpleNamespace(offloading=True)
        with mock.patch.object(DynamicCache, "offloading", offloaded.offloading, create=True):
            cache = DynamicCache()
            cache.offloading = True
            self.assertEqual(why_not_share_cache(cache), "an offloaded cache can't be shared")

    @parameterized.expand([(ForeignCache,), (DynamicCache,)])
    def test_what_cannot_be_shared_is_repeated(self, cache_class: type):
        """A foreign cache as a whole, and a foreign layer by itself."""
        cache = cache_class()
        cache.update(*tokens(2, 7), 0)
        cache.update(*tokens(2, 7, seed=1), 1)
        if cache_class is DynamicCache:
            cache.layers[0].__class__ = ForeignLayer
        self.assertEqual(share_cache(cache, 3), 0 if cache_class is ForeignCache else 1)
        self.assertTrue(torch.equal(cache.layers[0].keys, tokens(2, 7)[0].repeat_interleave(3, dim=0)))
        self.assertEqual(cache.layers[1].keys.shape[0], 6)

    @parameterized.expand([("llama",), ("gpt_neox",), ("gemma3",), ("gpt2",), ("deepseek_v3",), ("bart",), ("t5",)])
    def test_models_that_share(self, name: str):
        with torch.no_grad():
            self.assertIsNone(why_not_share(build_model(name)))

    def test_replaced_code_still_gives_its_tokens(self):
        """End to end: `generate` copies, and user code gets tensors."""
        model, seen = build_model("llama"), []

        def doubled(states, repeats):
            seen.append(type(states))
            return repeat_kv(states * 1.5, repeats)

        repeat_kv = modeling_llama.repeat_kv
        model.set_attn_implementation("eager")
        arguments = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 5}
        plain = model.generate(**arguments)
        with mock.patch.object(modeling_llama, "repeat_kv", doubled):
            ours, theirs = (model.generate(**arguments, prompt_expansion=way) for way in (None, "recompute"))
        self.assertEqual(set(seen), {torch.Tensor})
        self.assertTrue(torch.equal(ours, theirs))
        self.assertFalse(torch.equal(ours, plain))


ROWS = st.integers(0, 10**6)
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 3)),
    st.tuples(st.just("update"), st.just(1)),
    *(st.tuples(st.just(name), ROWS) for name in ("reorder within", "reorder", "select", "select by mask")),
    st.tuples(st.just("crop"), st.integers(0, 4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    *(st.tuples(st.just(name), st.just(0)) for name in ("copy", "materialize", "set", "reset", "record")),
)


class RandomOperationsTest(unittest.TestCase):
    """Any sequence of operations, on a shared layer and on upstream's."""

    def assert_alike(self, shared: CacheLayerMixin, ordinary: CacheLayerMixin) -> None:
        self.assertEqual(int(shared.get_seq_length()), int(ordinary.get_seq_length()))
        self.assertEqual(shared.is_initialized, ordinary.is_initialized)
        for length in (1, 3):
            self.assertEqual(shared.get_mask_sizes(length), ordinary.get_mask_sizes(length))
        for ours, theirs in ((shared.keys, ordinary.keys), (shared.values, ordinary.values)):
            self.assert_equal(ours, theirs)

    def assert_equal(self, ours: Any, theirs: torch.Tensor | None) -> None:
        if theirs is None:
            self.assertIsNone(ours)
        else:
            self.assertTrue(torch.equal(joined(ours), theirs))

    def apply(self, name: str, number: int, cache: Cache, layer: CacheLayerMixin) -> Any:
        """Does it to a layer. Returns the layer, and what was seen."""
        rows = None if layer.keys is None else layer.keys.shape[0]
        generator = torch.Generator().manual_seed(number)
        if name == "update":
            return layer, layer.update(*tokens(rows or 4, number, seed=int(layer.get_seq_length())))
        if name == "reset":
            layer.reset()
        elif name == "record" and isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
        elif name == "copy":
            return copy.deepcopy(layer), None
        elif rows is None:
            pass
        elif name.startswith("reorder"):
            index = torch.randint(rows, (rows,), generator=generator)
            if name == "reorder within" and rows % 3 == 0:
                index = torch.arange(rows) // 3 * 3 + index % 3
            layer.reorder_cache(index)
        elif name == "select":
            layer.batch_select_indices(torch.randint(rows, (number % 7 + 1,), generator=generator))
        elif name == "select by mask":
            layer.batch_select_indices(torch.arange(rows) % (number % 3 + 1) == 0)
        elif name == "repeat" and rows * number <= 60:
            layer.batch_repeat_interleave(number)
        elif name == "set":
            layer.keys = joined(layer.keys).clone()
        elif name == "crop" and number <= min(layer.keys.shape[2], int(layer.get_seq_length())):
            try:
                layer.crop(-number)
            except RuntimeError as error:
                return layer, str(error)
        return layer, None

    @parameterized.expand([(None,), (2,), (4,), (9,), ("static",)])
    def test_like_upstream(self, window: int | str | None):
        tried = set()

        @given(st.integers(1, 3), st.integers(1, 9), st.lists(OPERATIONS, min_size=1, max_size=12))
        def check(batch, length, operations):
            cache, ordinary = shared_and_ordinary(window, batch, 3, length)
            shared = cache.layers[0]
            for name, number in operations:
                if name == "update" and window == "static" and int(ordinary.get_seq_length()) + number > MAX_CACHE_LEN:
                    continue
                if is_shared(shared):
                    tried.add(name)
                if name == "materialize":
                    cache.layers[0] = shared
                    materialize_cache(cache)
                    continue
                (shared, ours), (ordinary, theirs) = (
                    self.apply(name, number, cache, layer) for layer in (shared, ordinary)
                )
                if isinstance(theirs, tuple):
                    for our, their in zip(ours, theirs, strict=True):
                        self.assert_equal(our, their)
                else:
                    self.assertEqual(ours, theirs)
                self.assert_alike(shared, ordinary)

        check()
        # All of them must have been tried while there was a prompt
        self.assertEqual(len(tried), 12, tried)
