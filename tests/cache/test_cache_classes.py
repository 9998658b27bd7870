# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""No cache class of the library is forgotten: each one is filled and repeated by a test, or named here with a reason."""

import importlib
import re
import unittest
from collections.abc import Iterator
from functools import cache as memoize
from pathlib import Path
from typing import Any

from parameterized import parameterized

import transformers
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.models.nemotron3_5_asr.modeling_nemotron3_5_asr import Nemotron3_5AsrForRNNT
from transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming import NemotronAsrStreamingForRNNT
from transformers.models.parakeet.modeling_parakeet import ParakeetForRNNT, ParakeetForTDT

from .fillings import FILLINGS, QUANTIZED_FILLINGS
from .test_batch_expansion import ONE_EACH, available


PACKAGE = Path(transformers.__file__).parent
ROOTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer)

ABSTRACT = "a base class: its subclasses are filled"
GREEDY = "models that decode greedily only, with one row per item"
CODEC = "streaming state of a codec or an audio encoder that `generate` doesn't keep between prefill and decoding"
POOL = "blocks of continuous batching, which has its own way to branch a request"
VIDEO = "features of video frames, of models that don't generate"
PART = "a layer of a cache that is filled as a whole"
NOT_FILLED = {
    "Cache": ABSTRACT,
    "CacheLayerMixin": ABSTRACT,
    "LinearAttentionCacheLayerMixin": ABSTRACT,
    "BaseQuantizedLayer": ABSTRACT,
    "QuantizedLayer": ABSTRACT,
    "ParakeetRNNTDecoderCache": GREEDY,
    "ParakeetTDTDecoderCache": GREEDY,
    "NemotronAsrStreamingRNNTDecoderCache": GREEDY,
    "Nemotron3_5AsrRNNTDecoderCache": GREEDY,
    "NemotronAsrStreamingConv1dCacheLayer": GREEDY,
    "NemotronAsrStreamingConv1dPaddingCache": GREEDY,
    "NemotronAsrStreamingEncoderCausalConv1dCacheLayer": GREEDY,
    "NemotronAsrStreamingEncoderCausalConv2dCacheLayer": GREEDY,
    "NemotronAsrStreamingEncoderCausalConvPaddingCache": GREEDY,
    "MimiConv1dPaddingCache": CODEC,
    "PocketTTSAudioTokenizerConv1dPaddingCache": CODEC,
    "MuseSparkAudioConv1dCacheLayer": CODEC,
    "MuseSparkAudioConv1dPaddingCache": CODEC,
    "VibeVoiceAcousticTokenizerConv1dCacheLayer": CODEC,
    "VibeVoiceAcousticTokenizerConv1dPaddingCache": CODEC,
    "VibeVoiceAsrConv1dCacheLayer": CODEC,
    "VibeVoiceAsrConv1dPaddingCache": CODEC,
    "VoxtralRealtimeConv1dCacheLayer": PART,
    "PagedAttentionCache": POOL,
    "EdgeTamVideoInferenceCache": VIDEO,
    "Sam2VideoInferenceCache": VIDEO,
    "Sam3TrackerVideoInferenceCache": VIDEO,
    "Sam3VideoInferenceCache": VIDEO,
    "Nemotron3DiarizationSpeakerCache": "embeddings of speakers, of a model that doesn't generate",
    "AssistantVocabTranslatorCache": "vocabulary mappings, no states of a model",
    "OmDetTurboLRUCache": "embeddings of class names, no states of a model",
}
# Packages whose layers have tests of their own
TESTED_ELSEWHERE = ("prefix_sharing",)


@memoize
def sources() -> dict[str, str]:
    """Module name -> source, for all that can define a cache. Modular files are templates, dummy files stand-ins."""
    paths = [
        path
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith(("modular_", "dummy_")) and path.parent.name not in TESTED_ELSEWHERE
    ]
    modules = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): path for path in paths}
    return {module: path.read_text(encoding="utf-8") for module, path in modules.items()}


def derived_classes() -> dict[str, type]:
    """All classes of the library that derive from `ROOTS`, `ROOTS` included, found by the names of their bases."""
    heads = [
        (module, name, set(re.findall(r"\w+", bases)))
        for module, source in sources().items()
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\)", source, re.MULTILINE)
    ]
    names = {root.__name__ for root in ROOTS}
    found = {root.__name__: root for root in ROOTS}
    while new := [(module, name) for module, name, bases in heads if name not in names and bases & names]:
        for module, name in new:
            found[name] = getattr(importlib.import_module(module), name)
            names.add(name)
    return found


def named_classes() -> set[str]:
    """All classes of the library that are called a cache or a layer of one."""
    pattern = r"^class (\w*(?:Cache|CacheLayer))(?:\((?!.*(?:Module|Allocator)).*\))?:"
    return {name for source in sources().values() for name in re.findall(pattern, source, re.MULTILINE)}


def classes_of(cache: Any) -> Iterator[type]:
    yield type(cache)
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, part):
            yield from classes_of(getattr(cache, part))
    layers = getattr(cache, "layers", [])
    for layer in layers.values() if isinstance(layers, dict) else layers:
        yield type(layer)


@memoize
def filled_classes() -> set[str]:
    """The classes of all caches and layers that test_batch_expansion.py fills, repeats and compares."""
    builders = {**FILLINGS, **{name: build for name, build in QUANTIZED_FILLINGS.items() if available(name)}}
    return {cls.__name__ for build in builders.values() for cls in classes_of(build().fill(ONE_EACH))}


class CacheClassesTest(unittest.TestCase):
    def test_derived_classes(self):
        found = derived_classes()
        self.assertTrue(all(issubclass(cls, ROOTS) for cls in found.values()))
        # The ones in modeling files were found, too
        self.assertIn("DeepseekV4CSACache", found)
        self.assertIn("UnlimitedOcrStaticReferenceSlidingWindowLayer", found)
        for name, cls in sorted(found.items()):
            with self.subTest(cls=name):
                self.assertTrue(callable(cls.batch_repeat_interleave))
                self.assertTrue(callable(cls.batch_select_indices))
        missing = found.keys() - filled_classes() - NOT_FILLED.keys()
        if not available("quanto"):
            missing -= {"QuantoQuantizedLayer"}
        if not available("hqq"):
            missing -= {"HQQQuantizedLayer"}
        self.assertEqual(missing, set())

    def test_other_caches(self):
        found = named_classes()
        self.assertIn("xLSTMCache", found)
        self.assertIn("MimiConv1dPaddingCache", found)
        self.assertEqual(found - filled_classes() - NOT_FILLED.keys(), set())

    def test_reasons_are_needed(self):
        known = derived_classes().keys() | named_classes()
        self.assertEqual(NOT_FILLED.keys() - known, set())
        self.assertEqual(NOT_FILLED.keys() & filled_classes() - {"VoxtralRealtimeConv1dCacheLayer"}, set())

    @parameterized.expand(
        [(cls,) for cls in (ParakeetForRNNT, ParakeetForTDT, NemotronAsrStreamingForRNNT, Nemotron3_5AsrForRNNT)]
    )
    def test_transducers_decode_greedily_only(self, model_class: type):
        self.assertEqual(model_class._supported_generation_modes, [GenerationMode.GREEDY_SEARCH])
