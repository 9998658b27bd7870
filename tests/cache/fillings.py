# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Tiny models that fill each kind of cache with any rows of two fixed items, so that a cache whose rows were repeated can
be compared with one that was filled with repeated rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache as memoize
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import transformers
from tests.generation.architectures.configs import tiny_config
from transformers.cache_utils import (
    DFlashCache,
    DynamicCache,
    EncoderDecoderCache,
    MtpCache,
    QuantizedCache,
    StaticCache,
)
from transformers.models.kyutai_speech_to_text.modeling_kyutai_speech_to_text import (
    KyutaiSpeechToTextConv1dPaddingCache,
)
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.reformer.modeling_reformer import ReformerDynamicCache
from transformers.models.voxtral_realtime.modeling_voxtral_realtime import (
    VoxtralRealtimeConv1dPaddingCache,
    VoxtralRealtimeEmbedder,
)
from transformers.models.xlstm.modeling_xlstm import xLSTMCache


MAX_CACHE_LEN = 24
ITEMS = 2


def _random_ids(length: int, seed: int) -> torch.LongTensor:
    return torch.randint(3, 95, (ITEMS, length), generator=torch.Generator().manual_seed(seed))


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(ITEMS, *shape, generator=torch.Generator().manual_seed(seed))


class Filling:
    """
    How a tiny model fills one kind of cache. `rows` are indices of the two items: `[0, 0, 1, 1]` is each one twice.

    Args:
        new_cache (`Callable`): Makes an empty cache from the number of rows. Most kinds don't depend on it.
    """

    def __init__(self, new_cache: Callable[[int], Any]):
        self.new_cache = new_cache

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def step(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        """Forwards what comes after the prompt. Returns outputs with one row for each of `rows`."""
        raise NotImplementedError

    def fill(self, rows: Sequence[int]) -> Any:
        cache = self.new_cache(len(rows))
        with torch.no_grad():
            self.prefill(cache, rows)
        return cache

    def next(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.step(cache, rows)


@memoize
def _model(model_type: str, auto_class: str, overrides: tuple[tuple[str, Any], ...]) -> transformers.PreTrainedModel:
    config = tiny_config(model_type)
    fields = config.to_dict() | dict(overrides)
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    config = type(config)(**{**fields, **lists})
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(config).eval()


class TextFilling(Filling):
    """A language model that is prefilled with `length` tokens and then takes one token, `steps` of them beforehand."""

    cache_name = "cache"

    def __init__(
        self,
        model_type: str,
        new_cache: Callable[..., Any],
        length: int = 12,
        steps: int = 0,
        auto_class: str = "AutoModelForCausalLM",
        **overrides: Any,
    ):
        self.model = _model(model_type, auto_class, tuple(overrides.items()))
        self.prompt, self.token = _random_ids(length, seed=1), _random_ids(1, seed=2)
        self.steps = steps
        super().__init__(lambda rows: new_cache(self.model.config, rows))

    def forward(self, cache: Any, input_ids: torch.LongTensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=True, **{self.cache_name: cache}).logits[:, -1]

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        for input_ids in (self.prompt, *[self.token] * self.steps):
            self.forward(cache, input_ids[rows])

    def step(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        return self.forward(cache, self.token[rows])


class ReformerFilling(TextFilling):
    cache_name = "past_buckets_states"


class EarlyInitialization(TextFilling):
    """A static cache that is allocated, but empty."""

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        config = self.model.config
        heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        cache.early_initialization(len(rows), heads, head_dim, torch.float32, torch.device("cpu"))


class RecordedPast(TextFilling):
    """A cache that keeps what has left its window, until a token is taken back."""

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        cache.activate_past_recording()
        super().prefill(cache, rows)
        self.forward(cache, self.token[rows])

    def step(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        cache.crop(-1)
        return super().step(cache, rows)


class EncoderDecoderFilling(TextFilling):
    """The decoder of an encoder-decoder model, which also caches the keys and values of the encoder's output."""

    def __init__(self, model_type: str, new_cache: Callable[..., Any]):
        super().__init__(model_type, new_cache, length=4, auto_class="AutoModelForSeq2SeqLM")
        with torch.no_grad():
            self.encoded = self.model.get_encoder()(_random_ids(7, seed=3)).last_hidden_state

    def forward(self, cache: Any, input_ids: torch.LongTensor) -> torch.Tensor:
        encoded = self.encoded[[0 if torch.equal(row, self.first(input_ids)) else 1 for row in input_ids]]
        outputs = self.model(encoder_outputs=(encoded,), decoder_input_ids=input_ids, cache=cache, use_cache=True)
        return outputs.logits[:, -1]

    def first(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        return (self.prompt if input_ids.shape[1] > 1 else self.token)[0]


class MimiEncoderFilling(Filling):
    """The streaming convolutions that turn a chunk of audio into latents: left context of each is cached."""

    def __init__(self):
        torch.manual_seed(0)
        config = transformers.MimiConfig(
            num_filters=4,
            hidden_size=8,
            upsampling_ratios=[2, 2],
            upsample_groups=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        encoder = transformers.MimiModel(config).eval().encoder.encoder_seanet
        self.encoder, self.chunks = encoder, (_random(1, 64, seed=4), _random(1, 8, seed=5))
        convolutions = [encoder.get_submodule(name) for name in encoder._conv1d_layer_names]
        super().__init__(
            lambda rows: KyutaiSpeechToTextConv1dPaddingCache(
                num_layers=len(convolutions),
                per_layer_padding=[convolution.padding_total for convolution in convolutions],
                per_layer_padding_mode=[convolution.pad_mode for convolution in convolutions],
                per_layer_in_channels=[convolution.in_channels for convolution in convolutions],
            )
        )

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        self.encoder(self.chunks[0][rows], padding_cache=cache)

    def step(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        return self.encoder(self.chunks[1][rows], padding_cache=cache)


class VoxtralEmbedderFilling(Filling):
    """The two streaming convolutions in front of an audio encoder."""

    def __init__(self):
        torch.manual_seed(0)
        config = transformers.VoxtralRealtimeEncoderConfig(num_mel_bins=4, hidden_size=8)
        self.embedder = VoxtralRealtimeEmbedder(config).eval()
        self.chunks = (_random(4, 8, seed=6), _random(4, 4, seed=7))
        super().__init__(lambda rows: VoxtralRealtimeConv1dPaddingCache())

    def prefill(self, cache: Any, rows: Sequence[int]) -> None:
        self.embedder(self.chunks[0][rows], padding_cache=cache)

    def step(self, cache: Any, rows: Sequence[int]) -> torch.Tensor:
        return self.embedder(self.chunks[1][rows], padding_cache=cache)


def dynamic(config: Any, rows: int) -> DynamicCache:
    return DynamicCache(config=config)


def static(config: Any, rows: int) -> StaticCache:
    return StaticCache(config=config, max_cache_len=MAX_CACHE_LEN)


def quantized(backend: str, config: Any, rows: int) -> QuantizedCache:
    if backend == "fp8":
        return QuantizedCache(backend, config)
    if backend == "quanto":
        _unpack_without_compiling()
    return QuantizedCache(backend, config, q_group_size=16, residual_length=4)


def _unpack_without_compiling() -> None:
    """Gives quanto its one operation that it would compile at the first use, which takes minutes."""
    from optimum.quanto.library.extensions import get_extension

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)


def encoder_decoder(new_self: Callable, new_cross: Callable, config: Any, rows: int) -> EncoderDecoderCache:
    return EncoderDecoderCache(new_self(config, rows), new_cross(config, rows))


QUANTO, HQQ, FP8 = (partial(quantized, backend) for backend in ("quanto", "hqq", "fp8"))
M3_SPARSE = ("full_attention", "minimax_m3_sparse")
THREE_LAYERS = ("full_attention", "linear_attention", "full_attention")

# Name -> how to build it. Sliding windows are 8 tokens long, the prompt 12 unless it says otherwise
STATIC_FILLINGS: dict[str, Callable[[], Filling]] = {
    "static": partial(TextFilling, "llama", static),
    "static_early_initialized": partial(EarlyInitialization, "llama", static),
    "static_sliding": partial(TextFilling, "gemma3_text", static),
    "static_sliding_not_full": partial(TextFilling, "gemma3_text", static, length=5),
    "static_sliding_becomes_full": partial(TextFilling, "gemma3_text", static, length=8),
    "static_indexed": partial(TextFilling, "deepseek_v32", static),
    "static_indexed_positions": partial(TextFilling, "qwen4_exp_text", static),
    "static_dummy": partial(TextFilling, "gemma3n_text", static),
    "static_hybrid": partial(TextFilling, "falcon_h1", static),
    "static_hybrid_sliding": partial(TextFilling, "inkling_text", static),
    "static_linear": partial(TextFilling, "jamba", static),
    "static_minimax_m3_vl": partial(TextFilling, "minimax_m3_vl_text", static, layer_types=M3_SPARSE),
    "static_unlimited_ocr": partial(TextFilling, "unlimited_ocr", static, auto_class="AutoModelForImageTextToText"),
    "static_unlimited_ocr_decoding": partial(
        TextFilling, "unlimited_ocr", static, steps=2, auto_class="AutoModelForImageTextToText"
    ),
    "static_encoder_decoder": partial(EncoderDecoderFilling, "bart", partial(encoder_decoder, static, static)),
}
LINEAR_FILLINGS: dict[str, Callable[[], Filling]] = {
    "mamba": partial(TextFilling, "mamba", dynamic),
    "mamba2": partial(TextFilling, "mamba2", dynamic),
    "conv": partial(TextFilling, "lfm2", dynamic, layer_types=("conv", "full_attention")),
    "jamba": partial(TextFilling, "jamba", dynamic),
    "qwen3_next": partial(TextFilling, "qwen3_next", dynamic),
    "hybrid": partial(TextFilling, "falcon_h1", dynamic),
    "hybrid_zaya": partial(TextFilling, "zaya", dynamic),
    "hybrid_sliding": partial(TextFilling, "inkling_text", dynamic),
}
DYNAMIC_FILLINGS: dict[str, Callable[[], Filling]] = {
    "dynamic": partial(TextFilling, "llama", dynamic),
    "dynamic_without_config": partial(TextFilling, "llama", lambda config, rows: DynamicCache()),
    "mtp": partial(TextFilling, "llama", lambda config, rows: MtpCache(config=config)),
    "dflash": partial(TextFilling, "llama", lambda config, rows: DFlashCache(config=config)),
    "sliding": partial(TextFilling, "gemma3_text", dynamic),
    "sliding_not_full": partial(TextFilling, "gemma3_text", dynamic, length=5),
    "sliding_recorded_past": partial(RecordedPast, "gemma3_text", dynamic),
    "conv_recorded_past": partial(RecordedPast, "lfm2", dynamic, layer_types=("conv", "full_attention")),
    "indexed": partial(TextFilling, "deepseek_v32", dynamic),
    "indexed_positions": partial(TextFilling, "qwen4_exp_text", dynamic),
    "dummy": partial(TextFilling, "gemma3n_text", dynamic),
    "minimax_m3_vl": partial(TextFilling, "minimax_m3_vl_text", dynamic, layer_types=M3_SPARSE),
    "deepseek_v4": partial(TextFilling, "deepseek_v4", dynamic),
    "unlimited_ocr": partial(TextFilling, "unlimited_ocr", dynamic, auto_class="AutoModelForImageTextToText"),
    "unlimited_ocr_decoding": partial(
        TextFilling, "unlimited_ocr", dynamic, steps=2, auto_class="AutoModelForImageTextToText"
    ),
    "encoder_decoder": partial(EncoderDecoderFilling, "bart", partial(encoder_decoder, dynamic, dynamic)),
    "encoder_decoder_mixed": partial(EncoderDecoderFilling, "bart", partial(encoder_decoder, dynamic, static)),
    "minimax": partial(TextFilling, "minimax", lambda config, rows: MiniMaxCache()),
    "minimax_attention_last": partial(
        TextFilling,
        "minimax",
        lambda config, rows: MiniMaxCache(),
        layer_types=THREE_LAYERS,
        num_hidden_layers=len(THREE_LAYERS),
    ),
    "reformer": partial(ReformerFilling, "reformer", lambda config, rows: ReformerDynamicCache(), length=16),
    "xlstm": partial(
        TextFilling, "xlstm", lambda config, rows: xLSTMCache(config, max_batch_size=rows, dtype=torch.float32)
    ),
    "kyutai_padding": MimiEncoderFilling,
    "voxtral_realtime_padding": VoxtralEmbedderFilling,
    **LINEAR_FILLINGS,
}
# Group-wise stores are filled to the brim by the prompt: further tokens lie beside them, until there are four
QUANTIZED_FILLINGS: dict[str, Callable[[], Filling]] = {
    "fp8": partial(TextFilling, "llama", FP8),
    "fp8_decoding": partial(TextFilling, "llama", FP8, steps=2),
    "quanto": partial(TextFilling, "llama", QUANTO),
    "quanto_residual": partial(TextFilling, "llama", QUANTO, steps=2),
    "hqq": partial(TextFilling, "llama", HQQ),
    "hqq_residual": partial(TextFilling, "llama", HQQ, steps=2),
}
FILLINGS = {**DYNAMIC_FILLINGS, **STATIC_FILLINGS}


def states(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each tensor and each number that a cache holds, with its name."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from states(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from states(item, f"{name}.{position}")
    elif "Cache" in type(value).__name__ or "Layer" in type(value).__name__:
        yield from states({key: item for key, item in vars(value).items() if key != "config"}, name)


def addresses(cache: Any) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in states(cache) if isinstance(value, torch.Tensor)}
