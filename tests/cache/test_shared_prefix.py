# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Layers that hold a prompt once for N rows: whatever is done to them, they are upstream's layer of the B * N rows, and the
prefix stays where the prefill put it.
"""

import copy
import itertools
import unittest
from collections.abc import Iterator

import torch
from parameterized import parameterized

import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.shared_prefix import (
    SELF_ATTENTION_LAYERS,
    SharedCrossAttentionLayer,
    SharedPrefixLayer,
    SharedPrefixSlidingWindowLayer,
    StaticSharedCrossAttentionLayer,
    StaticSharedPrefixLayer,
    cannot_share_cache,
    materialize_cache,
    share_cache,
)

from ..generation.test_shared_prefix_attention import Operators
from ..generation.tiny_models import DECODER_ONLY, ENCODER_DECODER, VOCABULARY, build_inputs, build_model


HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 4
MAX_CACHE_LEN = 60


def tokens(rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, HEADS, length, size, generator=generator) for size in (HEAD_DIM, VALUE_DIM))


def filled_layer(window: int | str | None, batch: int, length: int) -> CacheLayerMixin:
    """A layer of full attention, of a window, or static."""
    if window == "static":
        layer = StaticLayer(MAX_CACHE_LEN)
    else:
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    layer.update(*tokens(batch, length))
    return layer


def shared_and_ordinary(
    window: int | str | None = None, batch: int = 2, repeats: int = 3, length: int = 7, suffix_length: int = 0
) -> tuple[SharedPrefixLayer, CacheLayerMixin]:
    """A shared layer, and upstream's of the same tokens, whose rows were repeated."""
    ordinary = filled_layer(window, batch, length)
    shared = SELF_ATTENTION_LAYERS[type(ordinary)].from_layer(ordinary, repeats, suffix_length)
    ordinary.batch_repeat_interleave(repeats)
    return shared, ordinary


def update(layer: SharedPrefixLayer, new: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates a shared layer as an attention module does, and returns what its attention function sees."""
    kwargs = {"scaling": 1.0}
    seen = layer.update(*new, kwargs=kwargs)
    prefix = kwargs.pop("shared_prefix", None)
    assert kwargs == {"scaling": 1.0}
    if prefix is None:
        return seen
    prefix.is_read = True
    rows = [states.repeat_interleave(prefix.repeats, dim=0) for states in (prefix.keys, prefix.values)]
    return tuple(torch.cat(pair, dim=2) for pair in zip(rows, seen, strict=True))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SharedPrefixLayerTest(unittest.TestCase):
    def test_nothing_is_copied_to_share(self):
        layer = filled_layer(None, 2, 7)
        with Operators() as operators:
            shared = SharedPrefixLayer.from_layer(layer, 50)
        self.assertEqual(operators.largest, 0)
        self.assertIs(shared.prefix[0], layer.keys)
        self.assertIs(shared.prefix[1], layer.values)
        self.assertEqual(shared.keys.shape, (100, HEADS, 7, HEAD_DIM))

    def test_prefix_stays_where_it_is(self):
        shared, _ = shared_and_ordinary(length=200)
        prefix = shared.prefix
        for step in range(20):
            with Operators() as operators:
                kwargs = {}
                shared.update(*tokens(6, 1, seed=step), kwargs=kwargs)
                handed_over = kwargs["shared_prefix"]
                handed_over.is_read = True
                shared.reorder_cache(torch.tensor([0, 0, 1, 5, 4, 5]))
            self.assertIs(handed_over.keys, prefix[0])
            self.assertIs(handed_over.values, prefix[1])
            self.assertEqual(handed_over.repeats, 3)
            self.assertLess(operators.largest, prefix[0].numel())
        self.assertEqual(shared.suffix[0].shape, (6, HEADS, 20, HEAD_DIM))

    def test_reorder_allocates_the_suffix_alone(self):
        shared, ordinary = shared_and_ordinary(length=1000, suffix_length=2)
        update(shared, tokens(6, 2))
        with Operators() as operators:
            shared.reorder_cache(torch.tensor([2, 1, 0, 3, 3, 4]))
        self.assertEqual(operators.largest, 6 * HEADS * 2 * VALUE_DIM)
        with Operators() as operators:
            ordinary.reorder_cache(torch.tensor([2, 1, 0, 3, 3, 4]))
        self.assertEqual(operators.largest, 6 * HEADS * 1000 * VALUE_DIM)

    def test_beam_indices_are_checked_once_for_all_layers(self):
        layers = [shared_and_ordinary()[0] for _ in range(3)]
        index = torch.tensor([0, 0, 1, 5, 4, 5])
        counts = []
        for layer in layers:
            with Operators() as operators:
                layer.reorder_cache(index)
            counts.append("eq" in operators.names)
        self.assertEqual(counts, [True, False, False])

    def test_changed_beam_indices_are_checked_again(self):
        shared, ordinary = shared_and_ordinary()
        index = torch.tensor([0, 0, 1, 5, 4, 5])
        for position in (0, 1, 5):
            index[position] = 5 - position
            shared.reorder_cache(index)
            ordinary.reorder_cache(index)
            self.assertTrue(torch.equal(shared.keys, ordinary.keys))

    def test_beam_indices_made_in_inference_mode(self):
        shared, ordinary = shared_and_ordinary()
        with torch.inference_mode():
            index = torch.tensor([0, 0, 1, 5, 4, 5])
            for value in (1, 4):
                index[0] = value
                shared.reorder_cache(index)
                ordinary.reorder_cache(index)
        self.assertTrue(torch.equal(shared.keys, ordinary.keys))

    def test_rows_that_move_together_keep_sharing(self):
        """Swapped or selected items take their prefix along, once for all of their rows."""
        shared, _ = shared_and_ordinary()
        expected = shared.keys[[3, 4, 5, 0, 1, 2]]
        shared.reorder_cache(torch.tensor([3, 4, 5, 0, 1, 2]))
        self.assertEqual((shared.prefix[0].shape[0], shared.repeats), (2, 3))
        self.assertTrue(torch.equal(shared.keys, expected))
        shared.batch_select_indices(torch.tensor([4, 3]))
        self.assertEqual((shared.prefix[0].shape[0], shared.repeats), (1, 2))
        self.assertTrue(torch.equal(shared.keys, expected[[4, 3]]))

    def test_bytes(self):
        batch, repeats, length, size = 2, 3, 100, HEADS * (HEAD_DIM + VALUE_DIM) * 4
        shared, ordinary = shared_and_ordinary(length=length, suffix_length=20)
        self.assertEqual(shared.bytes_used, batch * length * size)
        self.assertEqual(shared.bytes_reserved, batch * length * size)
        for step in range(1, 21):
            update(shared, tokens(6, 1))
            shared.reorder_cache(torch.tensor([0, 0, 1, 5, 4, 5]))
            self.assertEqual(shared.bytes_used, (batch * length + batch * repeats * step) * size)
            self.assertEqual(shared.bytes_reserved, (batch * length + batch * repeats * 20) * size)
        self.assertEqual(ordinary.keys.nbytes + ordinary.values.nbytes, batch * repeats * length * size)

    @parameterized.expand([(0, 12), (200, 1), (150, 2)])
    def test_suffix_is_not_copied_every_step(self, suffix_length, most_buffers):
        shared, _ = shared_and_ordinary(suffix_length=suffix_length)
        buffers = []
        for step in range(200):
            update(shared, tokens(6, 1, seed=step))
            buffers.append(storage(shared.suffix[0]))
            self.assertLessEqual(shared.suffix[0].untyped_storage().nbytes(), max(2 * (step + 4), suffix_length) * 144)
        self.assertLessEqual(len(list(itertools.groupby(buffers))), most_buffers)
        expected = torch.cat([tokens(6, 1, seed=step)[0] for step in range(200)], dim=2)
        self.assertTrue(torch.equal(shared.suffix[0], expected))

    def test_views_stay_as_they_are(self):
        shared, _ = shared_and_ordinary(suffix_length=10)
        update(shared, tokens(6, 3))
        views = [*shared.suffix, *shared.prefix]
        expected = [view.clone() for view in views]
        shared.crop(-2)
        update(shared, tokens(6, 5, seed=1))
        shared.crop(-9)
        update(shared, tokens(6, 5, seed=2))
        shared.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
        for view, old in zip(views, expected, strict=True):
            self.assertTrue(torch.equal(view, old))

    def test_without_kwargs_it_goes_on_as_an_ordinary_layer(self):
        shared, ordinary = shared_and_ordinary()
        new = tokens(6, 1)
        keys, values = shared.update(*new)
        expected = ordinary.update(*new)
        self.assertTrue(torch.equal(keys, expected[0]) and torch.equal(values, expected[1]))
        self.assertEqual(shared.prefix, (None, None))
        kwargs = {}
        self.assertEqual(shared.update(*new, kwargs=kwargs)[0].shape[2], 9)
        self.assertEqual(kwargs, {})

    def test_a_prefix_that_nobody_reads_is_reported(self):
        shared, _ = shared_and_ordinary()
        shared.update(*tokens(6, 1), kwargs={})
        index = torch.arange(6)
        for call in (lambda: update(shared, tokens(6, 1)), lambda: shared.reorder_cache(index), shared.materialize):
            with self.assertRaisesRegex(RuntimeError, "did not read the shared prefix"):
                call()

    def test_wrong_arguments(self):
        layer = filled_layer(None, 2, 7)
        for repeats in (0, -1, 1.5, None):
            with self.assertRaisesRegex(ValueError, f"`repeats` must be .* but is {repeats}"):
                SharedPrefixLayer.from_layer(layer, repeats)
        with self.assertRaisesRegex(ValueError, "`layer` must be filled"):
            SharedPrefixLayer.from_layer(DynamicLayer(), 2)
        shared, _ = shared_and_ordinary()
        with self.assertRaisesRegex(ValueError, "`key_states` must have 6 rows .* but has 2"):
            shared.update(*tokens(2, 1), kwargs={})
        with self.assertRaisesRegex(ValueError, "of type torch.float32, .* but has 6 of type torch.float64"):
            shared.update(*(states.double() for states in tokens(6, 1)), kwargs={})
        with self.assertRaisesRegex(ValueError, "positive value"):
            shared.crop(1)
        with self.assertRaises(IndexError):
            shared.reorder_cache(torch.tensor([0, 1, 2, 3, 4, 6]))
        self.assertEqual(shared.get_seq_length(), 7)

    def test_copies_are_independent(self):
        shared, _ = shared_and_ordinary()
        update(shared, tokens(6, 2))
        expected = shared.keys
        copied = copy.deepcopy(shared)
        self.assertNotEqual(storage(copied.prefix[0]), storage(shared.prefix[0]))
        update(copied, tokens(6, 2, seed=1))
        copied.prefix[0].zero_()
        self.assertTrue(torch.equal(shared.keys, expected))

    def test_offload_moves_prefix_and_suffix(self):
        shared, _ = shared_and_ordinary()
        update(shared, tokens(6, 2))
        shared.device = torch.device("meta")
        shared.prefetch()
        self.assertEqual({states.device.type for states in (*shared.prefix, *shared.suffix)}, {"meta"})


class SharedSlidingWindowTest(unittest.TestCase):
    def test_the_window_leaves_the_prefix(self):
        shared, ordinary = shared_and_ordinary(window=5, length=9)
        visible = []
        for step in range(6):
            kwargs = {}
            shared.update(*tokens(6, 1, seed=step), kwargs=kwargs)
            prefix = kwargs.get("shared_prefix")
            visible.append(0 if prefix is None else prefix.keys.shape[2])
            if prefix is not None:
                prefix.is_read = True
            ordinary.update(*tokens(6, 1, seed=step))
            self.assertTrue(torch.equal(shared.keys, ordinary.keys))
        self.assertEqual(visible, [4, 3, 2, 1, 0, 0])
        self.assertEqual(shared.prefix, (None, None))

    def test_holds_the_window_alone(self):
        """After the prefill upstream's layer is a view of the whole prompt."""
        layer = filled_layer(5, 2, 100)
        self.assertGreater(layer.keys.untyped_storage().nbytes(), 20 * layer.keys.nbytes)
        shared = SharedPrefixSlidingWindowLayer.from_layer(layer, 3)
        self.assertEqual(shared.bytes_reserved, shared.bytes_used)
        self.assertEqual(shared.bytes_used, 2 * 4 * HEADS * (HEAD_DIM + VALUE_DIM) * 4)
        # No token leaves the window: nothing to copy then
        layer = filled_layer(200, 2, 100)
        self.assertIs(SharedPrefixSlidingWindowLayer.from_layer(layer, 3).prefix[0], layer.keys)

    def test_suffix_is_as_long_as_the_window(self):
        shared, _ = shared_and_ordinary(window=5, length=9, suffix_length=1000)
        for step in range(100):
            update(shared, tokens(6, 1, seed=step))
            self.assertLessEqual(shared.suffix[0].untyped_storage().nbytes(), 2 * 5 * 6 * HEADS * HEAD_DIM * 4)


class StaticSharedPrefixTest(unittest.TestCase):
    def test_no_buffer_moves(self):
        """The prefix is where the prefill wrote it, and the suffix where it was made, whatever is decoded."""
        ordinary = filled_layer("static", 2, 7)
        shared = StaticSharedPrefixLayer.from_layer(ordinary, 3)
        self.assertEqual(
            [storage(states) for states in shared.prefix], [storage(ordinary.keys), storage(ordinary.values)]
        )
        self.assertEqual([states.shape[:3] for states in shared.suffix], [(6, HEADS, MAX_CACHE_LEN - 7)] * 2)
        buffers = [*shared.prefix, *shared.suffix, shared.cumulative_length]
        addresses = [buffer.data_ptr() for buffer in buffers]
        # A suffix is a view of its buffer
        marked = [getattr(buffer, "_base", None) if buffer.shape[:1] == (6,) else buffer for buffer in buffers]
        self.assertTrue(all(hasattr(buffer, "_dynamo_static_input_type") for buffer in marked))
        for step in range(5):
            update(shared, tokens(6, 1, seed=step))
            shared.reorder_cache(torch.tensor([2, 0, 1, 5, 5, 3]))
        self.assertEqual(
            [buffer.data_ptr() for buffer in (*shared.prefix, *shared.suffix, shared.cumulative_length)], addresses
        )
        self.assertEqual(shared.get_seq_length(), 12)
        # The layer of the prefill is left as it is
        self.assertEqual(ordinary.get_seq_length(), 7)

    def test_bytes(self):
        shared, _ = shared_and_ordinary("static")
        token = HEADS * (HEAD_DIM + VALUE_DIM) * 4
        self.assertEqual(shared.bytes_used, (2 * 7 + 6 * (MAX_CACHE_LEN - 7)) * token)
        # The prefill's buffers had room for tokens to come, too
        self.assertEqual(shared.bytes_reserved, (2 * MAX_CACHE_LEN + 6 * (MAX_CACHE_LEN - 7)) * token)

    def test_more_tokens_than_room(self):
        shared, ordinary = shared_and_ordinary("static", length=MAX_CACHE_LEN)
        for layer in (shared, ordinary):
            with self.assertRaises((IndexError, RuntimeError)):
                layer.update(*tokens(6, 1), kwargs={})

    def test_cross_attention(self):
        cache = EncoderDecoderCache(*(Cache(layers=[filled_layer("static", 2, 7)]) for _ in range(2)))
        keys = cache.cross_attention_cache.layers[0].keys
        self.assertEqual(share_cache(cache, 3), 2)
        self.assertTrue(cache.is_compileable)
        cross = cache.cross_attention_cache.layers[0]
        self.assertIs(type(cross), StaticSharedCrossAttentionLayer)
        cache.reorder_cache(torch.tensor([0, 0, 1, 5, 4, 5]))
        self.assertIs(cross.keys, keys)
        materialize_cache(cache)
        plain = cache.cross_attention_cache.layers[0]
        self.assertIs(type(plain), StaticLayer)
        self.assertTrue(torch.equal(plain.keys, keys.repeat_interleave(3, dim=0)))


class ShareCacheTest(unittest.TestCase):
    def dynamic_cache(self, layers: int = 2, batch: int = 2) -> DynamicCache:
        cache = DynamicCache()
        for index in range(layers):
            cache.update(*tokens(batch, 7, seed=index), index)
        return cache

    def encoder_decoder_cache(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(self.dynamic_cache(), self.dynamic_cache())

    def test_in_place_and_back(self):
        cache, ordinary = self.dynamic_cache(), self.dynamic_cache()
        self.assertEqual(share_cache(cache, 3), 2)
        self.assertEqual([type(layer) for layer in cache.layers], [SharedPrefixLayer] * 2)
        ordinary.batch_repeat_interleave(3)
        for ours, theirs in zip(cache, ordinary, strict=True):
            self.assertTrue(torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and ours[2] is None)
        materialize_cache(cache)
        self.assertEqual([type(layer) for layer in cache.layers], [DynamicLayer] * 2)
        for ours, theirs in zip(cache.layers, ordinary.layers, strict=True):
            self.assertTrue(torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values))
            self.assertEqual(dict.fromkeys(vars(ours)), dict.fromkeys(vars(theirs)))

    def test_share_twice(self):
        cache = self.dynamic_cache()
        share_cache(cache, 3)
        self.assertEqual(share_cache(cache, 2), 2)
        self.assertEqual([(layer.repeats, layer.prefix[0].shape[0]) for layer in cache.layers], [(6, 2)] * 2)

    def test_layers_that_cannot_be_shared_repeat_their_rows(self):
        static = StaticSlidingWindowLayer(max_cache_len=10, sliding_window=8)
        static.update(*tokens(2, 7))
        one_token_window = filled_layer(1, 2, 7)
        cache = Cache(
            layers=[filled_layer(None, 2, 7), static, filled_layer(4, 2, 7), one_token_window, DynamicLayer()]
        )
        self.assertEqual(share_cache(cache, 3), 2)
        self.assertEqual(
            [type(layer) for layer in cache.layers],
            [
                SharedPrefixLayer,
                StaticSlidingWindowLayer,
                SharedPrefixSlidingWindowLayer,
                DynamicSlidingWindowLayer,
                DynamicLayer,
            ],
        )
        self.assertEqual([layer.keys.shape[0] for layer in cache.layers[:4]], [6] * 4)

    def test_cross_attention_stays_at_one_row_per_item(self):
        cache, ordinary = self.encoder_decoder_cache(), self.encoder_decoder_cache()
        keys = cache.cross_attention_cache.layers[0].keys
        self.assertEqual(share_cache(cache, 3), 4)
        cross = cache.cross_attention_cache.layers[0]
        self.assertIsInstance(cross, SharedCrossAttentionLayer)
        for index in ([0, 0, 1, 5, 4, 5], [2, 1, 0, 3, 3, 3]):
            with Operators() as operators:
                cache.reorder_cache(torch.tensor(index))
            self.assertLessEqual(operators.largest, 6)
            self.assertIs(cross.keys, keys)
        ordinary.batch_repeat_interleave(3)
        for layers in (cache, ordinary):
            layers.batch_select_indices(torch.tensor([4, 5, 2]))
        self.assertEqual(cross.keys.shape[0] * cross.repeats, 3)
        materialize_cache(cache)
        for ours, theirs in zip(
            [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers],
            [*ordinary.self_attention_cache.layers, *ordinary.cross_attention_cache.layers],
            strict=True,
        ):
            self.assertIs(type(ours), DynamicLayer)
            self.assertTrue(torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values))

    def test_parts_of_an_encoder_decoder_cache(self):
        cache = self.encoder_decoder_cache()
        self.assertEqual(share_cache(cache, 3, self_attention=False), 2)
        self.assertIs(type(cache.self_attention_cache.layers[0]), DynamicLayer)
        self.assertEqual(cache.self_attention_cache.layers[0].keys.shape[0], 6)
        cache = self.encoder_decoder_cache()
        self.assertEqual(share_cache(cache, 3, cross_attention=False), 2)
        self.assertIs(type(cache.cross_attention_cache.layers[0]), DynamicLayer)
        self.assertEqual(cache.cross_attention_cache.layers[0].keys.shape[0], 6)

    def test_cross_attention_that_is_computed_anew(self):
        cache = self.encoder_decoder_cache()
        share_cache(cache, 3)
        cache.reset()
        cross = cache.cross_attention_cache
        self.assertEqual(cross.update(*tokens(4, 5), 0, kwargs={})[0].shape, (4, HEADS, 5, HEAD_DIM))
        self.assertEqual(cross.layers[0].keys.shape[0], 4)

    def test_a_cache_with_other_states_repeats_as_a_whole(self):
        class RowCountingCache(DynamicCache):
            rows = 2

            def batch_repeat_interleave(self, repeats):
                super().batch_repeat_interleave(repeats)
                self.rows *= repeats

        cache = RowCountingCache()
        cache.update(*tokens(2, 7), 0)
        self.assertEqual(share_cache(cache, 3), 0)
        self.assertEqual((cache.rows, cache.layers[0].keys.shape[0]), (6, 6))
        self.assertIs(type(cache.layers[0]), DynamicLayer)

    def test_what_can_be_told_before(self):
        static = Cache(layers=[StaticSlidingWindowLayer(10, 8)])
        sliding = Cache(layers=[StaticSlidingWindowLayer(10, 8), DynamicSlidingWindowLayer(4)])
        full = Cache(layers=[StaticLayer(max_cache_len=10)])
        mixed = EncoderDecoderCache(static, DynamicCache())
        for cache in (DynamicCache(), self.dynamic_cache(), sliding, full, mixed):
            self.assertIsNone(cannot_share_cache(cache))
        shared = self.dynamic_cache()
        share_cache(shared, 3)
        self.assertIsNone(cannot_share_cache(shared))
        self.assertIn("none of the layers of the Cache", cannot_share_cache(static))
        self.assertIn("none of the layers", cannot_share_cache(EncoderDecoderCache(static, static)))
        self.assertIn("states beside those of its layers", cannot_share_cache(MiniMaxCache()))
        self.assertIn("a tuple is no `Cache`", cannot_share_cache(()))

    def test_wrong_repeats(self):
        cache = self.dynamic_cache()
        with self.assertRaisesRegex(ValueError, "`repeats` must be .* but is 0"):
            share_cache(cache, 0)
        self.assertEqual([type(layer) for layer in cache.layers], [DynamicLayer] * 2)


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "sliding_window": 5,
}


def build(name: str, implementation: str) -> transformers.PreTrainedModel:
    """Tiny models. Among those made here: every layer slides, scores with a soft cap, attention sinks."""
    torch.manual_seed(0)
    if name == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER))
    elif name == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(attn_logit_softcapping=2.0, **DECODER))
    elif name == "gpt_oss":
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=4, **DECODER))
    else:
        model = build_model(name)
    model.set_attn_implementation(implementation)
    return model.eval()


MODELS = [
    *((name, "sdpa") for name in (*DECODER_ONLY, *ENCODER_DECODER, "mistral")),
    *((name, "eager") for name in (*DECODER_ONLY, *ENCODER_DECODER, "mistral", "gemma2", "gpt_oss") if name != "gpt2"),
]


class DecodeTest(unittest.TestCase):
    """
    The same tokens are decoded with a shared cache and with upstream's of repeated rows: steps of one token and of three,
    rows that are reordered in between, prompts padded on the left.
    """

    batch, repeats = 2, 3

    def prefill(self, name: str, model) -> tuple[Cache, torch.Tensor, dict]:
        """Returns the cache of B rows, the mask of the decoder's prompt, and what the decoder needs from the encoder."""
        inputs = build_inputs(name, self.batch)
        if name not in ENCODER_DECODER:
            positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
            return model(**inputs, position_ids=positions, use_cache=True).cache, inputs["attention_mask"], {}
        start = torch.full((self.batch, 2), 3)
        outputs = model(**inputs, decoder_input_ids=start, use_cache=True)
        encoder = {"encoder_outputs": (outputs.encoder_last_hidden_state.repeat_interleave(self.repeats, dim=0),)}
        if "attention_mask" in inputs:
            encoder["attention_mask"] = inputs["attention_mask"].repeat_interleave(self.repeats, dim=0)
        return outputs.cache, torch.ones_like(start), encoder

    def decode(self, model, cache: Cache, prompt_mask: torch.Tensor, encoder: dict) -> Iterator[torch.Tensor]:
        rows, generator = self.batch * self.repeats, torch.Generator().manual_seed(1)
        mask = prompt_mask.repeat_interleave(self.repeats, dim=0)
        items = torch.arange(rows) // self.repeats * self.repeats
        for length in (1, 1, 3, 1, 1, 1, 1):
            new = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
            mask = torch.cat([mask, mask.new_ones(rows, length)], dim=1)
            if encoder:
                yield model(decoder_input_ids=new, decoder_attention_mask=mask, cache=cache, **encoder).logits
            else:
                positions = (mask.cumsum(-1) - 1)[:, -length:]
                yield model(new, attention_mask=mask, position_ids=positions, cache=cache).logits
            cache.reorder_cache(items + torch.randint(self.repeats, (rows,), generator=generator))

    @parameterized.expand(MODELS)
    @torch.no_grad()
    def test_same_logits(self, name: str, implementation: str):
        model = build(name, implementation)
        cache, mask, encoder = self.prefill(name, model)
        ordinary = copy.deepcopy(cache)
        ordinary.batch_repeat_interleave(self.repeats)
        # T5 takes the length of its position bias from the keys of its own decoder, but not from those of its encoder
        shared_layers = share_cache(cache, self.repeats, self_attention=name != "t5")
        self.assertEqual(shared_layers, 4 if name in ("bart", "whisper") else 2)
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if encoder else [cache]
        shared = [layer for part in parts for layer in part.layers if isinstance(layer, SharedPrefixLayer)]
        prefixes = [states for layer in shared for states in layer.prefix]
        expected = [states.clone() for states in prefixes]

        ours, theirs = self.decode(model, cache, mask, encoder), self.decode(model, ordinary, mask, encoder)
        for our_logits, their_logits in zip(ours, theirs, strict=True):
            self.assertGreater(their_logits.std().item(), 0.1)
            # Relative to the largest: the random weights are large, and so are the logits (up to 10)
            difference = (our_logits - their_logits).abs().max() / their_logits.abs().max()
            self.assertLess(difference.item(), 1e-5)

        for states, old in zip(prefixes, expected, strict=True):
            self.assertTrue(torch.equal(states, old))
        # GPT-NeoX calls `update` without its `kwargs`; windows have left the prompt behind
        kept = [layer for layer in shared if layer.prefix[0] is not None]
        self.assertEqual(
            len(kept), {"gpt_neox": 0, "mistral": 0}.get(name, len(shared) - ("ge" in name or "oss" in name))
        )
        materialize_cache(cache)
        self.assertFalse(any(isinstance(layer, SharedPrefixLayer) for part in parts for layer in part.layers))
        self.assertEqual(cache.get_seq_length(), ordinary.get_seq_length())
